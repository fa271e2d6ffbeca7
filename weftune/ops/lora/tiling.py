"""Launch parameters of the tiled LoRA kernels for a group of linears. The parameters do not depend on the
jobs.

s = factor · drop(x)Aᵀ are the rank-sized activations of the adapters, and ds their gradient. Slots are table
indices of jobs, and parts are bands of at most BAND ranks of one linear (`ops.lora.table`); tiles and pieces
are ranges of rows (`ops.lora.rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from weftune.core.device_class import get_device_class
from weftune.ops.lora.rows import BLOCK, Rows
from weftune.ops.lora.table import ALIGNMENT, BAND, Group

MIN_RANK = 16
"""Minimum number of ranks in a matrix product of the kernels; smaller ranks are padded to it."""
ONE_READ_RANKS = 64
"""Maximum rank for which one kernel computes dB and ds, the gradient of xAᵀ, from a single read of dy. With
more ranks, the partial sums of ds are larger than dy."""
TOGETHER_RANKS = 256
"""Maximum total number of ranks that one program processes for several linears at once, limited by
registers."""
LARGE_SHARED_MEMORY = 160 << 10
"""Minimum shared memory in bytes of the GPUs for which the block sizes for 16-bit dtypes were tuned. Block
sizes are halved on other GPUs."""
PROGRAMS = 128
"""Number of programs that saturate a large GPU's memory bandwidth. Sums over many columns are split among
about this number of programs."""
MASKING_PROGRAMS = 512
"""Number of programs that saturate a large GPU's memory bandwidth if they also compute dropout masks."""
DIRECT_RANKS = 64
"""Maximum rank for which the fused kernel (frozen product plus adapters) has registers. For larger ranks,
separate kernels compute the adapters' terms of y and dx."""
FUSED_SHARED_MEMORY = 227 << 10
"""Shared memory in bytes that the fused kernel (frozen product plus adapters) needs."""
BESIDE_COLUMNS = 32
"""Fixed cost of one wave of programs of the fused kernel (frozen product plus adapters), as the number of
columns per program that take the same time."""
FUSED_COLUMNS = 128
"""Number of columns of which the first column of every linear must be a multiple, so that the fused kernel
(frozen product plus adapters) can be used."""
CODED_INNER = 128
"""Size of the blocks of the fused kernel (frozen product plus adapters) along the inner dimension, for 8-bit
operands."""
ROUGH_SUMS = 1 << 15
"""Maximum length of a sum of 8-bit products that is left to a tensor core. Hopper's tensor cores keep some 14
bits of such a sum and truncate the rest, so that it is too small by up to 2⁻¹⁴ for every 32 products. Up to
this length that is less than the rounding error of the operands; longer sums are accumulated in float32, for
which blocks of 256 columns have no registers."""


class ProductPlan(StrEnum):
    """The method by which the tiled kernels compute a linear with adapters. `wide`: kernels add the adapters'
    output to a product that `torch.mm` has written in float32. `fused`: one kernel computes the product and
    the adapters' output. `beside`: dA and dB are computed concurrently with the frozen product of the
    backward, not before it; this costs a second read of dy.

    All plans sum in float32 and round once, since rounding earlier would lose the output of a new adapter.
    """

    wide = "wide"
    fused = "fused"
    wide_beside = "wide, beside"
    fused_beside = "fused, beside"

    @property
    def is_fused(self) -> bool:
        return self in (ProductPlan.fused, ProductPlan.fused_beside)

    @property
    def uses_side_stream(self) -> bool:
        return self in (ProductPlan.wide_beside, ProductPlan.fused_beside)


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """The block size (`columns`), the number of warps and other compiler options of one kernel."""

    columns: int
    warps: int
    stages: int
    rows: int = 64
    """Rows per iteration in kernels that loop over a longer range of rows. All other kernels process one tile
    of rows per program."""
    parts_per_program: int = 1
    """Number of parts (a part is a band of ranks of one linear) per program, in kernels that read x once for
    several parts."""


@dataclass(frozen=True, slots=True)
class ProductBlocks:
    """The block size, compiler options and number of programs of the fused kernel (frozen product plus
    adapters)."""

    columns: int
    inner_size: int
    stages: int
    programs: int
    group: int = 8
    """Number of blocks of rows whose programs run next to one another, so that they share columns of the
    weight in the L2 cache."""
    warps: int = 8
    products_per_sum: int | None = None
    """Number of 8-bit products that a tensor core sums by itself, before the result is added in float32. None
    means all products of a sum."""


