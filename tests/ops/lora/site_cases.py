"""Made-up groups of sites with jobs aboard, run through the tiled route and through plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from weftune.core.weights import CodedMatrix, quantise_rows
from weftune.ops import dropout
from weftune.ops.dropout import step_key
from weftune.ops.lora.products import Right
from weftune.ops.lora.rows import Rows, SlotRows
from weftune.ops.lora.table import ALIGNMENT, Group, LowRank, SlotTable, required_bands
from weftune.ops.lora.tiled import backward, forward, lora_linear
from weftune.ops.lora.tiled_kernels import ds
from weftune.ops.lora.tiling import ProductPlan, SiteCall, choose_tiling, product_blocks

STEP = 3


@dataclass(frozen=True, slots=True)
class Job:
    length: int
    rank: int
    dropout: float = 0.0
    sites: tuple[int, ...] | None = None
    """The parts it has adapters at; None: all."""


@dataclass(frozen=True)
class Case:
    """Jobs in slots (None: an empty one), the last slot's rows first, `gap` rows of nobody before each."""

    jobs: list[Job | None]
    features: int = 48
    widths: tuple[int, ...] = (56,)
    gap: int = 3
    padding: int = 5
    piece: int = 1024
    bias: bool = False
    residual: bool = False
    transposed: bool = False
    seed: int = 0
    poison: tuple[str, int] | None = None
    mask_reader: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    coded: bool = False
    """The frozen weight is one of 8-bit floats."""
    first_input: int = 0
    """Index of the first input in the whole linear, of which a shard has a part."""
    sites: tuple[str, ...] = field(default=("layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj"))

    def dropping(self, share: float) -> Case:
        return replace(self, jobs=[job and replace(job, dropout=share) for job in self.jobs])

    def poisoned(self, what: str, slot: int) -> Case:
        return replace(self, poison=(what, slot))

    def reading_the_mask(self) -> Case:
        return replace(self, mask_reader=True)

    @property
    def seats(self) -> list[SlotRows]:
        seats, row = [], 0
        for slot, job in reversed(list(enumerate(self.jobs))):
            if job is not None:
                row += self.gap
                seats.append(SlotRows(row, row + job.length, slot, step_key(100 + slot, STEP)))
                row += job.length
        return seats

    @property
    def rows(self) -> int:
        return max((seat.stop for seat in self.seats), default=0) + self.padding

    @property
    def padding_rows(self) -> slice:
        return slice(self.rows - self.padding, self.rows)

    def rows_of(self, slot: int) -> slice:
        return next(slice(seat.start, seat.stop) for seat in self.seats if seat.slot == slot)

    @property
    def token_index(self) -> Tensor:
        return torch.arange(self.rows) * 7 + 1

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        edges = [sum(self.widths[:part]) for part in range(len(self.widths) + 1)]
        return tuple(pairwise(edges))

    def site_key(self, slot: int, part: int) -> int:
        return dropout.mask_key(100 + slot, STEP, self.sites[part])

    def has(self, slot: int, part: int) -> bool:
        job = self.jobs[slot]
        return job is not None and (job.sites is None or part in job.sites)


@dataclass
class Values:
    """The tensors of a case; adapters by (slot, part)."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    dy: Tensor
    a: dict[tuple[int, int], Tensor]
    b: dict[tuple[int, int], Tensor]


def values(case: Case) -> Values:
    generator = torch.Generator(case.device).manual_seed(case.seed)
    outputs = sum(case.widths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=case.device).to(case.dtype)

    made = Values(
        x=normal(case.rows, case.features),
        weight=normal(outputs, case.features) / case.features**0.5,
        bias=normal(outputs) if case.bias else None,
        residual=normal(case.rows, outputs) if case.residual else None,
        dy=normal(case.rows, outputs),
        a={},
        b={},
    )
    for slot, job in enumerate(case.jobs):
        for part, width in enumerate(case.widths):
            if job is not None and case.has(slot, part):
                made.a[slot, part] = normal(job.rank, case.features) / case.features**0.5
                made.b[slot, part] = normal(job.rank, width) / job.rank**0.5
    if case.mask_reader:
        made.a[0, 0] = made.b[0, 0] = torch.eye(case.features).to(made.x)
        made.weight.zero_()
    if case.transposed:
        made.weight = made.weight.T.contiguous().T
    if case.poison is not None:
        _spoil(made, case, *case.poison)
    return made


def _spoil(made: Values, case: Case, what: str, slot: int) -> None:
    if what == "padding":
        made.x[case.padding_rows] = made.dy[case.padding_rows] = float("nan")
    elif what in ("a", "b"):
        for (owner, _), tensor in getattr(made, what).items():
            if owner == slot:
                tensor.fill_(float("nan"))
    else:
        getattr(made, what)[case.rows_of(slot)] = float("nan")


def scale(slot: int, part: int) -> float:
    return (1 + slot % 5) / (2 + part)


def truth(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Plain autograd, one job after another, in `dtype`."""
    made = values(case)
    leaves = {"dx": made.x.to(dtype).requires_grad_()}
    y = leaves["dx"] @ made.weight.to(dtype).T
    if made.bias is not None:
        y = y + made.bias.to(dtype)
    if made.residual is not None:
        leaves["dresidual"] = made.residual.to(dtype).requires_grad_()
        y = y + leaves["dresidual"]
    for slot, part in made.a:
        job, rows = case.jobs[slot], case.rows_of(slot)
        assert job is not None
        a = leaves[f"da part{part} slot{slot}"] = made.a[slot, part].to(dtype).requires_grad_()
        b = leaves[f"db part{part} slot{slot}"] = made.b[slot, part].to(dtype).requires_grad_()
        token_index = case.token_index[rows].to(case.device)
        kept = dropout.keep_mask_TK(
            case.site_key(slot, part), token_index, case.features, job.dropout, case.first_input
        )
        dropped = torch.where(kept, leaves["dx"][rows], 0.0) / (1.0 - job.dropout)
        low, high = case.columns[part]
        added = torch.zeros_like(y)
        added[rows, low:high] = scale(slot, part) * ((dropped @ a.T) @ b)
        y = y + added
    y.backward(made.dy.to(dtype))
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}  # type: ignore[misc]


