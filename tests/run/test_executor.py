"""The executor runs a Program as it stands, whoever dies on the way."""

import math
import time
from dataclasses import replace

import pytest
import torch

from tests import bench
from tests.families import tiny
from tests.run import executors
from weftune.errors import PlanError
from weftune.plan.program.program import Load
from weftune.run.events import Evaluated, Failed, OutOfMemory, Passed, SaveDue, Stepped
from weftune.run.training import checkpoint
from weftune.trainer.job import collate_plan


@pytest.fixture
def base():
    return bench.base()


def two(base, **keys):
    return [executors.prepare(base, name, seed=seed, **keys) for name, seed in (("a", 1), ("b", 2))]


def plain_sums(samples, chosen):
    """Loss, correct predictions and supervised tokens by transformers; a new adapter changes nothing."""
    model, loss, correct, supervised = tiny("llama"), 0.0, 0, 0
    for index in chosen:
        ids = torch.tensor(samples.tokens(index).tolist())
        wanted = torch.tensor(samples.mask(index)[1:].tolist())
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        loss -= logprobs[wanted].sum().item()
        correct += int((logits.argmax(-1) == ids[1:])[wanted].sum())
        supervised += int(wanted.sum())
    return loss, correct, supervised


def run(made, jobs, rounds, **keys):
    return list(executors.run_program(made, executors.plan_program(jobs, rounds, **keys), jobs))


def steps_of(events, job):
    return [event.step for event in events if isinstance(event, Stepped) and event.job == job]


def assert_close(first, second):
    assert (first - second).norm() <= 1e-12 * second.norm()


def test_a_step_is_reported_with_the_values_of_a_plain_forward(base):
    (job,) = jobs = [executors.prepare(base, "a", steps=1)]
    (stepped,) = (
        e for e in run(executors.executor_with(base, jobs), jobs, 1, capacity=24) if isinstance(e, Stepped)
    )
    chosen = job.sample_order.batch(1)
    loss, correct, supervised = plain_sums(job.data.train, chosen)
    assert (stepped.job, stepped.step) == ("a", 1)
    assert stepped.outcome.loss == pytest.approx(loss / supervised, rel=1e-12)
    assert stepped.outcome.token_accuracy == correct / supervised
    assert stepped.outcome.tokens == job.data.train.lengths[chosen].sum()
    assert stepped.outcome.learning_rate == 1e-2
    assert stepped.outcome.grad_norm > 0


@pytest.mark.parametrize("capacity", [24, 200])
def test_an_evaluation_is_reported_once_with_the_values_of_a_plain_forward(base, capacity):
    jobs = two(base, eval={"fraction": 0.4})
    events = run(executors.executor_with(base, jobs), jobs, 0, capacity=capacity, begins=True)
    evaluations = {event.job: event for event in events if isinstance(event, Evaluated)}
    assert len(evaluations) == sum(isinstance(event, Evaluated) for event in events) == 2
    for job in jobs:
        loss, correct, supervised = plain_sums(job.data.evaluation, range(len(job.data.evaluation)))
        found = evaluations[job.name]
        assert found.loss == pytest.approx(loss / supervised, rel=1e-12)
        assert (found.step, found.tokens, found.token_accuracy) == (0, supervised, correct / supervised)
    assert not any(isinstance(event, SaveDue) for event in events)


def test_a_killed_job_is_skipped_and_the_program_stands_for_the_others(base):
    jobs = two(base, save_every=1)
    alone = executors.executor_with(bench.base(), jobs[:1])
    run(alone, jobs[:1], 4)
    made, events = executors.executor_with(base, jobs), []
    for event in executors.run_program(made, executors.plan_program(jobs, 4), jobs):
        events.append(event)
        if isinstance(event, Stepped) and (event.job, event.step) == ("b", 2):
            made.kill("b")
            where = len(events)
    assert steps_of(events, "a") == [1, 2, 3, 4]
    assert steps_of(events, "b") == [1, 2]
    for event in events[where:]:
        assert getattr(event, "job", "a") == "a"
        assert not isinstance(event, Passed) or event.microbatch.jobs == ("a",)
    assert_close(made.attached["a"].master, alone.attached["a"].master)


def test_microbatches_of_dead_jobs_only_are_not_run(base):
    jobs = two(base)
    made = executors.executor_with(base, jobs)
    made.kill("b")
    events = run(made, jobs, 3, capacity=20)
    assert all(event.microbatch.jobs == ("a",) for event in events if isinstance(event, Passed))
    assert steps_of(events, "b") == []


def test_a_nan_kills_its_own_job_and_the_other_equals_a_run_without_it(base):
    jobs = two(base)
    alone = executors.executor_with(bench.base(), jobs[:1])
    run(alone, jobs[:1], 4)
    made = executors.executor_with(base, jobs)
    made.banks.attached["b"].weights.copy_(torch.full_like(made.attached["b"].master, math.nan))
    planned = executors.plan_program(jobs, 4)
    assert planned.shared_count() > 0
    events = list(executors.run_program(made, planned, jobs))
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert (failed.job, failed.reason) == ("b", "its loss at step 1 is nan")
    assert steps_of(events, "a") == [1, 2, 3, 4]
    assert_close(made.attached["a"].master, alone.attached["a"].master)


