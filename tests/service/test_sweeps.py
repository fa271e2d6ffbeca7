"""Sweeps in a service: rungs are decided as by `weftune train`, whatever happens to the processes."""

from __future__ import annotations

import json
import signal
import time

import pytest

import weftune
from tests import bench, oracle
from tests.service.serving import JOB, Serving
from weftune.jobs.store.status import State
from weftune.jobs.sweeps.record import SweepRecord, read_record
from weftune.service.api.job_request import trials_of
from weftune.service.api.schemas import Extension, JobRequest
from weftune.service.ids import new_id
from weftune.service.settings import Quotas
from weftune.service.store.requests import Submission

RATES = [3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4]
STEPS = 24
MADE_STEPS = 6 * 6 + 3 * 6 + 2 * 12
"""Steps of all trials together: 3 of 6 continue at step 6, and 2 of them at step 12."""


class Sweeping(Serving):
    """A service to which sweeps are submitted as the HTTP process submits them."""

    def sweep(
        self, tenant: str = "acme", steps: int = STEPS, unprepared: int | None = None, **keys
    ) -> tuple[str, list[str]]:
        """Submit a sweep over learning rates; return its id and those of its trials."""
        id = new_id("ftjob")
        sweep = {"over": {"learning_rate": RATES}, "halving": {"at": [0.25, 0.5], "keep": 0.5}, **keys}
        job = {
            **JOB, "adapter": {"rank": 3, "dropout": 0.1}, "name": id, "steps": steps, "sweep": sweep,
            "data": {"path": str(self.folder / "a.jsonl"), "max_length": 64}, "seed": 3,
            "eval": {"fraction": 0.25, "every": 6},
        }  # fmt: skip
        request = JobRequest(model="model", training_file="file-1", weftune=Extension(sweep=sweep))
        submission = Submission(
            id=id, tenant=tenant, created_at=time.time(), request=request.model_dump(exclude_unset=True),
            job=job, training_file="file-1", suffix="s", details={}, body_hash=id, sweep=id,
        )  # fmt: skip
        trials = trials_of(submission, request)
        self.requests.submit(submission, trials=trials)
        for number, one in enumerate(trials):
            self.keys[one.id] = dict(one.job)
            if number != unprepared:
                self.requests.mark_prepared(one.id)
        self.keys[id] = job
        return id, [one.id for one in trials]

    def record(self, sweep: str) -> SweepRecord:
        found = read_record(self.settings.jobs / sweep)
        assert found is not None
        return found

    def until_all_ended(self, trials: list[str], restart: bool = False) -> None:
        self.until(lambda: all((state := self.state(one)) and state.has_ended for one in trials), restart)

    def until_decided(self, sweep: str) -> SweepRecord:
        """Wait until the end of the sweep is recorded."""
        self.until(lambda: bool(self.record(sweep).best))
        return self.record(sweep)

    def assert_sweep_as_alone(self, sweep: str, trials: list[str]) -> None:
        """Train the sweep by `weftune.train`, and compare decisions, losses and the best adapter."""
        output = self.folder / new_id("alone")
        base = {"model": self.settings.base.model, "dtype": "float64"}
        run = {"base": base, "jobs": [{**self.keys[sweep], "name": "s"}]}
        weftune.train(run, output=output, progress=False)
        mine, theirs = self.record(sweep), read_record(output / "s")
        names = {one: own.name for one, own in zip(trials, theirs.trials, strict=True)}
        assert [one.values for one in mine.trials] == [one.values for one in theirs.trials]
        decided = [
            (one.step, [names[name] for name in one.kept], [names[name] for name in one.left], one.began)
            for one in mine.decisions
        ]
        assert decided == [(one.step, [*one.kept], [*one.left], one.began) for one in theirs.decisions]
        assert [names[name] for name in mine.best] == [*theirs.best]
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        for id, name in names.items():
            own = [(one["step"], one["loss"]) for one in lines if one["job"] == name and "loss" in one]
            found = self.losses(id)
            assert [step for step, _ in found] == [step for step, _ in own], name
            for (_, loss), (_, expected) in zip(found, own, strict=True):
                assert abs(loss - expected) <= 1e-9 * abs(expected)
        for one in mine.best:
            folders = self.settings.jobs / one, output / names[one]
            assert oracle.distance(*map(bench.adapter, folders)) <= 1e-8


@pytest.fixture
def serving(tmp_path):
    found = Sweeping(tmp_path)
    yield found
    found.close()