def coded_truth(case: Case) -> dict[str, Tensor]:
    """The same where the frozen products are those of 8-bit floats."""
    made, want = values(case), truth(case)
    weight = CodedMatrix.quantise(made.weight)
    x, dy, exact = made.x.double(), made.dy.double(), made.weight.double()
    want["y"] += of_codes(made.x, weight.codes(), None, weight.scale()) - x @ exact.T
    want["dx"] += of_codes(made.dy, weight.transposed_codes(), weight.scale(), None) - dy @ exact
    return want


def of_codes(left: Tensor, codes: Tensor, scale_M: Tensor | None, scale_L: Tensor | None) -> Tensor:
    """The product of the left operand, rounded in float32, and codes, in float64."""
    rounded, scale = quantise_rows(left, scale_M)
    product = (rounded.double() @ codes.double().T) * scale.double()[:, None]
    return product if scale_L is None else product * scale_L.double()


def frozen_weight(case: Case, made: Values) -> Right:
    return CodedMatrix.quantise(made.weight) if case.coded else made.weight


def flat(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors as views of one vector, each where an aligned load may begin."""
    step = ALIGNMENT // dtype.itemsize
    places, at = [], 0
    for tensor in tensors:
        places.append(at)
        at += -(-tensor.numel() // step) * step
    vector = torch.zeros(at, dtype=dtype, device=tensors[0].device if tensors else "cpu")
    views = [vector[p : p + t.numel()].view(t.shape) for p, t in zip(places, tensors, strict=True)]
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    return views


def entries(case: Case, made: Values, slot: int) -> list[LowRank | None]:
    job = case.jobs[slot]
    parts = [part for part in range(len(case.widths)) if case.has(slot, part)]
    weights = flat([side[slot, part] for part in parts for side in (made.a, made.b)], case.dtype)
    gradients = flat([torch.zeros_like(weight) for weight in weights], torch.float32)
    found: list[LowRank | None] = [None] * len(case.widths)
    for index, part in enumerate(parts):
        a, b, da, db = *weights[2 * index : 2 * index + 2], *gradients[2 * index : 2 * index + 2]
        assert job is not None
        found[part] = LowRank(a, b, da, db, scale(slot, part), job.dropout)
    return found


def run(
    case: Case,
    *,
    training: bool = True,
    times: int = 1,
    wants_dx: bool = True,
    plan: ProductPlan | None = None,
    one_read: bool | None = None,
    columns: int | None = None,
) -> dict[str, Tensor]:
    """The tiled route; `plan`, `one_read` and `columns` (of a fused product) go below the autograd node."""
    made = values(case)
    weight = frozen_weight(case, made)
    by_slot, group, rows = attached(case, made)
    anchor = torch.zeros((), device=case.device, requires_grad=True)
    found: dict[str, Tensor] = {}
    for _ in range(times):
        if plan is None and one_read is None:
            x = made.x.clone().requires_grad_(wants_dx)
            residual = None if made.residual is None else made.residual.clone().requires_grad_()
            y = lora_linear(x, weight, made.bias, residual, anchor, group, rows, training)
            y.backward(made.dy)
            found = {"y": y.detach(), "dx": x.grad}  # type: ignore[dict-item]
            if residual is not None:
                found["dresidual"] = residual.grad  # type: ignore[assignment]
        else:
            chosen = choose_tiling(rows, group, case.features, case.dtype)
            chosen = chosen if one_read is None else replace(chosen, reads_dy_once=one_read)
            if columns is not None:
                blocks = product_blocks(columns, case.dtype, chosen.y.programs)
                chosen = replace(chosen, y=blocks, dx=blocks)
            call = SiteCall(group, rows, training, chosen, plan or ProductPlan.wide)
            y, s, _ = forward(made.x, weight, made.bias, made.residual, call)
            dx = backward(made.dy, made.x, weight, s, call, wants_dx)
            found = {"y": y, "dx": dx}  # type: ignore[dict-item]
            if made.residual is not None:
                found["dresidual"] = made.dy
    for slot, parts in by_slot.items():
        for part, entry in enumerate(parts):
            if entry is not None:
                found[f"da part{part} slot{slot}"] = entry.da_RK.clone()
                found[f"db part{part} slot{slot}"] = entry.db_RN.clone()
    return found


def attached(case: Case, made: Values, tile: int = 64) -> tuple[dict[int, list[LowRank | None]], Group, Rows]:
    """The jobs seated in the tables, and the rows dealt out."""
    device = torch.device(case.device)
    slots = max(4, len(case.jobs))
    aligned = all(width % 8 == 0 for width in (case.features, *case.widths))
    present = [job for job in case.jobs if job is not None]
    rank = max((job.rank for job in present), default=16)
    table = SlotTable.empty(
        case.sites[: len(case.widths)], slots, device, aligned, required_bands(rank), case.first_input
    )
    group = Group(
        case.columns,
        table,
        rank=rank,
        has_dropout=any(job.dropout > 0 for job in present),
    )
    by_slot = {slot: entries(case, made, slot) for slot, job in enumerate(case.jobs) if job is not None}
    for slot, found in by_slot.items():
        group.write(slot, found)
    rows = Rows.empty(case.rows, slots, device, tile, case.piece)
    rows.fill(case.seats, case.token_index.numpy())
    return by_slot, group, rows


@torch.no_grad()
def kept_of_a_young_adapter(case: Case, plan: ProductPlan) -> dict[str, float]:
    """What is there, after rounding and on average, of what the only job's adapter adds to y and to dx.

    It adds a fraction of their last digit: all traces of it are in how sums have been rounded.
    """
    made = values(case)
    made.b = {place: b / 4000 for place, b in made.b.items()}
    by_slot, group, rows = attached(case, made)
    call = SiteCall(group, rows, True, choose_tiling(rows, group, case.features, case.dtype), plan)
    (entry,) = by_slot[0]
    assert entry is not None

    weight = frozen_weight(case, made)

    def both() -> tuple[Tensor, Tensor, Tensor]:
        y, s, _ = forward(made.x, weight, None, made.residual, call)
        dx = backward(made.dy, made.x, weight, s, call, needs_dx=True)
        assert dx is not None
        return y, dx, s

    ds_TR = ds(made.dy, call)[:, : entry.rank]
    y, dx, s = both()
    added = {
        "y": s[:, : entry.rank].double() @ entry.b_RN.double(),
        "dx": ds_TR.double() @ entry.a_RK.double(),
    }
    entry.b_RN.zero_()
    y_alone, dx_alone, _ = both()
    kept = {}
    for name, with_it, alone in (("y", y, y_alone), ("dx", dx, dx_alone)):
        assert 0.0 < added[name].abs().mean() < alone.abs().mean() / 256
        seen = with_it.double() - alone.double()
        kept[name] = ((seen * added[name]).sum() / (added[name] ** 2).sum()).item()
    return kept


_KNOWN: dict[tuple[str, ProductPlan | None], dict[str, Tensor]] = {}


def _clean(case: Case, plan: ProductPlan | None) -> dict[str, Tensor]:
    """The run without poison, once for all poisons of a case."""
    known = (repr(case), plan)
    if known not in _KNOWN:
        _KNOWN[known] = run(case, plan=plan)
    return _KNOWN[known]


def healthy_after(case: Case, poison: str, plan: ProductPlan | None = None) -> None:
    """What is not of slot 1 (or, where padding is poisoned, all that is not padding) has the bits it had."""
    clean, sick = _clean(case, plan), run(case.poisoned(poison, slot=1), plan=plan)
    hurt = case.padding_rows if poison == "padding" else case.rows_of(1)
    healthy = torch.ones(case.rows, dtype=torch.bool)
    healthy[hurt] = False
    assert not sick["dx" if poison == "dy" else "y"][hurt].isfinite().all()
    for name in clean:
        if name in ("y", "dx", "dresidual"):
            assert torch.equal(sick[name].cpu()[healthy], clean[name].cpu()[healthy]), name
        elif poison == "padding" or not name.endswith("slot1"):
            assert torch.equal(sick[name], clean[name]), name


def close(got: dict[str, Tensor], want: dict[str, Tensor], bound: float = 2e-6) -> None:
    for name in want:
        scale = want[name].abs().max().clamp(min=1.0)
        assert ((got[name].double() - want[name]).abs().max() / scale) < bound, name
