"""Experts by the tiled route, in Triton's interpreter or on a GPU, against the sum token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.functional import silu

from tests.ops.lora.woven import flat
from weftune.ops.experts import ExpertLinear, ExpertPart, experts_output_reference
from weftune.ops.lora.experts import ExpertSite, Owners, best_order, deal, woven_experts
from weftune.ops.lora.table import Entry, Group, SlotTable
from weftune.ops.lora.weave import Order

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("device")


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
    order: Order = Order.wide
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
        linears.append(ExpertLinear(weight.to(dtype), parts))
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
        table = SlotTable.empty(["site"], room * case.experts, device, aligned)
        for (site, number), pair in made.factors.items():
            if site == at:
                totals[site, number] = flat([torch.zeros_like(one) for one in pair], torch.float32)
                entry = Entry(*pair, *totals[site, number], case.jobs[number].scale, dropout=0.0)
                table.put_experts(table.host_views(), (room - 1 - number) * case.experts, entry)
        table.send()
        rank = max([16, *(job.ranks[at] for job in case.jobs)])
        group = Group(((0, outputs),), table, rank, drops=False)
        sites.append(ExpertSite(weight, group if any(job.ranks[at] for job in case.jobs) else None))
    owners = Owners(case.owner_T.to(device), (None, *map(str, range(len(case.jobs)))))
    numbers = [-1, *(room - 1 - number for number in range(len(case.jobs)))]
    numbers_J = torch.tensor(numbers, dtype=torch.int32, device=device)
    anchor = torch.zeros((), device=device, requires_grad=True)
    for _ in range(times):
        x_TD, weights_Tk = (t.clone().requires_grad_(wants_dx) for t in (made.x_TD, made.weights_Tk))
        y_TD = woven_experts(x_TD, made.chosen_Tk, weights_Tk, anchor, sites, owners, numbers_J, case.order)
        y_TD.backward(made.dy_TD)
    found = {"y": y_TD.detach(), "dx": x_TD.grad, "dweights": weights_Tk.grad}
    for (site, number), pair in totals.items():
        for name, total in zip(("da", "db"), pair, strict=True):
            found[f"{name} site{site} job{number}"] = total
    return found


CASES = {
    "ranks of all kinds": Case(),
    "one job, one expert": Case((Job(20),), experts=2, active=1),
    "widths of no alignment": Case((Job(6), Job(8)), hidden=37, inner=21),
    "nobody has adapters on gate and up": Case((Job(6, (0, 3)), Job(2, (0, 5)))),
    "nobody has any": Case((Job(6, (0, 0)),)),
    "the same, in a product of our own": Case((Job(6, (0, 0)),), order=Order.fused),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_plain_autograd_token_by_token(name, device):
    assert_close(got(CASES[name], device), wanted(CASES[name], device, torch.float64))


def test_so_they_do_where_the_product_has_the_adapters_in_it(device):
    """More rows of an expert than a block, more columns, and both cut where nothing is whole."""
    case = Case((Job(90, (5, 3)), Job(130, (16, 40)), Job(3)), experts=3, active=2, hidden=136, inner=72)
    case = replace(case, order=Order.fused, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    if device.type == "cpu":
        assert_close(got(case, device), wanted(case, device, torch.float64))
    else:
        assert_earned(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("order", [Order.wide, Order.fused])
def test_they_are_as_near_to_float64_as_plain_autograd_is_in_bfloat16(order):
    device = torch.device("cuda")
    jobs = tuple(Job(tokens, (4, 4), 1.0) for tokens in (200, 64, 3, 130))
    assert_earned(Case(jobs, 9, 4, 256, 128, torch.bfloat16, order), device)


@pytest.mark.gpu
def test_what_a_young_adapter_adds_is_not_rounded_away():
    """It is a fraction of the last digit: all traces of it are in how sums have been rounded."""
    device = torch.device("cuda")
    young = Case((Job(400, (4, 4), 1.0),), 9, 4, 256, 128, torch.bfloat16, Order.fused, grown=1 / 500)
    none = replace(young, grown=0.0)
    added = wanted(young, device, torch.float64)["y"] - wanted(none, device, torch.float64)["y"]
    y_TD = got(none, device)["y"].double()
    assert 0.0 < added.abs().mean() < y_TD.abs().mean() / 256
    seen = got(young, device)["y"].double() - y_TD
    assert (seen * added).sum() / (added**2).sum() == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("order", [Order.wide, Order.fused])
def test_a_nan_of_one_job_leaves_the_others_their_bits(order, device):
    case = Case(order=order)
    if device.type == "cuda":
        case = replace(case, dtype=torch.bfloat16)
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


def test_gradients_are_added_to_what_is_there_also_where_x_needs_none(device):
    once, twice = got(Case(), device), got(Case(), device, wants_dx=False, times=2)
    assert twice["dx"] is None
    for name in once:
        if name.startswith(("da ", "db ")):
            torch.testing.assert_close(twice[name], 2 * once[name], rtol=1e-6, atol=1e-6)


def test_an_expert_without_tokens_gets_no_gradient(device):
    found = got(Case(), device)
    for name, gradient in found.items():
        if name.startswith(("da ", "db ")) and "job2" not in name:
            assert not gradient[-1].any()
            assert gradient.any()


def test_choices_are_sorted_by_expert_then_by_job_and_cut_into_tiles_and_blocks():
    owners = Owners(torch.tensor([1, 1, 0, 2], dtype=torch.int32), (None, "a", "b"))
    chosen_Tk = torch.tensor([[2, 0], [0, 2], [2, 1], [0, 2]])
    dealt = deal(chosen_Tk, owners, torch.tensor([-1, 3, 0], dtype=torch.int32), experts=4, slots=16)
    assert dealt.order_S.tolist() == [1, 2, 6, 5, 4, 0, 3, 7]
    assert dealt.places_Tk.flatten()[dealt.order_S].tolist() == list(range(8))
    assert dealt.stops_E.tolist() == [3, 4, 8, 8]
    runs = [run for run in dealt.rows.pieces_Q4.tolist() if run[0] < run[1]]
    assert runs == [
        [0, 2, 12, 1],
        [2, 3, 0, 1],
        [3, 4, -1, 1],
        [4, 5, -1, 1],
        [5, 7, 14, 1],
        [7, 8, 2, 1],
    ]
    tiles = [tile for tile in dealt.rows.tiles_G3.tolist() if tile[0] < tile[1]]
    assert tiles == [run[:3] for run in runs]
    assert dealt.used_1.tolist() == [3]
    assert dealt.blocks_G5[:3].tolist() == [[0, 3, 0, 0, 2], [3, 4, 1, 2, 3], [4, 8, 2, 3, 6]]


def test_long_runs_are_cut_into_tiles_and_experts_into_blocks():
    owners = Owners(torch.ones(300, dtype=torch.int32), (None, "a"))
    chosen_Tk = torch.zeros(300, 1, dtype=torch.int64)
    chosen_Tk[150:] = 1
    dealt = deal(chosen_Tk, owners, torch.tensor([-1, 0], dtype=torch.int32), experts=2, slots=2)
    tiles = [tuple(tile) for tile in dealt.rows.tiles_G3.tolist() if tile[0] < tile[1]]
    assert tiles == [(0, 64, 0), (64, 128, 0), (128, 150, 0), (150, 214, 1), (214, 278, 1), (278, 300, 1)]
    blocks = [tuple(block) for block in dealt.blocks_G5.tolist() if block[0] < block[1]]
    assert blocks == [(0, 128, 0, 0, 1), (128, 150, 0, 0, 1), (150, 278, 1, 1, 2), (278, 300, 1, 1, 2)]


def test_a_product_of_our_own_is_for_gpus_that_have_copy_engines():
    table = SlotTable.empty(["site"], 8, torch.device("cpu"))
    site = ExpertSite(torch.zeros(2, 16, 16), Group(((0, 16),), table, 16, drops=False))
    assert best_order(site) is Order.wide


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
