"""Launch parameters of the tiled route for a group and a microbatch, whatever jobs run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weftune.ops.lora.rows import BLOCK, Rows
from weftune.ops.lora.table import ALIGNMENT, BAND, Group

MIN_RANK = 16
"""Smallest number of ranks that kernels multiply at once."""
ONE_READ_RANKS = 64
"""Maximum ranks of a site for reading dy once: above, the shares of ds are larger than dy."""
TOGETHER_RANKS = 256
"""Maximum ranks of all parts that fit a program's registers; above, each part has separate programs."""
LARGE_SHARED_MEMORY = 160 << 10
"""Bytes of shared memory with which the blocks for 16 bits were measured."""
PROGRAMS = 128
"""Number of programs that keep a large GPU's memory busy; sums over many columns are split to approach it."""
MASKING_PROGRAMS = 512
"""Number of programs that keep the memory busy if they also draw masks, and so wait for arithmetic."""
DIRECT_RANKS = 64
"""Maximum ranks of a site that a fused product has registers for; above, their addition is written first."""
FUSED_SHARED_MEMORY = 227 << 10
"""Bytes of shared memory that the blocks of a fused product need."""
BESIDE_COLUMNS = 32
"""Fixed cost of a round of a fused product, in columns."""
FUSED_COLUMNS = 128
"""Columns of which the start of every part of a fused product is a multiple."""
CODED_INNER = 128
"""Inner dimension that a program of a fused product processes at a time with 8-bit operands."""
ROUGH_SUMS = 1 << 15
"""Maximum length of a sum of 8-bit products in a tensor core. Hopper's tensor cores keep some 14 bits of such
a sum and truncate the rest, so that it is too small by up to 2⁻¹⁴ for every 32 products. Up to this length
that is less than the rounding error of the operands; longer sums are accumulated in float32, for which blocks
of 256 columns have no registers."""


class ProductPlan(StrEnum):
    """The plan of the tiled route: whether the adapters' part is added to a frozen product that the library
    has written in float32, or inside a fused product before it is written; and whether dA and dB are computed
    concurrently with the product of the backward, which costs a second read of dy, or before it.

    All of them sum in float32 and round once. A newly initialised adapter adds less than the last digit of
    the frozen product, so a product rounded before the addition would lose it.
    """

    wide = "wide"
    fused = "fused"
    wide_beside = "wide, beside"
    fused_beside = "fused, beside"

    @property
    def fuses(self) -> bool:
        return self in (ProductPlan.fused, ProductPlan.fused_beside)

    @property
    def beside(self) -> bool:
        return self in (ProductPlan.wide_beside, ProductPlan.fused_beside)


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """The block that a program of one kernel processes."""

    columns: int
    warps: int
    stages: int
    rows: int = 64
    """Rows at a time, for kernels that loop over a piece; the others process a tile."""
    together: int = 1
    """Parts per program, for kernels that read x once for several."""


@dataclass(frozen=True, slots=True)
class ProductBlocks:
    """The block that a program of a fused product processes at a time, and the number of programs."""

    columns: int
    inner: int
    stages: int
    programs: int
    group: int = 8
    """Number of row blocks that share their columns in the cache."""
    warps: int = 8
    rough: int | None = None
    """Number of products of 8-bit operands that a tensor core may sum by itself. None means all."""


@dataclass(frozen=True, slots=True)
class Tiling:
    down: KernelLaunch
    up: KernelLaunch
    """Launch of `up`, and of the adapters' part of dx."""
    ds: KernelLaunch
    """Launch of ds without dB."""
    ds_db: KernelLaunch
    db: KernelLaunch
    """Launch of dB alone: small enough to run concurrently with a product."""
    da: KernelLaunch
    large_y: KernelLaunch
    """Launch of the addition of large slots, which is written before a fused product."""
    large_dx: KernelLaunch
    y: ProductBlocks
    dx: ProductBlocks
    split: int
    """Number of programs that share the sum over K of one tile."""
    ds_split: int
    """Number of programs that share the sum of ds alone over the outputs of a part."""
    one_read: bool
    """Whether ds and dB come from one read of dy."""


