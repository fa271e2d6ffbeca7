"""Jobs give way to those of higher priority at window boundaries, and go on to the same curve."""

import errno
import random

import pytest

from tests import bench
from tests.outputs import assert_same_job, assert_whole, lines, states, status
from weftune import JobSpec, Options
from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.layout.seats import MAX_OVERTAKES
from weftune.run.events import Stepped
from weftune.run.executor import Executor
from weftune.trainer.loop import Loop

RANK = 4
LONGEST = 20


@pytest.fixture(scope="module")
def base():
    return bench.base()


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """What the process holds is not the same twice; a budget to the byte wants it left out, and what a window
    teaches too."""
    monkeypatch.setattr("weftune.trainer.machine.bytes_before_base", lambda device: 0)
    monkeypatch.setattr("weftune.plan.cost.fitted.FittedModels.adopt_fitted_models", lambda self: False)


def job(name, steps, **keys):
    rows = bench.rows(bench.samples(12, seed=sum(map(ord, name)), longest=LONGEST))
    settings = {"batch_size": 4, "learning_rate": 1e-2, "adapter": {"rank": RANK, "dropout": 0.1}}
    return JobSpec(name=name, data=rows, steps=steps, **settings | keys)


def room_for(base, jobs):
    """Bytes that so many jobs of `RANK` take, and half a job more."""
    trainable = sum(RANK * (site.in_features + site.out_features) for site in base.shape.sites)
    shapes = [JobShape(str(n), 0, n, trainable, LONGEST) for n in range(jobs)]
    memory = MemoryModel(base.shape, 0)
    return memory.peak_bytes(shapes, LONGEST) + memory.state_bytes(shapes[:1]) // 2


def assert_as_alone(base, tmp_path, jobs):
    for spec in jobs:
        bench.train(base, tmp_path / f"solo-{spec.name}", [spec])
        assert_same_job(tmp_path / "out", tmp_path / f"solo-{spec.name}", spec.name)


def test_the_lowest_gives_way_at_a_window_boundary_and_goes_on_to_the_same_curve(base, tmp_path):
    low = job("low", 14, eval={"fraction": 0.3, "every": 3}, keep="best")
    middle, urgent = job("middle", 9, priority=1), job("urgent", 6, priority=9)
    output = tmp_path / "out"
    options = Options(memory=room_for(base, 2))
    trainer = bench.trainer(base, output, [low, middle], options=options)
    reasons = []

    def callback(event):
        if (event.job, event.step) == ("low", 2) and isinstance(event, Stepped):
            trainer.add(urgent)
        if event.job == "urgent":
            reasons.append(status(output)["jobs"]["low"]["reason"])

    trainer.run(callback)
    assert set(reasons) == {"preempted by urgent, priority 9"}
    steps = [(line["job"], line["step"]) for line in lines(output) if "loss" in line]
    came, went = steps.index(("urgent", 1)), steps.index(("urgent", 6))
    assert "low" in {name for name, _ in steps[:came]}
    assert {name for name, _ in steps[came:went]} == {"urgent", "middle"}
    assert_whole(output)
    assert_as_alone(base, tmp_path, [low, middle, urgent])


def test_who_gives_way_but_cannot_be_saved_is_paused_and_the_other_comes(base, tmp_path, monkeypatch):
    low, urgent = job("low", 14), job("urgent", 6, priority=9)
    trainer = bench.trainer(base, tmp_path / "out", [low], options=Options(memory=room_for(base, 1)))

    def unwritable(self, name, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    def callback(event):
        if (event.job, event.step) == ("low", 2):
            trainer.add(urgent)

    with monkeypatch.context() as patched:
        patched.setattr(Executor, "save_now", unwritable)
        results = trainer.run(callback)
    assert {name: result.state for name, result in results.items()} == {
        "low": "paused",
        "urgent": "succeeded",
    }
    assert "cannot be written: No space left on device" in results["low"].reason
    bench.train(base, tmp_path / "out", [low, urgent], resume=True)
    assert states(tmp_path / "out") == {"low": "succeeded", "urgent": "succeeded"}
    assert_as_alone(base, tmp_path, [low, urgent])


def arrivals(seed, count):
    """Jobs of random sizes and priorities, each with the number of events after which it comes."""
    dice = random.Random(seed)
    for number in range(count):
        keys = {
            "priority": dice.randint(0, 3),
            "adapter": {"rank": dice.choice([1, RANK, 2 * RANK]), "dropout": dice.choice([0.0, 0.1])},
            "save_every": dice.choice([3, 5]),
        }
        if dice.random() < 0.3:
            keys |= {"eval": {"fraction": 0.3, "every": dice.randint(2, 4)}, "keep": "best"}
        yield job(f"job{number}", dice.randint(4, 14), **keys), dice.randint(0, 3)


class Watched:
    """Looks at the loop behind every boundary: nobody waits behind a lower priority that would make room."""

    def __init__(self, monkeypatch):
        self.boundaries, self.preempted, self.overtaken = 0, set(), 0
        real = Loop._admit_jobs

        def watched(loop):
            before = set(loop.executor.attached)
            real(loop)
            self.boundaries += 1
            self.preempted |= before & set(loop.waiting_jobs)
            self.look(loop)

        monkeypatch.setattr(Loop, "_admit_jobs", watched)

    def look(self, loop):
        self.overtaken = max([self.overtaken, *loop._overtake_counts.values()])
        running = [loop.jobs[name].shape for name in loop.executor.attached]
        held = any(count >= MAX_OVERTAKES for count in loop._overtake_counts.values())
        for name, waits in loop.waiting_jobs.items():
            above = [one for one in running if one.priority >= waits.shape.priority]
            assert held or loop._misfit_reason([*above, waits.shape]) is not None, (
                f"{name} waits behind a lower priority"
            )


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed"), [(4, 3), *((20, seed) for seed in range(3))])
def test_random_arrivals_of_random_priorities_each_end_as_alone(base, tmp_path, monkeypatch, count, seed):
    coming = list(arrivals(seed, count))
    jobs = [spec for spec, _ in coming]
    watched = Watched(monkeypatch)
    (first, _), *rest = coming
    trainer = bench.trainer(base, tmp_path / "out", [first], options=Options(memory=room_for(base, 3)))
    seen = 0

    def callback(_event):
        nonlocal seen
        seen += 1
        while rest and seen >= rest[0][1]:
            trainer.add(rest.pop(0)[0])
            seen = 0

    trainer.run(callback)
    assert watched.preempted, "the test wants somebody to give way"
    assert watched.overtaken <= MAX_OVERTAKES
    assert_whole(tmp_path / "out")
    assert_as_alone(base, tmp_path, jobs)
