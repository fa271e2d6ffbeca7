"""Scheduling policies, alone and with `admit` over simulated rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftune.core.shapes import JobShape
from weftune.jobs.store.policy import ByPriority, FairShare, Policy, QueuedJob, TenantUsage
from weftune.jobs.store.scheduler import admit_jobs

HOUR = 3600.0


def job(
    name: str,
    tenant: str = "a",
    *,
    priority: int = 0,
    attached: bool = False,
    submission_number: int = 0,
    tokens: int = 100,
    **facts: float,
) -> QueuedJob:
    shape = JobShape(
        name,
        priority=priority,
        file_position=0,
        trainable_parameters=1,
        max_sample_tokens=1,
        batch_tokens=tokens,
    )
    return QueuedJob(
        shape=shape, is_attached=attached, tenant=tenant, submission_number=submission_number, **facts
    )


def seats(count: int) -> Callable[[Sequence[JobShape]], str | None]:
    return lambda jobs: None if len(jobs) <= count else f"{len(jobs)} of {count}"


def admitted(
    policy: Policy, jobs: Sequence[QueuedJob], room: int, now: float = 0.0
) -> tuple[set[str], set[str]]:
    found = policy.rank(jobs, {}, now)
    decision = admit_jobs(found.waiting_jobs, found.attached_jobs, seats(room))
    return set(decision.admitted_names), set(decision.preempted_by)


@dataclass
class Rounds:
    """Rounds of a scheduler with `room` seats; every attached job trains one global batch per round."""

    policy: FairShare
    room: int
    batches: dict[str, int] = field(default_factory=dict)
    """Maps jobs to the global batches that they still train."""
    jobs: list[QueuedJob] = field(default_factory=list)
    attached: set[str] = field(default_factory=set)
    overtaken: dict[str, int] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    started: dict[str, int] = field(default_factory=dict)
    moves: int = 0

    def submit(self, tenant: str, count: int, batches: int, tokens: int = 100) -> list[str]:
        new = [
            job(f"{tenant}-{number}", tenant, submission_number=len(self.jobs) + number, tokens=tokens)
            for number in range(count)
        ]
        self.jobs += new
        self.batches |= {one.shape.name: batches for one in new}
        return [one.shape.name for one in new]

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            present = [
                QueuedJob(
                    shape=one.shape,
                    is_attached=one.shape.name in self.attached,
                    tenant=one.tenant,
                    submission_number=one.submission_number,
                )
                for one in self.jobs
                if self.batches[one.shape.name] > 0
            ]
            usage = {tenant: TenantUsage(recent_tokens=used) for tenant, used in self.tokens.items()}
            found = self.policy.rank(present, usage, 0.0)
            decision = admit_jobs(found.waiting_jobs, found.attached_jobs, seats(self.room), self.overtaken)
            self.overtaken = dict(decision.overtake_counts)
            self.attached = (self.attached - decision.preempted_by.keys()) | set(decision.admitted_names)
            self.moves += len(decision.admitted_names) + len(decision.preempted_by)
            for number in decision.admitted_names:
                self.started.setdefault(number, sum(self.tokens.values()))
            assert len(self.attached) <= self.room
            for one in present:
                name = one.shape.name
                if name in self.attached:
                    self.tokens[one.tenant] += one.shape.batch_tokens
                    self.batches[name] -= 1
                    if not self.batches[name]:
                        self.attached.discard(name)


def jain(values: Sequence[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def test_without_tenants_priority_comes_first_and_then_the_order_of_submission():
    jobs = [
        job("late", submission_number=2),
        job("early", submission_number=1),
        job("urgent", priority=1, submission_number=3),
    ]
    for policy in (ByPriority(), FairShare()):
        assert admitted(policy, jobs, 1) == ({"urgent"}, set())
    assert admitted(ByPriority(), jobs, 2)[0] == {"urgent", "early"}


def test_a_job_of_equal_priority_does_not_preempt_a_job_of_the_same_tenant():
    jobs = [job("old", attached=True, submission_number=2), job("new", submission_number=1)]
    for policy in (ByPriority(), FairShare()):
        assert admitted(policy, jobs, 1) == (set(), set())


def test_a_tenant_with_one_job_is_admitted_although_another_tenant_fills_all_seats():
    jobs = [job(f"many-{number}", "many", attached=True, submission_number=number) for number in range(4)]
    found = admitted(FairShare(), [*jobs, job("one", "few", submission_number=9)], 4)
    assert found == ({"one"}, {"many-3"})


def test_tenants_of_equal_shares_do_not_preempt_each_other():
    jobs = [job(f"{tenant}{number}", tenant, attached=True) for tenant in "ab" for number in range(2)]
    waiting = [job(f"{tenant}w", tenant, submission_number=9) for tenant in "ab"]
    assert admitted(FairShare(), [*jobs, *waiting], 4) == (set(), set())


def test_priority_goes_before_the_fair_share():
    jobs = [job("a1", "a", attached=True), job("a2", "a", priority=1), job("b1", "b")]
    assert admitted(FairShare(), jobs, 1) == ({"a2"}, {"a1"})


def test_a_job_that_has_waited_long_counts_as_one_of_higher_priority():
    jobs = [job("urgent", priority=1, attached=True), job("old", queued_seconds=2 * HOUR)]
    assert admitted(FairShare(), jobs, 1) == ({"old"}, {"urgent"})
    assert admitted(FairShare(ageing_seconds=9 * HOUR), jobs, 1) == (set(), set())


def test_a_job_near_its_deadline_goes_first_among_equals_and_not_before():
    jobs = [
        job("first", submission_number=1),
        job("due", submission_number=2, deadline=2000.0, remaining_seconds=1000.0),
    ]
    assert admitted(FairShare(), jobs, 1, now=0.0)[0] == {"first"}
    assert admitted(FairShare(), jobs, 1, now=600.0)[0] == {"due"}
    assert admitted(FairShare(), [*jobs, job("urgent", priority=1)], 1, now=600.0)[0] == {"urgent"}


def test_quotas_hold_jobs_back_with_the_reason_waiting_or_attached():
    jobs = [job("a1", "a", attached=True), job("a2", "a", submission_number=1), job("b1", "b")]
    found = FairShare(running_jobs=1).rank(jobs, {}, 0.0)
    assert list(found.hold_reasons) == ["a2"]
    assert "at most 1 of this account's jobs may train at a time" in found.hold_reasons["a2"]
    usage = {"a": TenantUsage(tokens_today=1000)}
    found = FairShare(tokens_per_day=1000).rank(jobs, usage, 0.0)
    assert set(found.hold_reasons) == {"a1", "a2"}
    assert "1,000 tokens of today" in found.hold_reasons["a1"]
    assert [shape.name for shape in found.waiting_jobs] == ["b1"]


def test_one_tenant_with_100_jobs_does_not_delay_nine_tenants_with_one_job_each():
    rounds = Rounds(FairShare(), room=12)
    rounds.submit("many", 100, batches=200)
    rounds.run(5)
    small = [rounds.submit(f"small-{number}", 1, batches=50)[0] for number in range(9)]
    rounds.run(2)
    assert set(small) <= rounds.started.keys(), "each starts within two rounds"
    before = Counter(rounds.tokens)
    rounds.run(40)
    # Max-min fair: a seat for each of the nine, which cannot use more, and the other three for the tenant.
    received = rounds.tokens - before
    shares = [received[f"small-{number}"] / 1 for number in range(9)] + [received["many"] / 3]
    assert jain(shares) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [[100] * 10, [50, 100, 400] * 3])
def test_tenants_that_do_not_fit_together_take_turns(tokens):
    rounds = Rounds(FairShare(quantum_tokens=20_000), room=4)
    for number, size in enumerate(tokens):
        rounds.submit(f"tenant-{number}", 5, batches=10**6, tokens=size)
    rounds.run(4_000)
    assert jain([rounds.tokens[f"tenant-{number}"] for number in range(len(tokens))]) >= 0.95
    assert rounds.moves < 1_000, "jobs are not exchanged in every round"


def test_shares_follow_the_weights():
    rounds = Rounds(FairShare(quantum_tokens=1_000, weights={"gold": 3.0}), room=4)
    for tenant in ("gold", "plain"):
        rounds.submit(tenant, 8, batches=10**6)
    rounds.run(500)
    assert rounds.tokens["gold"] / rounds.tokens["plain"] == pytest.approx(3, rel=0.1)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 9), st.integers(1, 30)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4),
)
def test_every_job_ends_and_the_scheduler_settles(submissions, room):
    rounds = Rounds(FairShare(quantum_tokens=10**9), room)
    for number, (tenant, priority, batches, tokens) in enumerate(submissions):
        new = job(f"{tenant}{number}", tenant, priority=priority, submission_number=number, tokens=tokens)
        rounds.jobs.append(new)
        rounds.batches[new.shape.name] = batches
    rounds.run(1 + sum(batches for *_, batches, _ in submissions))
    assert not any(rounds.batches.values())
    # Every job is admitted once, and once more each time it was preempted; what is fair does not flicker.
    assert rounds.moves <= 6 * len(submissions)