def test_a_sweep_joins_a_running_service_and_decides_as_alone(serving):
    serving.start()
    other = serving.submit("umbrella", steps=60)
    serving.until(lambda: serving.step(other) > 2)
    sweep, trials = serving.sweep(keep=2)
    serving.until_all_ended(trials)
    record = serving.until_decided(sweep)
    assert [len(one.kept) for one in record.decisions] == [3, 2]
    states = [serving.state(one) for one in trials]
    assert (states.count(State.SUCCEEDED), states.count(State.CANCELLED)) == (2, 4)
    left = serving.row(record.decisions[0].left[0]).status
    assert left.step == 6
    assert left.reason == "left the sweep at step 6: 4th of 6, the best 3 continue"
    events = serving.messages(sweep)
    assert [one.partition(":")[0] for one in events] == ["Step 6", "Step 12", "The sweep has ended; best"]
    assert not (serving.settings.jobs / sweep / "best").exists()
    assert serving.until_state(other, State.SUCCEEDED)
    serving.assert_as_alone(other)
    serving.assert_sweep_as_alone(sweep, trials)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "judge"),
    [
        (2, "mean"),
        (2, "last"),
        (8, "mean"),
    ],
)
def test_a_sweep_killed_again_and_again_decides_as_alone(serving, kills, judge):
    serving.start()
    sweep, trials = serving.sweep(halving={"at": [0.25, 0.5], "keep": 0.5, "judge": judge})
    for kill in range(1, kills + 1):
        trained = MADE_STEPS * kill // (kills + 1)
        serving.until(lambda least=trained: sum(map(serving.step, trials)) >= least)
        serving.end()
        serving.start()
    serving.until_all_ended(trials)
    serving.until_decided(sweep)
    # Decisions are events, each of them once.
    events = serving.messages(sweep)
    assert [one.partition(":")[0] for one in events] == ["Step 6", "Step 12", "The sweep has ended; best"]
    for one in trials:
        steps = [step for step, _ in serving.losses(one)]
        assert len(steps) == len(set(steps))
    serving.assert_sweep_as_alone(sweep, trials)


@pytest.mark.slow
def test_a_sweep_killed_before_its_end_was_recorded_names_its_best_after_the_restart(serving):
    serving.start()
    sweep, trials = serving.sweep(halving=None, over={"learning_rate": [1e-2, 1e-3]}, steps=6)
    serving.until_all_ended(trials)
    best = serving.until_decided(sweep).best
    serving.end()
    path = serving.settings.jobs / sweep / "sweep.json"
    for damage in (b"{}", json.dumps({**json.loads(path.read_text()), "best": []}).encode()):
        path.write_bytes(damage)
        serving.start()
        serving.until(lambda damage=damage: path.read_bytes() != damage)
        assert serving.until_decided(sweep).best == best
        serving.end()
    assert [one for one in serving.messages(sweep) if "ended" in one] == [
        "The sweep has ended; best: s-lr0.01"
    ]


@pytest.mark.slow
def test_a_sweep_is_paused_over_a_restart_resumed_and_cancelled(serving):
    serving.start()
    sweep, trials = serving.sweep(steps=60)
    cancelled, others = serving.sweep(steps=900, halving=None)
    serving.until(lambda: max(map(serving.step, trials)) > 1)
    serving.command(sweep, "pause")
    serving.until(lambda: {serving.state(one) for one in trials} == {State.PAUSED})
    serving.command(sweep, "priority", 4)
    serving.until(lambda: {serving.row(one).priority for one in trials} == {4})
    serving.end(signal.SIGTERM)
    serving.start()
    serving.until(lambda: State.RUNNING in map(serving.state, others))
    assert {serving.state(one) for one in trials} == {State.PAUSED}
    serving.command(cancelled, "cancel")
    serving.command(sweep, "resume")
    serving.until(lambda: {serving.state(one) for one in others} == {State.CANCELLED})
    serving.until_all_ended(trials)
    serving.until_decided(sweep)
    serving.assert_sweep_as_alone(sweep, trials)


def test_trials_that_rest_are_paused_and_a_cancelled_one_counts_as_the_worst(serving):
    """One trial of the first rung is not prepared, so that the others wait for it."""
    serving.start()
    sweep, trials = serving.sweep(unprepared=2)
    slow, others = trials[2], [one for one in trials if one != trials[2]]
    serving.until(
        lambda: all(
            serving.step(one) == 6 and "waits for" in serving.row(one).status.reason for one in others
        )
    )
    serving.command(sweep, "pause")
    serving.until(lambda: {serving.state(one) for one in trials} == {State.PAUSED})
    serving.command(slow, "cancel")
    serving.until_state(slow, State.CANCELLED)
    serving.command(sweep, "resume")
    serving.until_all_ended(trials)
    record = serving.until_decided(sweep)
    assert slow not in [name for one in record.decisions for name in (*one.kept, *one.left)]
    assert [one.began for one in record.decisions] == [6, 3]


@pytest.mark.slow
def test_trials_count_for_the_quota_of_their_tenant(tmp_path):
    serving = Sweeping(tmp_path, quotas=Quotas(running_jobs=2))
    try:
        serving.start()
        sweep, trials = serving.sweep()
        most = 0
        while not all((state := serving.state(one)) and state.has_ended for one in trials):
            most = max(most, list(map(serving.state, trials)).count(State.RUNNING))
            time.sleep(0.02)
        assert 0 < most <= 2
        serving.until_decided(sweep)
        serving.assert_sweep_as_alone(sweep, trials)
    finally:
        serving.close()
