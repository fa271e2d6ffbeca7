"""Made-up experts with jobs aboard, run through the tiled route and token by token in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import silu

from tests.ops.lora.site_cases import flat
from weftune.ops.experts import ExpertPart, ExpertSite, experts_output_reference
from weftune.ops.lora.experts import lora_experts
from weftune.ops.lora.table import Group, LowRank, SlotTable, required_bands
from weftune.ops.lora.tiling import ProductPlan


@dataclass(frozen=True)
class Job:
    tokens: int
    ranks: tuple[int, int] = (4, 4)
    """At gate and up, and at down; 0: no adapter there."""
    scale: float = 0.5


@dataclass(frozen=True)
class Case:
    """Jobs one behind the other, with a token of nobody between them; the last expert is nobody's."""

    jobs: tuple[Job, ...] = (Job(9, (5, 5)), Job(3, (2, 0), 2.0), Job(0), Job(16, (8, 17), 1.0))
    experts: int = 5
    active: int = 2
    hidden: int = 48
    inner: int = 40
    dtype: torch.dtype = torch.float32
    plan: ProductPlan = ProductPlan.wide
    sick: int | None = None
    grown: float = 1.0
    """Multiplies every B."""

    @property
    def tokens(self):
        return sum(job.tokens + 1 for job in self.jobs)

    def rows_of(self, job):
        start = sum(one.tokens + 1 for one in self.jobs[:job])
        return slice(start, start + self.jobs[job].tokens)

    @property
    def owner_T(self):
        owner_T = torch.zeros(self.tokens, dtype=torch.int32)
        for number in range(len(self.jobs)):
            owner_T[self.rows_of(number)] = number + 1
        return owner_T

    @property
    def widths(self):
        """Inputs and outputs of both linears."""
        return (self.hidden, 2 * self.inner), (self.inner, self.hidden)


@dataclass
class Values:
    x_TD: torch.Tensor
    chosen_Tk: torch.Tensor
    weights_Tk: torch.Tensor
    frozen: list[torch.Tensor]
    dy_TD: torch.Tensor
    factors: dict[tuple[int, int], list[torch.Tensor]]
    """A and B by (site, job)."""


def values(case, device):
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(device, case.dtype)

    scores_TE = torch.randn(case.tokens, case.experts - 1, generator=generator)
    weights_Tk, chosen_Tk = scores_TE.softmax(dim=-1).topk(case.active, dim=-1)
    made = Values(
        x_TD=drawn(case.tokens, case.hidden) * 4,
        chosen_Tk=chosen_Tk.to(device),
        weights_Tk=weights_Tk.to(device, case.dtype),
        frozen=[drawn(case.experts, outputs, inputs) for inputs, outputs in case.widths],
        dy_TD=drawn(case.tokens, case.hidden) * 4,
        factors={},
    )
    for site, (inputs, outputs) in enumerate(case.widths):
        for number, job in enumerate(case.jobs):
            if rank := job.ranks[site]:
                pair = [drawn(case.experts, rank, inputs), drawn(case.experts, rank, outputs) * case.grown]
                made.factors[site, number] = flat(pair, case.dtype)
    if case.sick is not None:
        made.x_TD[case.rows_of(case.sick)] = torch.nan
        for site, number in made.factors:
            if number == case.sick:
                for factor in made.factors[site, number]:
                    factor.fill_(torch.nan)
    return made


def wanted(case, device, dtype):
    """Plain autograd, token by token."""
    made = values(case, device)
    x_TD, weights_Tk = (t.to(dtype).requires_grad_() for t in (made.x_TD, made.weights_Tk))
    leaves = {key: [f.to(dtype).requires_grad_() for f in pair] for key, pair in made.factors.items()}
    linears = []
    for at, weight in enumerate(made.frozen):
        parts = [
            ExpertPart(case.rows_of(number).start, case.rows_of(number).stop, *pair, case.jobs[number].scale)
            for (site, number), pair in leaves.items()
            if site == at
        ]
        linears.append(ExpertSite(weight.to(dtype), parts=parts))
    y_TD = experts_output_reference(x_TD, made.chosen_Tk, weights_Tk, *linears, silu)
    y_TD.backward(made.dy_TD.to(dtype))
    found = {"y": y_TD.detach(), "dx": x_TD.grad, "dweights": weights_Tk.grad}
    for (site, number), pair in leaves.items():
        for name, leaf in zip(("da", "db"), pair, strict=True):
            found[f"{name} site{site} job{number}"] = (
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            )
    return found