@dataclass(frozen=True, slots=True)
class Tiling:
    down: KernelLaunch
    up: KernelLaunch
    """Launch parameters of the kernels `up` and `add_dx`, which add the adapters' output or gradient to a
    frozen product."""
    ds: KernelLaunch
    """Launch parameters of the kernel that computes ds, the gradient of xAᵀ, without dB."""
    ds_db: KernelLaunch
    db: KernelLaunch
    """Launch parameters of the kernel that computes dB alone. Its programs are small enough to run
    concurrently with a product."""
    da: KernelLaunch
    large_y: KernelLaunch
    """Launch parameters of the kernel that writes the output of adapters with large ranks, to which the fused
    kernel then adds the frozen product."""
    large_dx: KernelLaunch
    y: ProductBlocks
    dx: ProductBlocks
    down_splits: int
    """Number of programs among which the sum over the inputs is split when xAᵀ is computed."""
    ds_splits: int
    """Number of programs among which the sum over the outputs is split when ds, the gradient of xAᵀ, is
    computed without dB."""
    reads_dy_once: bool
    """Whether one kernel computes dB and ds, the gradient of xAᵀ, from a single read of dy."""


@dataclass(frozen=True, slots=True)
class SiteCall:
    """The arguments of the kernels for one group of linears, which share their input, and one microbatch."""

    group: Group
    rows: Rows
    training: bool
    tiling: Tiling
    plan: ProductPlan = ProductPlan.wide
    graph_only: bool = False
    """Whether the outputs may be arbitrary values, because only the backward will be used."""

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
        """Number of ranks that a program processes at a time, rounded up to a power of two."""
        return rank_block(self.group.rank)

    @property
    def has_large_ranks(self) -> bool:
        """Whether a job may have a rank that exceeds the registers of the fused kernel (frozen product plus
        adapters)."""
        return self.group.rank > DIRECT_RANKS

    @property
    def has_dropout(self) -> bool:
        """Whether kernels draw dropout masks in this pass."""
        return self.group.has_dropout and self.training

    @property
    def slots(self) -> int:
        return len(self.rows.key_S)

    @property
    def columns(self) -> tuple[int, ...]:
        return tuple(edge for part in self.group.columns for edge in part)

    @property
    def adapters(self) -> tuple[Tensor, ...]:
        """Arguments that most kernels read: dropout keys of jobs, token indices of rows, and the addresses,
        ranks, dropout thresholds and name checksums of adapters."""
        rows, table = self.rows, self.group.table
        own = table.address_PS4, table.rank_PS, table.threshold_PS, table.crc_P
        return rows.key_S, rows.token_index_T, *own

    @property
    def output_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Addresses of the vectors by which jobs scale outputs, and for each vector whether it also scales
        the bias. Both are None if no job scales outputs."""
        scales = self.group.g_out
        return (None, None) if scales is None else (scales.address_PSA, scales.number_PSn)

    def blocks(self, columns: int) -> list[int]:
        """Return, for each linear, the number of blocks of `columns` columns that cover its output."""
        return [-(-(high - low) // columns) for low, high in self.group.columns]

    def alignment(self, operand: Tensor) -> int:
        return ALIGNMENT if self.group.table.is_aligned else operand.element_size()

    def constants(self, operand: Tensor, launch: KernelLaunch | ProductBlocks) -> dict[str, Any]:
        """Return the compile-time constants that all kernels need, for the dtype of `operand`."""
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
    """Return the `input_precision` of `tl.dot` with which products of float32 operands are exact. It has no
    effect on 16-bit operands."""
    return "ieee" if operand.dtype == torch.float32 else "tf32"


def rank_block(rank: int) -> int:
    """Return the number of ranks that kernels process at a time for adapters of this rank: a power of two
    that tensor cores support, at most BAND."""
    return max(MIN_RANK, 1 << (min(rank, BAND) - 1).bit_length())


def parts_per_program(group: Group) -> int:
    """Return the number of parts (a part is a band of ranks of one linear) that a program processes at once:
    one for every linear of the group if their ranks fit into registers, else 1."""
    sites = len(group.columns)
    return sites if sites * rank_block(group.rank) <= TOGETHER_RANKS else 1


def choose_tiling(rows: Rows, group: Group, features: int, dtype: torch.dtype) -> Tiling:
    """Return launch parameters of all tiled kernels that fit the registers and the shared memory of the
    device."""
    count, device, half = len(rows.token_index_T), rows.buffer.device, dtype.itemsize == 2
    launches = _launches_for_16_bits(group, device) if half else _launches_for_32_bits(group)
    if half and _programs_share_multiprocessor(rows, group, launches["ds_db"], device):
        launches["ds_db"] = replace(launches["ds_db"], stages=2)
    tiles, narrowest = -(-count // rows.tile), min(high - low for low, high in group.columns)
    programs = MASKING_PROGRAMS if group.has_dropout else PROGRAMS
    dx = choose_product_blocks(count, ((0, features),), dtype, device)
    return Tiling(
        **launches,
        y=choose_product_blocks(count, group.columns, dtype, device),
        dx=replace(dx, programs=_balanced_program_count(dx, count, features)),
        down_splits=_split_count(programs // tiles, features, launches["down"]),
        ds_splits=_split_count(PROGRAMS // (tiles * len(group.columns)), narrowest, launches["ds"]),
        reads_dy_once=group.rank <= ONE_READ_RANKS,
    )


def _split_count(max_shares: int, width: int, launch: KernelLaunch) -> int:
    """Return the number of partial sums into which a sum over `width` columns is split. It is a power of two,
    so that few kernels are compiled."""
    shares = max(1, min(max_shares, width // (4 * launch.columns)))
    return 1 << shares.bit_length() - 1


def _programs_share_multiprocessor(
    rows: Rows, group: Group, launch: KernelLaunch, device: torch.device
) -> bool:
    """Return whether several programs of a kernel run on one multiprocessor, which leaves less shared memory
    for each."""
    blocks = sum(-(-(high - low) // launch.columns) for low, high in group.columns)
    return blocks * -(-len(rows.token_index_T) // rows.piece) > get_device_class(device).multiprocessors


def supported_plans(weight_NK: Tensor, group: Group, device: torch.device) -> tuple[ProductPlan, ...]:
    """Return the product plans (methods of the tiled kernels) that the weight, the group and the device
    support."""
    allowed = can_fuse(weight_NK, device) and all(low % FUSED_COLUMNS == 0 for low, _ in group.columns)
    always = ProductPlan.wide, ProductPlan.wide_beside
    return (*always, ProductPlan.fused, ProductPlan.fused_beside) if allowed else always


def candidate_plans(weight_NK: Tensor, group: Group, device: torch.device) -> tuple[ProductPlan, ...]:
    """Return the product plans (methods of the tiled kernels) that a trial should time. Without a trial, the
    first of them is used.

    Fused plans are preferred wherever they are supported, since they save writing and reading a float32
    product.
    """
    if ProductPlan.fused in supported_plans(weight_NK, group, device):
        return ProductPlan.fused, ProductPlan.fused_beside
    return ProductPlan.wide, ProductPlan.wide_beside


def can_fuse(weight_NK: Tensor, device: torch.device) -> bool:
    """Return whether one fused kernel can multiply by this weight and add the adapters' output."""
    return weight_NK.dtype.itemsize <= 2 and _has_whole_rows(weight_NK) and _has_copy_engines(device)


