"""What `weftune plan --json` predicts of the first window is what `weftune train` with the same options
predicts before it begins: layout, capacity, who is aboard, seconds and bytes. Twelve cases drawn by seed,
over all modes.

One process trains for a step or two; where several would, the run's own choice is asked without them, and in
the slow suite they are started. GPUs are pretended, as in `test_streaming.py`.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tests.bench import CPU
from tests.launches import deep_folder
from tests.plan.profiles import profile
from weftune import Options
from weftune.base.load import inspect, load_tokenizer
from weftune.cli.plan import read_cluster
from weftune.cli.plan_json import plan_numbers
from weftune.cli.plan_predict import predict
from weftune.jobs.spec.read import read_run
from weftune.jobs.store.scheduler import admit_jobs
from weftune.jobs.store.status import PREDICTION
from weftune.launch.plan_case import read_case
from weftune.plan.cost import cluster
from weftune.plan.cost.memory import SLACK_BYTES
from weftune.plan.cost.profile import (
    LayeredPass,
    cpu_threads,
    profile_folder,
    profile_key,
    profile_path,
    write_profile,
)
from weftune.plan.layout.choose import PROCESS_BYTES, choose_layout
from weftune.plan.outlook.first_window import first_window
from weftune.run.workers.groups import WorkerPosition
from weftune.trainer.job import prepare_job
from weftune.trainer.machine import describe_machine
from weftune.trainer.train import make_trainer

MODES = ("one device", "streamed", "pipeline", "streamed workers")
CASES = range(12)
FEW = range(len(MODES))
"""One of each mode; the others are slow together."""


@dataclass(frozen=True, slots=True)
class Case:
    mode: str
    jobs: tuple[dict[str, Any], ...]
    memory: int | None = None
    gpu_memory: int | None = None
    workers: int = 1
    profiled: bool = False

    @property
    def words(self) -> list[str]:
        """As both commands are told."""
        options = {"--memory": self.memory, "--gpu-memory": self.gpu_memory}
        words = [word for key, size in options.items() if size for word in (key, f"{size >> 10}KiB")]
        return [*words, *(["--pipeline", str(self.workers)] if self.workers > 1 else [])]


def drawn(seed: int) -> Case:
    """Jobs of other ranks, lengths and batch sizes; some evaluate. Every second time by a profile."""
    dice, mode = random.Random(seed), MODES[seed % len(MODES)]
    jobs = tuple(_job(dice, number) for number in range(dice.randint(2, 4)))
    case = Case(mode, jobs, profiled=seed // len(MODES) % 2 == 0)
    match mode:
        case "one device":
            # Beside process, base and slack so little that the capacity or a job has to give way.
            room = dice.choice((None, 900 << 10, 1300 << 10, 2 << 20))
            return replace(case, memory=room and PROCESS_BYTES + SLACK_BYTES + (280 << 10) + room)
        case "streamed":
            return replace(case, gpu_memory=dice.randint(640, 1200) << 10)
        case "pipeline":
            return replace(case, workers=dice.randint(2, 4))
        case _:
            return replace(case, workers=2, gpu_memory=dice.randint(590, 680) << 10)


def _job(dice: random.Random, number: int) -> dict[str, Any]:
    job: dict[str, Any] = {
        "name": f"job{number}",
        "steps": dice.randint(2, 20),
        "batch_size": dice.randint(1, 6),
        "priority": dice.randint(0, 1),
        "seed": dice.randint(0, 9),
        "data": {"path": dice.choice(("short.jsonl", "long.jsonl")), "max_length": 64},
        "adapter": {"rank": dice.choice((2, 3, 6))},
    }
    if dice.random() < 0.4:
        job["eval"] = {"fraction": 0.2, "every": dice.randint(1, 9)}
    return job


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = deep_folder(tmp_path_factory.mktemp("first-windows"), [])
    for name, least, most in (("short", 3, 12), ("long", 12, 26)):
        dice = random.Random(name)
        rows = [" ".join(["w7"] * dice.randint(least, most)) for _ in range(30)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return place


@pytest.fixture
def written(folder, tmp_path, monkeypatch):
    """The jobs file of a case, in a place with a cache of its own and a process of a known size."""
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.setattr(cluster, "_query_smi", lambda: "")
    monkeypatch.setattr("weftune.trainer.machine.bytes_before_base", lambda device: PROCESS_BYTES)

    def write(case: Case):
        values = yaml.safe_load((folder / "jobs.yaml").read_text()) | {"jobs": list(case.jobs)}
        (folder / "case.yaml").write_text(yaml.safe_dump(values))
        if case.profiled:
            shape = inspect(read_run(folder / "case.yaml").base, CPU)
            known = replace(
                profile(),
                key=profile_key(shape, "cpu", cpu_threads()),
                passes=tuple(with_logits(one) for one in profile().passes),
                first_worker_bytes=PROCESS_BYTES,
                worker_bytes=PROCESS_BYTES - (60 << 20),
            )
            write_profile(profile_path(profile_folder(), known.key), known)
        return folder / "case.yaml"

    return write


def with_logits(one: LayeredPass) -> LayeredPass:
    """The same where supervised rows have taken memory, too."""
    return replace(one, peak_bytes=one.peak_bytes and one.peak_bytes + 1000 * one.time.work.supervised)


def planned(case: Case, file) -> dict[str, Any]:
    """By `weftune plan --json`, on this machine."""
    options = Options(
        memory=case.memory,
        gpu_memory=case.gpu_memory,
        pipeline=case.workers if case.workers > 1 else None,
    )
    question = read_case(read_run(file), read_cluster("auto", case.gpu_memory), options, on_this_machine=True)
    return json.loads(json.dumps(plan_numbers(predict(question))["first_window"]))


def trained(case: Case, file, output) -> dict[str, Any]:
    """By a run in this process, as it wrote before its first window."""
    options = Options(device="cpu", memory=case.memory, gpu_memory=case.gpu_memory)
    trainer = make_trainer(read_run(file), output=output, options=options)
    trainer.run(lambda event: [trainer.cancel(name) for name in trainer.loop.executor.attached])
    return json.loads((output / PREDICTION).read_text())


def asked_alone(case: Case, file) -> dict[str, Any]:
    """What the first of several workers chooses, and plans for them, before it has met the others."""
    run, ring = read_run(file), case.gpu_memory is not None
    shape, tokenizer = inspect(run.base, CPU), load_tokenizer(run.base)
    ready = {
        job.name: prepare_job(job, place, tokenizer, shape, profile_folder().parent / "tokens")
        for place, job in enumerate(run.jobs)
    }
    place = WorkerPosition(0, case.workers, 0, case.workers, is_ring=ring)
    options = Options(
        memory=case.memory,
        gpu_memory=case.gpu_memory,
        staff=SimpleNamespace(connections=SimpleNamespace(position=place)),
    )
    shapes = [job.shape for job in ready.values()]
    choice = choose_layout(shape, shapes, describe_machine(options, run.base, CPU, shape))
    admitted = admit_jobs(shapes, [], choice.memory.misfit_reason).admitted_names
    by_name = {one.name: one for one in shapes}
    window = first_window(
        choice,
        [by_name[name] for name in admitted],
        lambda name, rounds: ready[name].job_window(0, rounds, is_first_window=True),
    )
    return json.loads(json.dumps(window.numbers))


@pytest.mark.parametrize(
    "seed", [seed if seed in FEW else pytest.param(seed, marks=pytest.mark.slow) for seed in CASES]
)
def test_plan_and_run_predict_the_same(seed, written, tmp_path):
    case = drawn(seed)
    file = written(case)
    plan = planned(case, file)
    run = asked_alone(case, file) if case.workers > 1 else trained(case, file, tmp_path / "out")
    assert plan == run
    assert (plan["seconds"] is not None) == case.profiled
    assert len(plan["layout"]["slots"]) == case.workers
    assert plan["aboard"]


@pytest.mark.parametrize("gpu_memory", [None, 900 << 10])
def test_jobs_with_a_reference_policy_are_planned_to_score_first_as_they_do(
    gpu_memory, folder, written, tmp_path
):
    rows = [{"prompt": "w7 ", "chosen": "w8 " * n, "rejected": "w9"} for n in range(1, 12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"data": {"path": "pairs.jsonl", "max_length": 64}, "steps": 2, "eval": {"fraction": 0.3}}
    jobs = (
        {"name": "dpo", "objective": "dpo", "adapter": {"rank": 2}, **keys},
        {"name": "same", "objective": {"kind": "dpo", "beta": 0.5}, "adapter": {"rank": 3}, **keys},
        {"name": "prefix", "objective": "dpo", "adapter": {"kind": "prefix"}, **keys},
        {**_job(random.Random(0), 0), "name": "sft"},
    )
    case = Case("one device", jobs, gpu_memory=gpu_memory, profiled=True)
    file = written(case)
    plan = planned(case, file)
    assert plan == trained(case, file, tmp_path / "out")
    assert plan["seconds"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in CASES if drawn(seed).workers > 1])
def test_several_workers_predict_what_was_planned_for_them(seed, folder, written, forks):
    case = drawn(seed)
    written(replace(case, profiled=False))
    for words in (
        ["plan", "case.yaml", "--json", "plan.json"],
        ["train", "case.yaml", "--output", f"{seed}"],
    ):
        more = ["--device", "cpu", "--max-steps", "2"] if words[0] == "train" else ["--max-steps", "2"]
        assert forks.weftune(*words, *case.words, *more, cwd=folder) == 0, (folder / "log").read_text()
    plan = json.loads((folder / "plan.json").read_text())["first_window"]
    run = json.loads((folder / f"{seed}" / PREDICTION).read_text())
    # Without a profile nobody knows how large a process is.
    assert {**plan, "process_bytes": 0} == {**run, "process_bytes": 0}


@pytest.mark.slow
def test_every_mode_is_among_the_cases_and_the_layouts_are_theirs(written):
    assert {drawn(seed).mode for seed in CASES} == set(MODES)
    layouts = {}
    for seed in FEW:
        case = drawn(seed)
        layouts[case.mode] = planned(case, written(case))["layout"]
    assert len(layouts["one device"]["stages"]) == 1
    assert any(not stage["resident"] for stage in layouts["streamed"]["stages"])
    assert all(stage["resident"] for stage in layouts["pipeline"]["stages"])
    assert len(layouts["streamed workers"]["stages"]) > 2, "two workers take turns"
