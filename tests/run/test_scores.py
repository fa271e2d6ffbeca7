"""A Score gives the summed log-probability of each sample, with or without the job's adapter, anywhere."""

import numpy as np
import pytest
import torch

from tests import bench
from tests.run import executors
from tests.run.models import deep
from tests.run.processes import run_workers
from tests.run.test_streamed import CUTS, run, streamed, travelling
from tests.run.workers.test_agreed import PACE, cut, on_worker
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.core.batch import OWN_ADAPTER
from weftune.plan.program.layout import one_device_layout
from weftune.plan.program.program import Score
from weftune.plan.window.pipeline import PipelineRules, plan_pipeline
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor
from weftune.run.events import Failed, Passed, Scored, Stepped
from weftune.run.parts import fetch_from
from weftune.run.training.state import new_training
from weftune.trainer.job import PreparedJob, collate_plan

EXACT = 1e-10


class FromAdapter(PreparedJob):
    """A job whose reference policy is the adapter that it has before its first step."""

    reference_adapter = OWN_ADAPTER


def whole_base():
    return Base.from_model(deep("llama", torch.float64), BaseSpec(model="tiny", dtype="float64"), bench.CPU)


def scored_job(base, name, kind=PreparedJob, **keys):
    settings = {"eval": {"fraction": 0.3}, **keys}
    job = executors.prepare(base, name, **settings)
    plain = executors.prepare(base, name, **settings | {"adapter": {"rank": 4}})
    made = {field: getattr(job, field) for field in PreparedJob.__dataclass_fields__}
    return kind(**made | {"reference_data": job.data if kind is FromAdapter else plain.data})


def attach(executor, jobs):
    """Attach jobs with adapters that change the base."""
    base = executor.base
    for job in jobs:
        adapter = executors.JobAdapter(job.name, job.spec.adapter, job.spec.seed)
        made = new_training(
            adapter, job.recipe, base.shape.sites, base.dtype, executor.home, base.whole_sites
        )
        for value in made.layout.parameter_views(made.master).values():
            # The same on every worker, whichever sites it has.
            value.copy_(torch.linspace(-0.2, 0.3, value.numel(), dtype=value.dtype).view(value.shape))
        made.state.weights.copy_(made.master)
        executor.attach(made)


def score_all(executor, jobs, layout=None, capacity=60, others=()):
    """Score all samples of the jobs in one window; return each job's numbers."""
    windows = [job.score_window(0, np.arange(sum(map(len, job.data.parts)))) for job in jobs]
    windows += [job.job_window(0, 2, is_first_window=False) for job in others]
    events = run(executor, plan_window(windows, layout or one_device_layout(), capacity), [*jobs, *others])
    numbers = {job.name: {} for job in jobs}
    for event in events:
        if isinstance(event, Scored):
            numbers[event.job] |= dict(zip(event.samples, event.logprobs, strict=True))
    assert not any(isinstance(event, Failed) for event in events)
    assert sum(isinstance(event, Stepped) for event in events) == 2 * len(others)
    assert all(not event.time.training or others for event in events if isinstance(event, Passed))
    return {name: [found[index] for index in sorted(found)] for name, found in numbers.items()}


def as_worker(connections, cuts):
    """Score on this worker while another job trains; return the scores that it knows."""
    whole, position = whole_base(), connections.position
    jobs = [scored_job(whole, "bare", seed=1), scored_job(whole, "own", FromAdapter, seed=2)]
    jobs.append(executors.prepare(whole, "trained", seed=3))
    executor, agreed, transport = on_worker(cut("llama", torch.float64, position, cuts), connections, cuts)
    attach(executor, jobs)
    windows = [job.score_window(0, np.arange(12)) for job in jobs[:2]]
    rules = PipelineRules(40, (PACE,) * position.stages, replicas=position.replicas)
    program = plan_pipeline([*windows, jobs[2].job_window(0, 2, is_first_window=False)], rules)
    by_name = {job.name: job for job in jobs}
    laid = {
        action.microbatch: collate_plan(plan, type(action), by_name)
        for action, plan in program.replica_passes(position.replica)
    }
    stepped = [one for one in executor.run(program, fetch_from(program, laid)) if isinstance(one, Stepped)]
    assert len(stepped) == (2 if position.worker == 0 else 0)
    transport.flush()
    return agreed.report.scores


