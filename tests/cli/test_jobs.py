"""`weftune jobs` on a running `weftune train`, in a process of its own: no job loses a bit by it."""

import json
import random
import signal
import time
from functools import partial

import pytest
import yaml

from tests.cases import slow_but
from tests.launches import Launch, Shares, copied, dealt, deep_folder, fresh
from tests.outputs import assert_same_job, assert_whole, jobs_folder, lines, states, status
from weftune.cli import jobs
from weftune.errors import UserError
from weftune.jobs.store.inbox import INBOX, pending_requests

LONG, SHORT = 100, 12
JOBS = [
    {"name": "alpha", "steps": LONG, "adapter": {"rank": 4, "dropout": 0.1}},
    {"name": "beta", "steps": LONG, "adapter": {"rank": 3}, "data": "b.jsonl", "seed": 2},
]
LATE = [
    {"name": "late", "steps": SHORT, "adapter": {"rank": 2, "dropout": 0.1}, "data": "b.jsonl"},
    {"name": "later", "steps": SHORT, "adapter": {"rank": 5}, "eval": {"fraction": 0.2, "every": 3}},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A folder with jobs.yaml and late.yaml; `undisturbed` is what all of their jobs become together."""
    folder = jobs_folder(tmp_path_factory.mktemp("jobs"), [*JOBS, *LATE])
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    whole = yaml.safe_load((folder / "jobs.yaml").read_text())
    (folder / "late.yaml").write_text(yaml.safe_dump({**whole, "jobs": LATE}))
    (folder / "jobs.yaml").write_text(yaml.safe_dump({**whole, "jobs": JOBS}))
    return folder


class Running:
    """A run in a process of its own, which is killed at the end of the test if it still runs."""

    def __init__(self, forks, folder, name):
        self.forks, self.folder, self.output = forks, folder, folder / name

    def start(self, *more):
        self.forks.start("train", "jobs.yaml", "--output", self.output.name, *more, cwd=self.folder)

    def until(self, true):
        deadline = time.monotonic() + 60
        while not true():
            assert self.forks.running(), (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "the run does not get there"
            time.sleep(0.03)

    def step(self, job):
        """The job's last step in the metrics, which are written at once; the status takes up to a second."""
        path = self.output / "metrics.jsonl"
        written = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        found = [line for line in map(json.loads, written) if line["job"] == job and "loss" in line]
        return max((line["step"] for line in found), default=0)

    def is_beyond(self, job, step):
        return self.step(job) > step

    def kill(self):
        self.forks.signal(signal.SIGKILL)
        self.forks.wait()


@pytest.fixture
def run(place, forks, request):
    one = Running(forks, place, request.node.name.replace("[", "-").replace("]", "")[-60:])
    yield one
    one.kill()


def printed(capsys):
    return capsys.readouterr().out.strip()


def test_a_job_is_paused_while_the_other_trains_and_resumes_to_the_same_bits(run, place, capsys):
    run.start()
    run.until(lambda: run.step("alpha") > 5)
    jobs.pause("alpha", run.output)
    paused = status(run.output)["jobs"]["alpha"]
    assert paused["state"] == "paused"
    assert printed(capsys) == f"alpha is paused at step {paused['step']}."
    assert paused["reason"].startswith(
        f"paused on request at step {paused['step']}; resume with weftune train"
    )
    before = run.step("beta")
    run.until(lambda: run.step("beta") > before + 10)
    assert run.step("alpha") == paused["step"] < LONG
    jobs.list_jobs(run.output)
    table = printed(capsys)
    assert "paused on request" in table
    assert "running" in table
    jobs.resume("alpha", run.output)
    assert printed(capsys) == f"alpha is queued; it resumes from step {paused['step']}."
    assert run.forks.wait() == 0
    assert_whole(run.output)
    for name in ("alpha", "beta"):
        assert_same_job(run.output, place / "undisturbed", name)
    assert pending_requests(run.output) == []


def test_jobs_that_are_added_join_the_run_and_kills_lose_none_of_them(run, place, capsys):
    run.start()
    run.until(lambda: run.step("alpha") > 5)
    jobs.add(place / "late.yaml", run.output)
    assert printed(capsys) == "late, later have joined the run."
    moved = place / "late.yaml"
    content = moved.read_text()
    moved.unlink()  # The run has a copy.
    try:
        run.kill()
        run.start("--resume")
        run.until(lambda: run.step("late") > 1 and run.step("alpha") < LONG)
        run.kill()
        assert (
            run.forks.weftune("train", "jobs.yaml", "--output", run.output.name, "--resume", cwd=place) == 0
        )
    finally:
        moved.write_text(content)
    assert_whole(run.output)
    assert set(states(run.output)) == {"alpha", "beta", "late", "later"}
    for name in states(run.output):
        assert_same_job(run.output, place / "undisturbed", name)


def test_a_cancelled_job_ends_and_a_priority_is_changed(run, place, capsys):
    run.start()
    run.until(lambda: run.step("alpha") > 3)
    jobs.priority("beta", 7, run.output)
    assert printed(capsys) == "beta has priority 7."
    jobs.cancel("alpha", run.output)
    step = status(run.output)["jobs"]["alpha"]["step"]
    assert printed(capsys) == f"alpha is cancelled at step {step}."
    assert states(run.output)["alpha"] == "cancelled"
    assert run.forks.wait() == 1
    assert max(line["step"] for line in lines(run.output) if line["job"] == "alpha") == step < LONG
    assert_same_job(run.output, place / "undisturbed", "beta")


@pytest.mark.slow
def test_a_run_whose_jobs_are_all_paused_ends_and_is_resumed(run, place, capsys):
    run.start()
    run.until(lambda: min(run.step("alpha"), run.step("beta")) > 3)
    jobs.pause("alpha", run.output)
    jobs.pause("beta", run.output)
    assert run.forks.wait() == 130
    assert "Resume with weftune train jobs.yaml" in (place / "log").read_text()
    assert set(states(run.output).values()) == {"paused"}
    with pytest.raises(UserError, match=r"no weftune train is running in .*; resume it with weftune train"):
        jobs.resume("alpha", run.output)
    assert run.forks.weftune("train", "jobs.yaml", "--output", run.output.name, "--resume", cwd=place) == 0
    for name in ("alpha", "beta"):
        assert_same_job(run.output, place / "undisturbed", name)


def test_what_cannot_be_done_is_refused_in_a_sentence(run, place, tmp_path):
    with pytest.raises(UserError, match="holds no run: name the output folder of a running weftune train"):
        jobs.pause("alpha", tmp_path)
    run.start()
    run.until(lambda: run.step("alpha") > 1)
    whole = yaml.safe_load((place / "late.yaml").read_text())

    def add(**keys):
        (place / "other.yaml").write_text(yaml.safe_dump({**whole, **keys}))
        jobs.add(place / "other.yaml", run.output)

    refusals = {
        "there is no job alpah in .*; did you mean alpha\\?": lambda: jobs.pause("alpah", run.output),
        "alpha is not paused: it is running": lambda: jobs.resume("alpha", run.output),
        "jobs\\[0\\].name: the run has a job of that name already": lambda: add(jobs=JOBS),
        "base.dtype: the run has float64, not float32": lambda: add(
                base={"model": "model", "dtype": "float32"}
            ),
        "other.yaml:[0-9]+ jobs\\[0\\].learning_rate": lambda: add(jobs=[{**LATE[0], "learning_rate": -1}]),
        "jobs\\[0\\].name: the run has a job or a sweep of that name already": lambda: add(
            jobs=[{**LATE[1], "name": "alpha", "sweep": {"over": {"learning_rate": [0.1, 0.01]}}}]
        ),
        "cannot read .*nothing.yaml": lambda: jobs.add(place / "nothing.yaml", run.output),
    }  # fmt: skip
    for sentence, attempt in refusals.items():
        with pytest.raises(UserError, match=sentence):
            attempt()
    jobs.cancel("alpha", run.output)
    with pytest.raises(UserError, match="alpha has ended: it is cancelled"):
        jobs.pause("alpha", run.output)
    broken = run.output / INBOX / "0.json"
    broken.write_text("no request")
    run.until(lambda: (run.output / INBOX / "refused" / "0.json").exists())
    jobs.cancel("beta", run.output)
    run.forks.wait()
    assert "0.json in the inbox is no request" in json.dumps(status(run.output)["notes"])
    assert pending_requests(run.output) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", slow_but([1, 2, 3], [1]))
def test_kills_between_pauses_and_resumptions_lose_nothing(run, place, seed):
    dice = random.Random(seed)
    run.start()
    run.until(lambda: run.step("alpha") > 1)
    for _ in range(3):
        name = dice.choice(["alpha", "beta"])
        for verb in (jobs.pause, jobs.resume)[: dice.randint(1, 2)]:
            verb(name, run.output)
        time.sleep(dice.random() / 10)
        run.kill()
        run.start("--resume")
        # Both are queued again, also one that was paused.
        run.until(partial(run.is_beyond, name, run.step(name) + 1))
    assert run.forks.wait() == 0
    assert_whole(run.output)
    for name in ("alpha", "beta"):
        assert_same_job(run.output, place / "undisturbed", name)


SWEEP = {
    "name": "s",
    "steps": 24,
    "adapter": {"rank": 3, "dropout": 0.1},
    "eval": {"fraction": 0.25, "every": 8},
    "sweep": {
        "over": {"learning_rate": [3e-2, 1e-2, 3e-3], "adapter.rank": [2, 5]},
        "halving": {"at": [0.25, 0.5], "keep": 0.5},
    },
}


@pytest.mark.parametrize(
    ("search", "resumed"),
    [
        ({}, ()),
        pytest.param({}, ("--pipeline", "2"), marks=pytest.mark.slow),
        pytest.param({}, ("--gpus", "2"), marks=pytest.mark.slow),
        pytest.param({"search": "tpe", "trials": 6, "halving": None}, (), marks=pytest.mark.slow),
    ],
    ids=["grid", "resumed in a pipeline", "resumed in shares", "tpe"],
)
def test_a_sweep_that_is_added_and_killed_decides_as_in_a_run_of_its_own(
    run, place, forks, capsys, search, resumed
):
    if search:
        pytest.importorskip("optuna")
    sweep = {key: value for key, value in {**SWEEP["sweep"], **search}.items() if value is not None}
    whole = yaml.safe_load((place / "jobs.yaml").read_text())
    alone = f"alone-{run.output.name}"
    (place / "sweep.yaml").write_text(yaml.safe_dump({**whole, "jobs": [{**SWEEP, "sweep": sweep}]}))
    assert forks.weftune("train", "sweep.yaml", "--output", alone, cwd=place) == 0

    def record(output):
        path = output / "s" / "sweep.json"
        return json.loads(path.read_text()) if path.exists() else {"decisions": [], "best": [], "trials": []}

    run.start()
    run.until(lambda: run.step("alpha") > 3)
    jobs.add(place / "sweep.yaml", run.output)
    assert "have joined the run." in printed(capsys)
    with pytest.raises(UserError, match="the run has a job"):
        jobs.add(place / "sweep.yaml", run.output)
    (place / "sweep.yaml").unlink()  # The run has a copy.
    run.until(lambda: sum(run.step(one["name"]) for one in record(run.output)["trials"]) > 50)
    run.kill()
    run.start("--resume", *(("--device", "cpu", *resumed) if resumed else ()))
    assert run.forks.wait() == 0
    mine, theirs = record(run.output), record(place / alone)
    assert mine["best"] == theirs["best"]
    assert mine["decisions"] == theirs["decisions"]
    assert [(one["name"], one["reason"]) for one in mine["trials"]] == [
        (one["name"], one["reason"]) for one in theirs["trials"]
    ]
    assert (run.output / "s" / "best").exists()
    assert_same_job(run.output, place / alone, mine["best"][0])
    for name in ("alpha", "beta"):
        assert_same_job(run.output, place / "undisturbed", name)


@pytest.mark.slow
def test_a_job_of_a_share_is_paused_and_resumed_and_none_can_join(place, capsys):
    run = Shares(place, fresh(place, "shares"), 2)
    run.wait_until(lambda: run.lines() > 20)
    jobs.pause("alpha", run.output)
    assert "alpha is paused at step" in printed(capsys)
    with pytest.raises(UserError, match="divides its jobs among the GPUs"):
        jobs.add(place / "late.yaml", run.output)
    assert run.wait() == 130
    resumed = Shares(place, "shares", 2, resume=True)
    assert resumed.wait() == 0
    for name in ("alpha", "beta"):
        assert_same_job(resumed.output, place / "undisturbed", name)


FOUR = [
    {"name": f"job-{n}", "steps": 40, "adapter": {"rank": 2 + n}, "data": "b.jsonl", "seed": n}
    for n in range(4)
]


@pytest.fixture(scope="module")
def four_trained(tmp_path_factory, forks):
    """A folder with four jobs; `undisturbed` is what one process makes of them. To be copied."""
    folder = deep_folder(tmp_path_factory.mktemp("four"), FOUR, learning_rate=1e-3)
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["a pipeline", "shares"])
def test_a_job_that_was_paused_stays_paused_when_a_lost_process_is_restarted(
    mode, four_trained, tmp_path, capsys
):
    folder = copied(four_trained, tmp_path)
    run = Launch(folder, "out", 2) if mode == "a pipeline" else Shares(folder, "out", 2)
    run.wait_for_lines(20)
    shared = mode == "shares"
    paused, other = dealt(run.output)[1][:2] if shared else ("job-0", "job-1")
    jobs.pause(paused, run.output)
    assert f"{paused} is paused at step" in printed(capsys)
    if shared:
        with pytest.raises(UserError, match="divides its jobs among the GPUs"):
            jobs.add(folder / "jobs.yaml", run.output)
    before = run.pids()
    run.signal(1, signal.SIGKILL)
    run.wait_until(lambda: run.pids() != before)
    assert run.wait() == 130
    expected = dict.fromkeys((job["name"] for job in FOUR), "succeeded") | {paused: "paused"}
    assert states(run.output) == expected
    assert status(run.output)["jobs"][paused]["reason"].startswith("paused on request at step ")
    resumed = Shares(folder, "out", 2, resume=True) if shared else Launch(folder, "out", 2, "--resume")
    assert resumed.wait() == 0
    assert_whole(run.output)
    for name in (paused, other):
        assert_same_job(run.output, folder / "undisturbed", name)


@pytest.mark.slow
def test_a_job_joins_a_pipeline_and_another_is_paused_and_resumed(tmp_path, forks, capsys):
    # Roundings of other microbatches grow with every step, and fast at high rates.
    some = [{**job, "steps": 60} for job in JOBS]
    folder = deep_folder(tmp_path, [*some, *LATE], learning_rate=1e-3)
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    whole = yaml.safe_load((folder / "jobs.yaml").read_text())
    (folder / "late.yaml").write_text(yaml.safe_dump({**whole, "jobs": LATE}))
    (folder / "jobs.yaml").write_text(yaml.safe_dump({**whole, "jobs": some}))
    run = Launch(folder, "out", 2)
    run.wait_for_lines(10)
    jobs.pause("beta", run.output)
    jobs.add(folder / "late.yaml", run.output)
    jobs.resume("beta", run.output)
    assert "late, later have joined the run" in printed(capsys)
    assert run.wait() == 0
    assert_whole(run.output)
    for name in states(run.output):
        assert_same_job(run.output, folder / "undisturbed", name)