def test_a_nan_in_an_evaluation_fails_its_own_job_only(base):
    jobs = two(base, eval={"fraction": 0.4})
    made = executors.executor_with(base, jobs)
    made.banks.attached["b"].weights.copy_(torch.full_like(made.attached["b"].master, math.nan))
    events = run(made, jobs, 0, begins=True)
    assert [event.job for event in events if isinstance(event, Evaluated)] == ["a"]
    assert [event.job for event in events if isinstance(event, Failed)] == ["b"]


def test_out_of_memory_leaves_every_job_at_its_last_step_as_if_the_open_batch_had_not_begun(base):
    jobs = two(base)
    made, undisturbed = executors.executor_with(base, jobs), executors.executor_with(bench.base(), jobs)
    planned = executors.plan_program(jobs, 4, capacity=30)
    passes = 0

    def strike(_module, _inputs):
        nonlocal passes
        passes += 1
        if passes == 4:
            raise torch.OutOfMemoryError("no room")

    hook = base.model.base_model.register_forward_pre_hook(strike)
    with pytest.raises(OutOfMemory, match="no room"):
        list(executors.run_program(made, planned, jobs))
    hook.remove()
    for training in made.attached.values():
        assert training.open_batch is None
        assert not training.gradient.any()
    done = {name: training.progress.step for name, training in made.attached.items()}
    assert sum(done.values()) > 0
    compared = set()
    for event in executors.run_program(undisturbed, planned, jobs):
        if isinstance(event, Stepped) and event.step == done[event.job]:
            assert torch.equal(made.attached[event.job].master, undisturbed.attached[event.job].master)
            compared.add(event.job)
    assert compared == {name for name, step in done.items() if step > 0}


def test_another_error_is_not_taken_for_a_shortage_of_memory(base):
    jobs = two(base)
    made = executors.executor_with(base, jobs)

    def strike(_module, _inputs):
        raise RuntimeError("size mismatch")

    base.model.base_model.register_forward_pre_hook(strike)
    with pytest.raises(RuntimeError, match="size mismatch"):
        run(made, jobs, 1)


def test_when_asked_to_stop_it_ends_where_no_job_is_inside_a_step(base):
    jobs = two(base, batch_size=5)
    made = executors.executor_with(base, jobs)
    planned = executors.plan_program(jobs, 4, capacity=24)
    by_name = {job.name: job for job in jobs}
    seen = []
    for event in made.run(planned, lambda plan, kind: collate_plan(plan, kind, by_name), lambda: bool(seen)):
        seen.append(event)
    steps = [(event.job, event.step) for event in seen if isinstance(event, Stepped)]
    assert sum(isinstance(event, Passed) for event in seen) > 2
    assert sorted(steps) == [("a", 1), ("b", 1)]
    assert all(training.open_batch is None for training in made.attached.values())


def test_once_overdue_nothing_more_is_computed_and_the_open_batch_is_dropped(base):
    jobs = two(base, batch_size=5)
    made, undisturbed = executors.executor_with(base, jobs), executors.executor_with(bench.base(), jobs)
    planned = executors.plan_program(jobs, 2, capacity=24)
    by_name, passes = {job.name: job for job in jobs}, []
    base.model.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    fetch = lambda plan, kind: collate_plan(plan, kind, by_name)  # noqa: E731
    events = list(made.run(planned, fetch, is_overdue=lambda: len(passes) == 2))
    assert len(passes) == 2
    assert not any(isinstance(event, Stepped) for event in events)
    assert all((one.progress.step, one.open_batch) == (0, None) for one in made.attached.values())
    run(made, jobs, 2, capacity=24)
    run(undisturbed, jobs, 2, capacity=24)
    for job in by_name:
        assert_close(made.attached[job].master, undisturbed.attached[job].master)


def test_when_its_saves_are_finished_a_jobs_checkpoint_is_there(base, tmp_path, monkeypatch):
    def write(folder, snapshot, real=checkpoint.write):
        time.sleep(0.2)
        return real(folder, snapshot)

    monkeypatch.setattr(checkpoint, "write", write)
    made = executors.executor_with(base, two(base))
    made.save("a", tmp_path / "a")
    assert checkpoint.newest_progress(tmp_path / "a") is None
    made.finish_saves("b")
    assert checkpoint.newest_progress(tmp_path / "a") is None, "it is not waited for"
    made.finish_saves("a")
    assert checkpoint.newest_progress(tmp_path / "a").step == 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: replace(p, devices=((Load(0), *p.actions),)), "holds Load"),
        (lambda p: replace(p, devices=(p.actions, ())), "for 2 devices"),
        (lambda p: replace(p, stages=(0, 0)), "for a base in 2 stages"),
    ],
)
def test_a_program_with_actions_that_are_not_run_is_refused_with_a_sentence(base, change, sentence):
    jobs = two(base)
    with pytest.raises(PlanError, match=sentence):
        next(
            executors.run_program(
                executors.executor_with(base, jobs), change(executors.plan_program(jobs, 1)), jobs
            )
        )
