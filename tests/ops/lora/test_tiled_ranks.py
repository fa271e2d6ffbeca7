"""Jobs of unlike ranks in one microbatch: what of a small one is multiplied, stored and read."""

import pytest
import torch

from tests.cases import slow_but
from tests.ops.lora.site_cases import Case, Job, close, healthy_after, run, truth
from weftune.ops.lora import tiled_kernels

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("device", "nothing_is_zero_by_chance"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_tiled_gpu.py runs the kernels compiled"),
]

RANKS = (8, 16, 32, 64, 3, 17)
MIXED = Case([Job(5 + 4 * slot, rank=rank) for slot, rank in enumerate(RANKS)], features=40, widths=(72, 24))


@pytest.fixture
def nothing_is_zero_by_chance(monkeypatch):
    """Memory that nobody has written holds NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    assert torch.zeros(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def in_shares(case):
    """The sum over K is split among programs from so many features on."""
    return Case(case.jobs, features=256, widths=(40,), gap=case.gap, piece=case.piece)


@pytest.mark.parametrize("drop", slow_but([0.0, 0.1], [0.1]))
@pytest.mark.parametrize("case", [MIXED, in_shares(MIXED)], ids=["one sum", "a sum in shares"])
def test_ranks_of_8_to_64_beside_each_other_equal_plain_autograd(case, drop):
    close(run(case.dropping(drop)), truth(case.dropping(drop)))


def test_slots_of_unlike_ranks_and_several_pieces_equal_plain_autograd():
    case = Case([Job(40, rank=64), Job(50, rank=8), Job(33, rank=16), Job(2, rank=40)], piece=16, features=40)
    close(run(case), truth(case))


def test_ds_of_small_ranks_is_the_same_from_two_reads_of_dy():
    close(run(MIXED, one_read=False), truth(MIXED))


def test_what_nobody_has_written_takes_no_part_in_a_product(monkeypatch):
    """Not even one whose result is dropped. Numpy tells of it, if what lies there is large."""
    monkeypatch.setattr(
        torch, "empty_like", lambda like, **other: 200 * torch.full_like(like, 2**30, **other) ** 4
    )
    case = Case([Job(9, rank=5, sites=(1,)), Job(20, rank=8)], widths=(24, 16, 16))
    close(run(case), truth(case))


def test_no_share_of_a_sum_is_written_beyond_a_jobs_own_ranks(monkeypatch):
    """Of small ranks beside large ones the most would be nothing but traffic."""
    case, seen = in_shares(MIXED), []
    summed = tiled_kernels.sum_rows

    def watched(partial_CTR, s_TPR, shares, call):
        summed(partial_CTR, s_TPR, shares, call)
        seen.append(partial_CTR)

    monkeypatch.setattr(tiled_kernels, "sum_rows", watched)
    run(case)
    forward, backward = seen
    assert min(len(forward), len(backward)) > 1
    for shares_CTR in seen:
        for slot, rank in enumerate(RANKS):
            # At most 16 ranks go a way of their own, which stores all 16.
            stored = max(16, -(-rank // 8) * 8)
            rows_CTR = shares_CTR[:, case.rows_of(slot)]
            assert rows_CTR[..., :rank].isfinite().all()
            assert rows_CTR[..., stored:].isnan().all()
        assert shares_CTR[:, case.padding_rows].isnan().all()


@pytest.mark.parametrize(
    ("poison", "sick"),
    slow_but(
        [("x", 8), ("a", 64), ("b", 8), ("dy", 8), ("dy", 64), ("padding", 64)],
        [("dy", 8)],
    ),
)
def test_a_nan_stays_with_its_owner_among_unlike_ranks(poison, sick):
    jobs = [Job(9, rank=64), Job(20, rank=sick), Job(11, rank=16), Job(7, rank=40)]
    healthy_after(in_shares(Case(jobs, piece=16)), poison)