def _has_whole_rows(weight_NK: Tensor) -> bool:
    """Return whether TMA (the GPU's copy engine) can read the weight. Its rows must be aligned to 16 bytes
    for that."""
    values = ALIGNMENT // weight_NK.element_size()
    whole = all(size % values == 0 for size in (*weight_NK.shape, weight_NK.stride(0)))
    return whole and weight_NK.stride(1) == 1 and weight_NK.data_ptr() % ALIGNMENT == 0


def _has_copy_engines(device: torch.device) -> bool:
    """Return whether the device has TMA and enough shared memory: a data-centre GPU, Hopper or later."""
    found = get_device_class(device)
    return found.has_copy_engines and found.shared_memory >= FUSED_SHARED_MEMORY


def choose_product_blocks(
    rows: int, columns: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device
) -> ProductBlocks:
    """Return the launch parameters of the fused kernel (frozen product plus adapters) with the block size
    whose estimated time is shortest. No block may span two linears."""
    programs = get_device_class(device).multiprocessors
    fitting = [width for width in (256, 128) if all(low % width == 0 for low, _ in columns)] or [128]

    def estimated_time(width: int) -> int:
        return -(-_tile_count(rows, columns[-1][1], width) // programs) * (width + BESIDE_COLUMNS)

    return product_blocks(min(fitting, key=estimated_time), dtype, programs)


def _balanced_program_count(blocks: ProductBlocks, rows: int, outputs: int) -> int:
    """Return the smallest number of programs that needs as many waves (programs run one after another on a
    multiprocessor) as `blocks.programs` would. The remaining multiprocessors are free for other work."""
    tiles = _tile_count(rows, outputs, blocks.columns)
    rounds = max(1, -(-tiles // blocks.programs))
    return max(1, -(-tiles // rounds))


def _tile_count(rows: int, outputs: int, columns: int) -> int:
    return -(-rows // BLOCK) * -(-outputs // columns)


def product_blocks(columns: int, dtype: torch.dtype, programs: int) -> ProductBlocks:
    """Return the launch parameters of the fused kernel for blocks of `columns` columns that fit registers and
    shared memory."""
    return ProductBlocks(columns, 128 // dtype.itemsize, 3 if columns == 256 else 4, programs)


def blocks_for_codes(blocks: ProductBlocks, length: int) -> ProductBlocks:
    """Return the launch parameters of the fused kernel for 8-bit operands, given those for 16-bit operands.
    `length` is the inner dimension, over which products are summed."""
    if length <= ROUGH_SUMS:
        return replace(blocks, inner_size=CODED_INNER)
    return replace(
        blocks, columns=FUSED_COLUMNS, inner_size=CODED_INNER, stages=4, products_per_sum=CODED_INNER
    )


def _launches_for_16_bits(group: Group, device: torch.device) -> dict[str, KernelLaunch]:
    few = rank_block(group.rank) <= DIRECT_RANKS
    launches = _launches_for_few_ranks(group) if few else _launches_for_many_ranks(group)
    if get_device_class(device).shared_memory < LARGE_SHARED_MEMORY:
        # Consumer GPUs: half the columns and less prefetching.
        for name, launch in launches.items():
            launches[name] = replace(launch, columns=launch.columns // 2, stages=min(2, launch.stages))
    # `large_dx` processes all linears of the group at once.
    dx_stages = 3 if len(group.columns) < 3 else 2
    launches["large_y"] = KernelLaunch(64, warps=8, stages=3)
    launches["large_dx"] = KernelLaunch(64, warps=8, stages=dx_stages)
    return launches


def _launches_for_few_ranks(group: Group) -> dict[str, KernelLaunch]:
    rank, together = rank_block(group.rank), parts_per_program(group)
    span = together * rank
    # The mask of each part occupies a tile of registers.
    columns = 64 if group.has_dropout and together > 1 else 128
    down = KernelLaunch(columns, warps=4, stages=3 if group.has_dropout else 4)
    down = down if span <= 64 else KernelLaunch(64, warps=8, stages=2)
    da = KernelLaunch(128, warps=8, stages=3) if span <= 64 else KernelLaunch(64, warps=8, stages=2)
    if together < len(group.columns):
        da = KernelLaunch(64, warps=8, stages=1)
    return {
        "down": replace(down, parts_per_program=together),
        "up": KernelLaunch(128, warps=4, stages=1),
        "ds": down,
        "ds_db": KernelLaunch(256 if rank <= 32 else 128, warps=4, stages=3 if rank == 32 else 4),
        "db": KernelLaunch(128, warps=4, stages=2) if rank <= 32 else KernelLaunch(128, warps=8, stages=3),
        "da": replace(da, parts_per_program=together),
    }


def _launches_for_many_ranks(group: Group) -> dict[str, KernelLaunch]:
    """Return the launch parameters, by kernel, for adapters with more than DIRECT_RANKS ranks at a linear. A
    program may process up to two linears."""
    together = parts_per_program(group)
    down, da = KernelLaunch(64, warps=4, stages=4), KernelLaunch(128, warps=8, stages=3)
    if together > 1:
        down = da = KernelLaunch(64, warps=8, stages=3, parts_per_program=together)
    return {
        "down": down,
        "up": KernelLaunch(128, warps=8, stages=1),
        "ds": KernelLaunch(64, warps=4, stages=4),
        "ds_db": KernelLaunch(64, warps=8, stages=2),
        "db": KernelLaunch(128, warps=8, stages=3),
        "da": da,
    }


def _launches_for_32_bits(group: Group) -> dict[str, KernelLaunch]:
    """Return the launch parameters, by kernel, for 32-bit dtypes. Blocks are small, since exact float32
    products leave few registers."""
    launch = KernelLaunch(32, warps=8, stages=1, rows=32)
    reader = replace(launch, parts_per_program=parts_per_program(group))
    others = dict.fromkeys(("up", "ds", "ds_db", "db", "large_y", "large_dx"), launch)
    return {"down": reader, "da": reader, **others}
