"""`weftune plan` where the base fits each device: jobs divided by what runs take, each share foreseen."""

from benchmarks.studies.scheme import make_batch
from tests.plan.outlooks import SHAPE, outline
from weftune.plan.cost.cluster import parse_cluster
from weftune.plan.cost.estimate import data_sheet_speed
from weftune.plan.cost.prior import flop_terms
from weftune.plan.cost.time import Rate
from weftune.plan.layout.choose import Machine, choose_layout, fitting_jobs
from weftune.plan.layout.foresee import StageTimes
from weftune.plan.outlook.forecast import predict_window, share_outlook
from weftune.plan.window.rounds import JobWindow

SPEED = data_sheet_speed(parse_cluster("A100-80G").devices[0])
TIMES = StageTimes(SHAPE.layers, flop_terms(SHAPE).multiply_by(1 / SPEED.flops), Rate())


def shared(jobs, seconds, devices=2, gib=72):
    machine = Machine(on_gpu=True, budget_bytes=gib << 30)
    shapes, by_name = [job.shape for job in jobs], {job.name: job for job in jobs}

    def course(name, rounds, begins):
        batches = by_name[name].batches[:rounds]
        made = tuple(make_batch(name, step, lengths) for step, lengths in enumerate(batches, 1))
        return JobWindow(name, 0, made, (), frozenset(), frozenset(), begins)

    def alone(some):
        choice = choose_layout(SHAPE, some, machine)
        return predict_window(choice, fitting_jobs(some, choice.memory), course, TIMES)

    return share_outlook(shapes, seconds, devices, alone)


def test_longer_runs_weigh_more():
    jobs = [outline(name, 400) for name in "abcd"]
    even = shared(jobs, dict.fromkeys("abcd", 10.0))
    assert [len(share.jobs) for share in even.shares] == [2, 2]
    long = shared(jobs, {**dict.fromkeys("abcd", 10.0), "a": 100.0})
    assert sorted(share.jobs for share in long.shares) == [("a",), ("b", "c", "d")]


def test_every_share_is_foreseen_with_its_own_jobs_and_all_together_train_faster():
    jobs = [outline(name, 400) for name in "abcd"]
    found = shared(jobs, dict.fromkeys("abcd", 10.0))
    assert [tuple(part.window.shapes) for part in found.parts] == [share.jobs for share in found.shares]
    one = shared(jobs, dict.fromkeys("abcd", 10.0), devices=1)
    assert 1.8 < found.tokens_per_second / one.tokens_per_second < 2.1


def test_a_share_whose_jobs_do_not_fit_together_shows_who_comes_first():
    jobs = [outline(name, 200, rank=64) for name in "abcd"]
    found = shared(jobs, dict.fromkeys("abcd", 10.0), gib=22)
    assert [len(share.jobs) for share in found.shares] == [2, 2]
    assert [list(part.window.shapes) for part in found.parts] == [[share.jobs[0]] for share in found.shares]