@pytest.mark.parametrize(("replicas", "cuts"), [(1, [0, 1, 4]), (2, [0, 3, 4])])
def test_the_last_workers_of_a_pipeline_give_the_numbers_of_one_process(replicas, cuts):
    base = whole_base()
    jobs = [scored_job(base, "bare", seed=1), scored_job(base, "own", FromAdapter, seed=2)]
    executor = resident_executor(base)
    attach(executor, jobs)
    expected = score_all(executor, jobs)
    found = run_workers(2 * replicas, as_worker, cuts, replicas=replicas)
    assert [bool(scores) for scores in found] == [False, True] * replicas
    numbers = {"bare": {}, "own": {}}
    for one in (one for scores in found for one in scores):
        numbers[one.job] |= dict(zip(one.samples, one.logprobs, strict=True))
    for name, numbers_of_job in numbers.items():
        assert [numbers_of_job[index] for index in range(12)] == pytest.approx(expected[name], rel=EXACT)


def logprobs_of_base(job):
    """Return the numbers by transformers' own forward, sample by sample."""
    model, found = deep("llama", torch.float64), []
    for samples in job.data.parts:
        for index in range(len(samples)):
            tokens, mask = (torch.from_numpy(np.array(one)) for one in samples.tokens_and_mask(index))
            with torch.no_grad():
                logits = model(tokens.long()[None]).logits[0, :-1]
            each = logits.log_softmax(-1).gather(1, tokens[1:, None].long())[:, 0]
            found.append(float(each[mask[1:]].sum()))
    return found


def test_the_base_alone_scores_as_transformers_does_whatever_adapter_the_job_has():
    base = whole_base()
    job = scored_job(base, "a", adapter={"kind": "ia3"})
    expected = logprobs_of_base(job)
    executor = resident_executor(base)
    attach(executor, [job])
    assert score_all(executor, [job])["a"] == pytest.approx(expected, rel=EXACT)


def test_virtual_tokens_are_no_part_of_the_base_alone():
    base = whole_base()
    job = scored_job(base, "a", adapter={"kind": "prompt", "num_virtual_tokens": 3})
    assert job.data.train.rows_before == 3
    expected = logprobs_of_base(job)
    executor = resident_executor(base)
    attach(executor, [job])
    assert score_all(executor, [job])["a"] == pytest.approx(expected, rel=EXACT)


def test_scored_alone_equals_scored_among_others_in_one_microbatch_while_another_job_trains():
    base = whole_base()
    jobs = [
        scored_job(base, "bare", seed=1),
        scored_job(base, "own", FromAdapter, seed=1),
        scored_job(base, "other", FromAdapter, seed=2, adapter={"kind": "prompt", "num_virtual_tokens": 3}),
    ]
    trained = executors.prepare(base, "trained", seed=3)
    alone = {}
    for job in jobs:
        executor = resident_executor(base)
        attach(executor, [job])
        alone |= score_all(executor, [job], capacity=30)
        executor.restore_base()
    executor = resident_executor(base)
    attach(executor, [*jobs, trained])
    together = score_all(executor, jobs, others=[trained])
    for name, numbers in alone.items():
        assert together[name] == pytest.approx(numbers, rel=EXACT)
    assert alone["bare"] != pytest.approx(alone["own"], rel=1e-6)


@pytest.mark.parametrize("chosen", ["a layer at a time", "uneven, two stay", "two and two"])
@pytest.mark.parametrize("travels", [False, True])
def test_a_streamed_base_gives_the_numbers_of_a_resident_one(chosen, travels):
    base, layout = whole_base(), travelling(CUTS[chosen]) if travels else CUTS[chosen]
    jobs = [scored_job(base, "bare", seed=1), scored_job(base, "own", FromAdapter, seed=2)]
    executor = resident_executor(base)
    attach(executor, jobs)
    expected = score_all(executor, jobs)
    executor = streamed("llama", torch.float64, layout)
    attach(executor, jobs)
    found = score_all(executor, jobs, layout)
    assert {name: pytest.approx(one, rel=EXACT) for name, one in found.items()} == expected


def test_a_score_that_is_not_finite_fails_its_job_and_no_other():
    base = whole_base()
    jobs = [scored_job(base, "bad", FromAdapter, seed=1), scored_job(base, "good", seed=2)]
    executor = resident_executor(base)
    attach(executor, jobs)
    executor.attached["bad"].state.weights.fill_(torch.nan)
    windows = [job.score_window(0, np.arange(4)) for job in jobs]
    program = plan_window(windows, one_device_layout(), 40)
    assert any(isinstance(action, Score) for action in program.actions)
    events = run(executor, program, jobs)
    failed = [event for event in events if isinstance(event, Failed)]
    assert [one.job for one in failed] == ["bad"]
    assert "the reference log-probability of its sample" in failed[0].reason
    good = [event for event in events if isinstance(event, Scored) and event.job == "good"]
    assert sum(len(one.samples) for one in good) == 4
