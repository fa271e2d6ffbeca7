"""Two deterministic runs plan the same Programs and give the same bits, whatever they measure."""

import json
from types import SimpleNamespace

import psutil
import pytest
import torch

from tests import bench
from tests.launches import Launch, deep_folder
from tests.outputs import states, status
from tests.test_memory import strike_above
from weftune import JobSpec, Options, train
from weftune.jobs.spec.read import parse_run
from weftune.jobs.store.job_file import read_job_file
from weftune.plan.layout.choose import PROCESS_BYTES, WINDOW_ROUNDS
from weftune.trainer.train import make_trainer

GIB = 1 << 30


def job(name, steps, **keys):
    rows = bench.rows(bench.samples(24, seed=sum(map(ord, name)), longest=60))
    settings = {"batch_size": 6, "learning_rate": 1e-2, "adapter": {"rank": 4, "dropout": 0.1}}
    return JobSpec(name=name, data=rows, steps=steps, **settings | keys)


def jobs():
    return [job("a", 3), job("b", 12, eval={"fraction": 0.2, "every": 4}), job("c", 7), job("d", 9)]


@pytest.fixture(scope="module")
def base():
    return bench.base(dtype=torch.float32)


def clock_of(speed):
    """A clock of the loop on which every call is so many seconds after the one before."""
    seconds = iter(range(0, 1 << 40, speed))
    return SimpleNamespace(monotonic=lambda: float(next(seconds)))


def run(base, output, deterministic, **options):
    trainer = bench.trainer(base, output, jobs(), options=Options(deterministic=deterministic, **options))
    trainer.run()
    return trainer.programs


def planned(output):
    """What windows.jsonl says of the plans."""
    lines = [json.loads(line) for line in (output / "windows.jsonl").read_text().splitlines()]
    return [(line["capacity"], line["tokens"], line["microbatches"], line["jobs"]) for line in lines]


def assert_same_bits(one, other):
    for spec in jobs():
        assert bench.losses(one, spec.name) == bench.losses(other, spec.name)
        adapter, twin = bench.adapter(one / spec.name), bench.adapter(other / spec.name)
        assert adapter.keys() == twin.keys()
        assert all(torch.equal(adapter[name], twin[name]) for name in adapter)


@pytest.fixture
def slow_and_fast(base, tmp_path, monkeypatch):
    """The same jobs by a clock on which a window takes an hour, and by one on which it takes no time."""

    def both(deterministic):
        found = []
        for name, speed in (("slow", 3600), ("fast", 0)):
            monkeypatch.setattr("weftune.trainer.loop.time", clock_of(speed) if speed else still())
            found.append(run(base, tmp_path / name, deterministic))
        return found

    return both


def still():
    return SimpleNamespace(monotonic=lambda: 0.0)


@pytest.mark.slow
def test_runs_that_take_other_times_plan_the_same_windows_and_give_the_same_bits(slow_and_fast, tmp_path):
    slow, fast = slow_and_fast(True)
    assert slow == fast
    assert len({batch.step for batch in slow[0].batches}) == WINDOW_ROUNDS
    assert planned(tmp_path / "slow") == planned(tmp_path / "fast")
    assert_same_bits(tmp_path / "slow", tmp_path / "fast")


@pytest.mark.slow
def test_without_the_key_they_plan_other_windows(slow_and_fast):
    slow, fast = slow_and_fast(False)
    assert slow != fast
    assert len(slow) > len(fast)


@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_free_memory_changes_no_deterministic_plan(base, tmp_path, monkeypatch, deterministic):
    """Jobs wait for one another where little is free, unless the plan does not look at it."""
    needed, real = PROCESS_BYTES + base.shape.base_bytes, psutil.virtual_memory()
    found = []
    for name, free in (("much", 64 * GIB), ("little", needed // 2)):
        memory = real._replace(total=64 * GIB, available=free)
        monkeypatch.setattr("psutil.virtual_memory", lambda memory=memory: memory)
        monkeypatch.setattr("weftune.run.measure.memory.resident_bytes", lambda device, free=free: free // 8)
        found.append(run(base, tmp_path / name, deterministic))
    assert (found[0] == found[1]) is deterministic
    warned = [note for note in status(tmp_path / "little")["notes"] if note.startswith("warning: determin")]
    assert len(warned) == deterministic
    if deterministic:
        assert_same_bits(tmp_path / "much", tmp_path / "little")


@pytest.mark.slow
def test_stages_in_two_processes_give_the_same_bits_twice(tmp_path):
    """Each plans its microbatches' order by the layers of the stages, not by the times that they report."""
    keys = {"steps": 40, "batch_size": 8, "adapter": {"rank": 4, "dropout": 0.1}}
    folder = deep_folder(tmp_path, [{"name": name, **keys} for name in ("a", "b", "c")])
    file = folder / "jobs.yaml"
    file.write_text("deterministic: true\n" + file.read_text())
    for name in ("one", "other"):
        assert Launch(folder, name, 2).wait() == 0
        assert states(folder / name) == dict.fromkeys("abc", "succeeded")
    assert planned(folder / "one") == planned(folder / "other")
    for name in "abc":
        assert bench.losses(folder / "one", name) == bench.losses(folder / "other", name)
        adapter, twin = (bench.adapter(folder / run / name) for run in ("one", "other"))
        assert all(torch.equal(adapter[site], twin[site]) for site in adapter)


def test_a_shortage_of_memory_says_that_the_bits_differ(tmp_path):
    base = bench.base()
    strike_above(base, 120)
    bench.train(base, tmp_path / "out", [job("a", 1)], deterministic=True, capacity=200)
    sentence = (
        "Out of memory with 200 tokens per microbatch: continuing with 100. Deterministic: the bits differ "
        "from here on from those of a run without this shortage."
    )
    assert sentence in status(tmp_path / "out")["notes"]


def test_the_key_of_the_file_reaches_the_run_and_job_yaml(base, tmp_path):
    spec = {"base": "demo", "deterministic": True, "jobs": [{"name": "a", "data": [{"text": "b"}]}]}
    assert make_trainer(parse_run(spec, tmp_path)).options.deterministic
    assert not make_trainer(parse_run({**spec, "deterministic": False}, tmp_path)).options.deterministic
    for deterministic in (True, False):
        output = tmp_path / str(deterministic)
        bench.train(base, output, [job("a", 1)], deterministic=deterministic)
        found = read_job_file(output / "a")
        assert found is not None
        assert found.values.get("deterministic", False) is deterministic
    assert not torch.are_deterministic_algorithms_enabled()


def test_train_takes_the_word_of_the_caller(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("weftune.trainer.trainer.Trainer.run", lambda self, _: seen.append(self.options))
    asked = {"base": "demo", "jobs": [{"name": "a", "data": [{"text": "b"}]}]}
    train(asked, deterministic=True, progress=False)
    assert seen[0].deterministic