def got(case, device, wants_dx=True, times=1):
    """Numbers in the table are not those of the owners: the jobs sit in it from behind."""
    made = values(case, device)
    room, totals, sites = 8, {}, []
    for at, ((inputs, outputs), weight) in enumerate(zip(case.widths, made.frozen, strict=True)):
        aligned = all(width % 8 == 0 for width in (inputs, outputs))
        rank = max([16, *(job.ranks[at] for job in case.jobs)])
        table = SlotTable.empty(["site"], room * case.experts, device, aligned, required_bands(rank))
        for (site, number), pair in made.factors.items():
            if site == at:
                totals[site, number] = flat([torch.zeros_like(one) for one in pair], torch.float32)
                entry = LowRank(*pair, *totals[site, number], case.jobs[number].scale, dropout=0.0)
                table.set_experts((room - 1 - number) * case.experts, entry)
        table.copy_to_device()
        group = Group(((0, outputs),), table, rank, has_dropout=False)
        sites.append(ExpertSite(weight, group if any(job.ranks[at] for job in case.jobs) else None))
    owner_T = case.owner_T.to(device)
    numbers_J = torch.tensor(
        [-1, *(room - 1 - number for number in range(len(case.jobs)))], dtype=torch.int32, device=device
    )
    anchor = torch.zeros((), device=device, requires_grad=True)
    for _ in range(times):
        x_TD, weights_Tk = (t.clone().requires_grad_(wants_dx) for t in (made.x_TD, made.weights_Tk))
        y_TD = lora_experts(x_TD, made.chosen_Tk, weights_Tk, anchor, sites, owner_T, numbers_J, case.plan)
        y_TD.backward(made.dy_TD)
    found = {"y": y_TD.detach(), "dx": x_TD.grad, "dweights": weights_Tk.grad}
    for (site, number), pair in totals.items():
        for name, total in zip(("da", "db"), pair, strict=True):
            found[f"{name} site{site} job{number}"] = total
    return found


SMALL = Case((Job(5, (5, 5)), Job(3, (2, 0), 2.0)), experts=3, hidden=24, inner=16)


def assert_close(found, want, bound=2e-6):
    assert found.keys() == want.keys()
    for name in want:
        scale = want[name].abs().max().clamp(min=1.0)
        assert ((found[name].double() - want[name]).abs().max() / scale) < bound, name


def assert_earned(case, device):
    truth, usual, found = (
        wanted(case, device, torch.float64),
        wanted(case, device, case.dtype),
        got(case, device),
    )
    for name in truth:
        rounding = torch.finfo(case.dtype).eps / 2 * truth[name].norm()
        allowed = max(2 * (usual[name].double() - truth[name]).norm(), rounding)
        assert (found[name].double() - truth[name]).norm() <= allowed, name


def assert_healthy_beside_a_sick_job(case, device):
    """What is not of the first job has the bits it had."""
    clean, sick = got(case, device), got(replace(case, sick=0), device)
    hurt = case.rows_of(0)
    healthy = torch.ones(case.tokens, dtype=torch.bool)
    healthy[hurt] = False
    for name in clean:
        if name in ("y", "dx", "dweights"):
            assert torch.equal(sick[name].cpu()[healthy], clean[name].cpu()[healthy]), name
            assert bool(sick[name][hurt].isnan().all())
        else:
            assert name.endswith("job0") == (not torch.equal(sick[name], clean[name])), name