@dataclass(frozen=True, slots=True)
class SiteCall:
    """One use of a group by one microbatch."""

    group: Group
    rows: Rows
    training: bool
    tiling: Tiling
    plan: ProductPlan = ProductPlan.wide

    @property
    def sites(self) -> int:
        return len(self.group.columns)

    @property
    def bands(self) -> int:
        return self.group.bands

    @property
    def parts(self) -> int:
        return self.sites * self.bands

    @property
    def ranks(self) -> int:
        """Ranks of one part, rounded up to a power of two."""
        return rank_block(self.group.rank)

    @property
    def has_large(self) -> bool:
        """Whether a slot may have more ranks at a site than a fused product takes by itself."""
        return self.group.rank > DIRECT_RANKS

    @property
    def drops(self) -> bool:
        """Whether kernels draw dropout masks."""
        return self.group.drops and self.training

    @property
    def slots(self) -> int:
        return len(self.rows.key_S)

    @property
    def columns(self) -> tuple[int, ...]:
        return tuple(edge for part in self.group.columns for edge in part)

    @property
    def adapters(self) -> tuple[Tensor, ...]:
        """Keys of dropout masks, token indices, and the adapters' addresses, ranks, thresholds and names."""
        rows, table = self.rows, self.group.table
        own = table.address_PS4, table.rank_PS, table.threshold_PS, table.crc_P
        return rows.key_S, rows.token_index_T, *own

    @property
    def output_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Addresses of the scales of outputs, and whether each scales the bias."""
        scales = self.group.g_out
        return (None, None) if scales is None else (scales.address_PSA, scales.number_PSn)

    def blocks(self, columns: int) -> list[int]:
        """Return the number of blocks of `columns` columns in each site's output."""
        return [-(-(high - low) // columns) for low, high in self.group.columns]

    def alignment(self, operand: Tensor) -> int:
        return ALIGNMENT if self.group.table.aligned else operand.element_size()

    def constants(self, operand: Tensor, launch: KernelLaunch | ProductBlocks) -> dict[str, Any]:
        """Return the constants that the kernels of a site share, for operands of one dtype."""
        return {
            "S": self.slots,
            "P": self.parts,
            "R": self.ranks,
            "C": launch.columns,
            "ALIGNMENT": self.alignment(operand),
            "PRECISION": precision(operand),
            "num_warps": launch.warps,
            "num_stages": launch.stages,
        }


def precision(operand: Tensor) -> str:
    """Return the precision of products: exact for float32; without effect for 16 bits."""
    return "ieee" if operand.dtype == torch.float32 else "tf32"


def rank_block(rank: int) -> int:
    """Return the ranks of a part, at most a band, rounded up to a power of two that a tensor core takes."""
    return max(MIN_RANK, 1 << (min(rank, BAND) - 1).bit_length())


def parts_together(group: Group) -> int:
    """Return the number of parts of one band that share a program: all sites, or 1."""
    sites = len(group.columns)
    return sites if sites * rank_block(group.rank) <= TOGETHER_RANKS else 1


def choose_tiling(rows: Rows, group: Group, features: int, dtype: torch.dtype) -> Tiling:
    """Return blocks that fit the registers and the shared memory of the device."""
    count, device, half = len(rows.token_index_T), rows.buffer.device, dtype.itemsize == 2
    launches = _launches_for_16_bits(group, device) if half else _launches_for_32_bits(group)
    if half and _crowded(rows, group, launches["ds_db"], device):
        launches["ds_db"] = replace(launches["ds_db"], stages=2)
    tiles, narrowest = -(-count // rows.tile), min(high - low for low, high in group.columns)
    programs = MASKING_PROGRAMS if group.drops else PROGRAMS
    dx = blocks_for(count, ((0, features),), dtype, device)
    return Tiling(
        **launches,
        y=blocks_for(count, group.columns, dtype, device),
        dx=replace(dx, programs=_programs_for(dx, count, features)),
        split=_split(programs // tiles, features, launches["down"]),
        ds_split=_split(PROGRAMS // (tiles * len(group.columns)), narrowest, launches["ds"]),
        one_read=group.rank <= ONE_READ_RANKS,
    )


def _split(max_shares: int, width: int, launch: KernelLaunch) -> int:
    """Return the shares of a sum over `width` columns: a power of two, so that few kernels are compiled."""
    shares = max(1, min(max_shares, width // (4 * launch.columns)))
    return 1 << shares.bit_length() - 1


def _crowded(rows: Rows, group: Group, launch: KernelLaunch, device: torch.device) -> bool:
    """Return whether several programs share a multiprocessor, which leaves less room for prefetching."""
    blocks = sum(-(-(high - low) // launch.columns) for low, high in group.columns)
    return blocks * -(-len(rows.token_index_T) // rows.piece) > _programs(device)


def plans_for(weight_NK: Tensor, group: Group, device: torch.device) -> tuple[ProductPlan, ...]:
    """Return the plans that the weight, the group and the device allow."""
    allowed = fuses(weight_NK, device) and all(low % FUSED_COLUMNS == 0 for low, _ in group.columns)
    always = ProductPlan.wide, ProductPlan.wide_beside
    return (*always, ProductPlan.fused, ProductPlan.fused_beside) if allowed else always


def candidate_plans(weight_NK: Tensor, group: Group, device: torch.device) -> tuple[ProductPlan, ...]:
    """Return the plans that a trial decides between; the first is a good choice without a trial.

    A fused product is not written in float32 and read again, so the library's is used only if fusing is not
    possible.
    """
    if ProductPlan.fused in plans_for(weight_NK, group, device):
        return ProductPlan.fused, ProductPlan.fused_beside
    return ProductPlan.wide, ProductPlan.wide_beside


def fuses(weight_NK: Tensor, device: torch.device) -> bool:
    """Return whether the fused product can be used for a weight."""
    return weight_NK.dtype.itemsize <= 2 and _in_whole_rows(weight_NK) and _has_copy_engines(device)


def _in_whole_rows(weight_NK: Tensor) -> bool:
    """Return whether a copy engine can read the weight: rows of a multiple of 16 bytes."""
    values = ALIGNMENT // weight_NK.element_size()
    whole = all(size % values == 0 for size in (*weight_NK.shape, weight_NK.stride(0)))
    return whole and weight_NK.stride(1) == 1 and weight_NK.data_ptr() % ALIGNMENT == 0


def _has_copy_engines(device: torch.device) -> bool:
    """Return whether the device is a data-centre GPU from Hopper on, with shared memory for the blocks."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return _shared_memory(device) >= FUSED_SHARED_MEMORY


def blocks_for(
    rows: int, columns: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device
) -> ProductBlocks:
    """Return the blocks with the shortest estimated time among those that do not straddle two parts."""
    programs = _programs(device)
    fitting = [width for width in (256, 128) if all(low % width == 0 for low, _ in columns)] or [128]

    def time(width: int) -> int:
        return -(-_tiles(rows, columns[-1][1], width) // programs) * (width + BESIDE_COLUMNS)

    return product_blocks(min(fitting, key=time), dtype, programs)


def _programs_for(blocks: ProductBlocks, rows: int, outputs: int) -> int:
    """Return no more programs than the rounds need, to leave multiprocessors to concurrent work."""
    tiles = _tiles(rows, outputs, blocks.columns)
    rounds = max(1, -(-tiles // blocks.programs))
    return max(1, -(-tiles // rounds))


def _tiles(rows: int, outputs: int, columns: int) -> int:
    return -(-rows // BLOCK) * -(-outputs // columns)


def product_blocks(columns: int, dtype: torch.dtype, programs: int) -> ProductBlocks:
    """Return blocks of `columns` columns that fit the registers and the shared memory."""
    return ProductBlocks(columns, 128 // dtype.itemsize, 3 if columns == 256 else 4, programs)


def blocks_for_codes(blocks: ProductBlocks, length: int) -> ProductBlocks:
    """Return the blocks for 8-bit operands, for sums of `length` products."""
    if length <= ROUGH_SUMS:
        return replace(blocks, inner=CODED_INNER)
    return replace(blocks, columns=FUSED_COLUMNS, inner=CODED_INNER, stages=4, rough=CODED_INNER)


@cache
def _programs(device: torch.device) -> int:
    """Return one program per multiprocessor, or without a GPU so few that each takes several turns."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _launches_for_16_bits(group: Group, device: torch.device) -> dict[str, KernelLaunch]:
    few = rank_block(group.rank) <= DIRECT_RANKS
    launches = _launches_for_few_ranks(group) if few else _launches_for_many_ranks(group)
    if _shared_memory(device) < LARGE_SHARED_MEMORY:
        # Consumer GPUs: half the columns and less prefetching.
        for name, launch in launches.items():
            launches[name] = replace(launch, columns=launch.columns // 2, stages=min(2, launch.stages))
    # The addition of large slots to dx covers all sites at once.
    dx_stages = 3 if len(group.columns) < 3 else 2
    launches["large_y"] = KernelLaunch(64, warps=8, stages=3)
    launches["large_dx"] = KernelLaunch(64, warps=8, stages=dx_stages)
    return launches


def _launches_for_few_ranks(group: Group) -> dict[str, KernelLaunch]:
    rank, together = rank_block(group.rank), parts_together(group)
    span = together * rank
    # Each part's mask occupies a tile of registers.
    columns = 64 if group.drops and together > 1 else 128
    down = KernelLaunch(columns, warps=4, stages=3 if group.drops else 4)
    down = down if span <= 64 else KernelLaunch(64, warps=8, stages=2)
    da = KernelLaunch(128, warps=8, stages=3) if span <= 64 else KernelLaunch(64, warps=8, stages=2)
    if together < len(group.columns):
        da = KernelLaunch(64, warps=8, stages=1)
    return {
        "down": replace(down, together=together),
        "up": KernelLaunch(128, warps=4, stages=1),
        "ds": down,
        "ds_db": KernelLaunch(256 if rank <= 32 else 128, warps=4, stages=3 if rank == 32 else 4),
        "db": KernelLaunch(128, warps=4, stages=2) if rank <= 32 else KernelLaunch(128, warps=8, stages=3),
        "da": replace(da, together=together),
    }


def _launches_for_many_ranks(group: Group) -> dict[str, KernelLaunch]:
    """Return the launches for a whole band, or for two if two sites share a program."""
    together = parts_together(group)
    down, da = KernelLaunch(64, warps=4, stages=4), KernelLaunch(128, warps=8, stages=3)
    if together > 1:
        down = da = KernelLaunch(64, warps=8, stages=3, together=together)
    return {
        "down": down,
        "up": KernelLaunch(128, warps=8, stages=1),
        "ds": KernelLaunch(64, warps=4, stages=4),
        "ds_db": KernelLaunch(64, warps=8, stages=2),
        "db": KernelLaunch(128, warps=8, stages=3),
        "da": da,
    }


def _launches_for_32_bits(group: Group) -> dict[str, KernelLaunch]:
    """Return small blocks: exact float32 has no tensor core, so operands live in registers."""
    launch = KernelLaunch(32, warps=8, stages=1, rows=32)
    reader = replace(launch, together=parts_together(group))
    others = dict.fromkeys(("up", "ds", "ds_db", "db", "large_y", "large_dx"), launch)
    return {"down": reader, "da": reader, **others}


def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use; there is no limit without a GPU."""
    if device.type != "cuda":
        return LARGE_SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
