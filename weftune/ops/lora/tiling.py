"""Launch parameters of the tiled route for one group and one microbatch: blocks, warps, shares of a sum. They
do not depend on the running jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

import torch
from torch import Tensor

from weftune.ops.lora.rows import BLOCK, Rows
from weftune.ops.lora.table import ALIGNMENT, BAND, Group

MIN_RANK = 16
"""Smallest number of ranks that kernels multiply at once."""
ONE_READ_RANKS = 64
"""Maximum ranks of a site for reading dy once: above, the shares of ds are larger than dy, and dy is read
twice."""
TOGETHER_RANKS = 256
"""Maximum ranks of all parts that fit a program's registers; above, each part has separate programs."""
LARGE_SHARED_MEMORY = 160 << 10
"""Bytes of shared memory with which the blocks for 16 bits were measured."""
PROGRAMS = 128
"""Number of programs that keep a large GPU's memory busy; sums over many columns are split to approach it."""
MASKING_PROGRAMS = 512
"""Number of programs that keep the memory busy if they also draw masks, which makes them wait for
arithmetic."""
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
    """The order of the tiled route: whether the adapters' part is added to a frozen product that the library
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
class RowSpan:
    """Consecutive blocks of columns, and the columns that they have together."""

    first: int
    blocks: int
    low: int
    high: int


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
    order: ProductPlan = ProductPlan.wide

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
    def slots(self) -> int:
        return len(self.rows.key_S)

    @property
    def columns(self) -> tuple[int, ...]:
        return tuple(edge for part in self.group.columns for edge in part)

    def blocks(self, columns: int) -> list[int]:
        """Return the number of blocks of `columns` columns in each site's output."""
        return [-(-(high - low) // columns) for low, high in self.group.columns]


def rank_block(rank: int) -> int:
    """Return the ranks of a part, at most a band, rounded up to a power of two that a tensor core takes."""
    return max(MIN_RANK, 1 << (min(rank, BAND) - 1).bit_length())


def parts_together(group: Group) -> int:
    """Return the number of parts of one band that share a program: all sites, or 1."""
    sites = len(group.columns)
    return sites if sites * rank_block(group.rank) <= TOGETHER_RANKS else 1


def choose_tiling(rows: Rows, group: Group, features: int, dtype: torch.dtype) -> Tiling:
    """Return blocks that fit the registers and the shared memory of the device."""
    count, device = len(rows.token_index_T), rows.buffer.device
    y = blocks_for(count, group.columns, dtype, device)
    dx = _leaving_room(blocks_for(count, ((0, features),), dtype, device), count, features)
    chosen = _for_16_bits(group, y, dx) if dtype.itemsize == 2 else _for_32_bits(group, y, dx)
    if dtype.itemsize == 2 and _shared_memory(rows.buffer.device) < LARGE_SHARED_MEMORY:
        chosen = _lean(chosen)
    tiles, narrowest = -(-count // rows.tile), min(high - low for low, high in group.columns)
    programs = MASKING_PROGRAMS if group.drops else PROGRAMS
    split = _split(programs // tiles, features, chosen.down)
    ds_split = _split(PROGRAMS // (tiles * len(group.columns)), narrowest, chosen.ds)
    if dtype.itemsize == 2 and _crowded(rows, group, chosen.ds_db, device):
        chosen = replace(chosen, ds_db=replace(chosen.ds_db, stages=2))
    return replace(chosen, split=split, ds_split=ds_split)


def _split(wanted: int, width: int, launch: KernelLaunch) -> int:
    """Return the number of shares of a sum over `width` columns: a power of two, so that few kernels are
    compiled."""
    most = max(1, min(wanted, width // (4 * launch.columns)))
    return 1 << most.bit_length() - 1


def _crowded(rows: Rows, group: Group, launch: KernelLaunch, device: torch.device) -> bool:
    """Return whether there are more programs than multiprocessors: then two share one, with less
    prefetching."""
    blocks = sum(-(-(high - low) // launch.columns) for low, high in group.columns)
    return blocks * -(-len(rows.token_index_T) // rows.piece) > _programs(device)


def orders_for(weight_NK: Tensor, group: Group, device: torch.device) -> tuple[ProductPlan, ...]:
    """Return the orders that the weight, the group and the device allow."""
    allowed = fuses(weight_NK, device) and all(low % FUSED_COLUMNS == 0 for low, _ in group.columns)
    always = ProductPlan.wide, ProductPlan.wide_beside
    return (*always, ProductPlan.fused, ProductPlan.fused_beside) if allowed else always


def fuses(weight_NK: Tensor, device: torch.device) -> bool:
    """Return whether the fused product can be used for a weight."""
    return weight_NK.dtype.itemsize <= 2 and _in_whole_rows(weight_NK) and _has_copy_engines(device)


def contestants(weight_NK: Tensor, group: Group, device: torch.device) -> tuple[ProductPlan, ...]:
    """Return the orders that a trial decides between; the first is a good choice without a trial.

    A fused product is not written in float32 and read again, so the library's is used only if fusing is not
    possible.
    """
    if ProductPlan.fused in orders_for(weight_NK, group, device):
        return ProductPlan.fused, ProductPlan.fused_beside
    return ProductPlan.wide, ProductPlan.wide_beside


def _in_whole_rows(weight_NK: Tensor) -> bool:
    """Return whether a copy engine can read the weight and tensors of the same widths: rows of a multiple of
    16 bytes."""
    values = ALIGNMENT // weight_NK.element_size()
    whole = all(size % values == 0 for size in (*weight_NK.shape, weight_NK.stride(0)))
    return whole and weight_NK.stride(1) == 1 and weight_NK.data_ptr() % ALIGNMENT == 0


def _has_copy_engines(device: torch.device) -> bool:
    """Return whether the device is a Hopper or later data-centre GPU, which also has the shared memory that
    the blocks need."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return _shared_memory(device) >= FUSED_SHARED_MEMORY


def blocks_for(
    rows: int, columns: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device
) -> ProductBlocks:
    """Return the blocks of the width with the shortest estimated time, among the widths at which no block
    straddles two parts."""
    programs = _programs(device)
    fitting = [width for width in (256, 128) if all(low % width == 0 for low, _ in columns)] or [128]

    def time(width: int) -> int:
        return -(-_tiles(rows, columns[-1][1], width) // programs) * (width + BESIDE_COLUMNS)

    return product_blocks(min(fitting, key=time), dtype, programs)


def _leaving_room(blocks: ProductBlocks, rows: int, outputs: int) -> ProductBlocks:
    """Return the blocks with no more programs than their rounds need: other multiprocessors are left for
    concurrent work."""
    tiles = _tiles(rows, outputs, blocks.columns)
    rounds = max(1, -(-tiles // blocks.programs))
    return replace(blocks, programs=max(1, -(-tiles // rounds)))


def _tiles(rows: int, outputs: int, columns: int) -> int:
    return -(-rows // BLOCK) * -(-outputs // columns)


def product_blocks(columns: int, dtype: torch.dtype, programs: int) -> ProductBlocks:
    """Return blocks of `columns` columns that fit the registers and the shared memory."""
    wide = columns == 256
    return ProductBlocks(
        columns=columns,
        inner=128 // dtype.itemsize,
        stages=3 if wide else 4,
        programs=programs,
    )


def blocks_for_codes(blocks: ProductBlocks, length: int) -> ProductBlocks:
    """Return the blocks for 8-bit operands, for sums of `length` products."""
    if length <= ROUGH_SUMS:
        return replace(blocks, inner=CODED_INNER)
    return replace(blocks, columns=FUSED_COLUMNS, inner=CODED_INNER, stages=4, rough=CODED_INNER)


@cache
def _programs(device: torch.device) -> int:
    """Return the number of programs: one per multiprocessor; a few without a GPU, so that each still takes
    several turns."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _for_16_bits(group: Group, y: ProductBlocks, dx: ProductBlocks) -> Tiling:
    few = rank_block(group.rank) <= DIRECT_RANKS
    return (_of_few_ranks if few else _of_many_ranks)(group, y, dx)


def _of_few_ranks(group: Group, y: ProductBlocks, dx: ProductBlocks) -> Tiling:
    rank, together = rank_block(group.rank), parts_together(group)
    span = together * rank
    # Each part's mask occupies a tile of registers.
    columns = 64 if group.drops and together > 1 else 128
    down = KernelLaunch(columns, warps=4, stages=3 if group.drops else 4)
    down = down if span <= 64 else KernelLaunch(64, warps=8, stages=2)
    da = KernelLaunch(128, warps=8, stages=3) if span <= 64 else KernelLaunch(64, warps=8, stages=2)
    if together < len(group.columns):
        da = KernelLaunch(64, warps=8, stages=1)
    return Tiling(
        down=replace(down, together=together),
        up=KernelLaunch(128, warps=4, stages=1),
        ds=down,
        ds_db=KernelLaunch(256 if rank <= 32 else 128, warps=4, stages=3 if rank == 32 else 4),
        db=KernelLaunch(128, warps=4, stages=2) if rank <= 32 else KernelLaunch(128, warps=8, stages=3),
        da=replace(da, together=together),
        **_of_large(len(group.columns)),
        y=y,
        dx=dx,
        split=1,
        ds_split=1,
        one_read=group.rank <= ONE_READ_RANKS,
    )


def _of_many_ranks(group: Group, y: ProductBlocks, dx: ProductBlocks) -> Tiling:
    """Return the tiling for a whole band, or for two if two sites share a program."""
    together = parts_together(group)
    down, da = KernelLaunch(64, warps=4, stages=4), KernelLaunch(128, warps=8, stages=3)
    if together > 1:
        down = da = KernelLaunch(64, warps=8, stages=3, together=together)
    return Tiling(
        down=down,
        up=KernelLaunch(128, warps=8, stages=1),
        ds=KernelLaunch(64, warps=4, stages=4),
        ds_db=KernelLaunch(64, warps=8, stages=2),
        db=KernelLaunch(128, warps=8, stages=3),
        da=da,
        **_of_large(len(group.columns)),
        y=y,
        dx=dx,
        split=1,
        ds_split=1,
        one_read=group.rank <= ONE_READ_RANKS,
    )


def _of_large(sites: int) -> dict[str, KernelLaunch]:
    """Return the launches of the addition of large slots; the one to dx covers all sites at once."""
    return {
        "large_y": KernelLaunch(64, warps=8, stages=3),
        "large_dx": KernelLaunch(64, warps=8, stages=3 if sites < 3 else 2),
    }


def _lean(tiling: Tiling) -> Tiling:
    """Return a tiling with half the columns and less prefetching, for consumer GPUs."""

    def lean(launch: KernelLaunch) -> KernelLaunch:
        return replace(launch, columns=launch.columns // 2, stages=min(2, launch.stages))

    return replace(
        tiling,
        down=lean(tiling.down),
        up=lean(tiling.up),
        ds=lean(tiling.ds),
        ds_db=lean(tiling.ds_db),
        db=lean(tiling.db),
        da=lean(tiling.da),
    )


def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use; there is no limit without a GPU."""
    if device.type != "cuda":
        return LARGE_SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


def _for_32_bits(group: Group, y: ProductBlocks, dx: ProductBlocks) -> Tiling:
    """Return the tiling for float32. Exact float32 has no tensor core: operands live in registers, so the
    blocks are small."""
    launch = KernelLaunch(32, warps=8, stages=1, rows=32)
    reader = replace(launch, together=parts_together(group))
    return Tiling(
        down=reader,
        up=launch,
        ds=launch,
        ds_db=launch,
        db=launch,
        da=reader,
        large_y=launch,
        large_dx=launch,
        y=y,
        dx=dx,
        split=1,
        ds_split=1,
        one_read=group.rank <= ONE_READ_RANKS,
    )
