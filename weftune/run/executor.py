"""The executor, which runs the actions that a Program lists for one worker, in order, and reports events.

There is one executor class for all layouts (resident, streamed, pipeline); only its parts differ
(`assemble.py`). In a pipeline, and at the last stage of the model, the activations of a stage's forward are
kept for its backward. For other streamed stages only the input is kept, and the forward is recomputed.

Shapes: T rows of a microbatch, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from weftune.base.chunks import SampleKeys
from weftune.core.interrupt import StopRequest
from weftune.errors import PlanError
from weftune.objectives.registry import make_objective
from weftune.objectives.spec import SFT_SPEC
from weftune.plan.program.handover import FINISHED, unfinished_work
from weftune.plan.program.layout import WorkerLayout
from weftune.plan.program.program import (
    Action,
    Backward,
    BackwardHalf,
    Compute,
    Evaluate,
    Evict,
    Forward,
    ForwardHalf,
    ForwardOnly,
    ForwardPass,
    HalfPass,
    Load,
    MicrobatchPlan,
    Program,
    Recv,
    Reduce,
    Save,
    Score,
    Send,
    Step,
    Streaming,
)
from weftune.run.events import Event, Scored
from weftune.run.measure.memory import is_out_of_memory
from weftune.run.measure.timers import ActionTimer
from weftune.run.parts import (
    NOTHING_TO_DO,
    Activations,
    AdapterState,
    Agreement,
    Fetch,
    Passes,
    Weights,
    fetch_from,
)
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.passes.overlapped import OverlappedPasses
from weftune.run.passes.rows import DeviceMicrobatch, InFlight, StageVisit, TimedPass, to_device_microbatch
from weftune.run.passes.scorer import Scorer
from weftune.run.training.snapshot import Snapshot
from weftune.run.training.state import Training
from weftune.run.training.writer import Unsaved, Writer


class Executor:
    def __init__(
        self,
        adapted: AdaptedBase,
        part: WorkerLayout,
        *,
        weights: Weights,
        activations: Activations,
        passes: Passes,
        adapters: AdapterState,
        agreement: Agreement,
        timer: ActionTimer,
        worker: int = 0,
    ) -> None:
        """Create an executor from its parts. `worker` is the index of this worker over all replicas (copies
        of the pipeline), and `part` describes the stages or the shard of the base that it holds."""
        self.adapted = adapted
        self.base, self.banks, self.layers = adapted.base, adapted.banks, adapted.layers
        self.part, self.worker = part, worker
        self.weights, self.activations, self.passes = weights, activations, passes
        self.adapters, self.agreement = adapters, agreement
        self.overlapped = OverlappedPasses(adapted)
        self.scorer = Scorer(self.base.head() if self.base.is_last else None, self.banks.trained_head_rows)
        self._roster, self._timer = adapters.roster, timer
        self.attached, self.failed_jobs = self._roster.trainings, self._roster.failed_jobs
        self.home = adapters.home
        """Device on which the training state of attached jobs (master weights and moments) is kept: the GPU,
        or the CPU for host memory."""
        self.is_fused = adapted.is_fused
        """Whether the base's layers run as fused ops instead of transformers' own forward."""
        self._last_stage = len(part.stages) - 1
        """Index of the model's last stage, which another worker may hold."""
        self._program = NOTHING_TO_DO
        self._fetch: Fetch = fetch_from(NOTHING_TO_DO, {})
        self._trained_microbatches: frozenset[int] = frozenset()
        """Indices of the microbatches whose training forward this worker runs in the current Program."""
        self._in_flight: dict[int, InFlight] = {}
        self._sample_keys: dict[tuple[str, int, int], SampleKeys] = {}
        """Maps (job, step, offset of the sample) to the attention keys and values of a long sample, which is
        cut into chunks that are being processed one by one."""
        self.unfinished = FINISHED
        """Global batches that the last Program left unfinished. Some of their microbatches are in flight on
        this worker."""
        self._next_microbatch: tuple[MicrobatchPlan, DeviceMicrobatch] | None = None
        """Plan and device tensors of the next microbatch. None unless they have been prepared in advance."""
        self.offer_turn: Callable[[], object] | None = None
        """Function that is called after every pass over a stage, when no adapters are bound to the base, so
        that a chat decoder can generate tokens with the base. None if there is no decoder."""
        self.writer = Writer(self.base.device)
        self._none = torch.zeros((), dtype=self.base.dtype, device=self.base.device)

    # -- jobs --------------------------------------------------------------------------------------------

    @property
    def captures(self) -> int | None:
        """Number of CUDA graphs captured so far. None if passes are not captured."""
        return self.passes.captures

    def attach(self, training: Training) -> None:
        self.adapters.attach(training)
        self._set_version(training.job, training.progress.step)
        if training.recipe.objective != SFT_SPEC:
            self.scorer.objectives[training.job] = make_objective(training.recipe.objective)
        self.scorer.attach_head(self.banks, training.job)

    def detach(self, job: str) -> Training:
        self.scorer.objectives.pop(job, None)
        self.scorer.scalar_heads.pop(job, None)
        return self.adapters.detach(job)

    def kill(self, job: str) -> None:
        """Mark a job as failed: its rows and its actions in the Program are skipped from now on. Other jobs
        are not affected."""
        self.adapters.kill(job)

    def record_evaluation(
        self,
        job: str,
        loss: float,
        keep_best: bool,
        min_delta: float,
        is_requested: bool = True,
        score: float | None = None,
    ) -> None:
        self.attached[job].record_evaluation(loss, keep_best, min_delta, is_requested, score)

    def use_mean_weights(self, job: str) -> None:
        """Make passes read the mean of the job's weights after its last steps, which a sweep (a search over
        hyperparameters) evaluates. Called between two Programs; the job makes no optimizer step until
        `use_latest_weights`."""
        self.adapters.use_weights(job, self.attached[job].evaluated_weights)
        # The mean is no version that any step computed.
        self._set_version(job, -1 - self.attached[job].progress.step)

    def use_latest_weights(self, job: str) -> None:
        """Make passes read the job's latest weights again, after `use_mean_weights`. Called between two
        Programs."""
        self.adapters.use_weights(job, self.attached[job].master)
        self._set_version(job, self.attached[job].progress.step)

    def _set_version(self, job: str, version: int) -> None:
        """Record the version number of the weights that the next pass reads for a job."""
        if (attached := self.banks.attached.get(job)) is not None:
            attached.version = version

    def save(self, job: str, folder: Path) -> None:
        """Take a snapshot of the job, and start to write a checkpoint from it under `folder` while training
        continues."""
        self.writer.save(folder, self.snapshot(job))

    def snapshot(self, job: str) -> Snapshot:
        """Return the job's current state, copied to host memory."""
        with self.adapted.on_stream():
            return self.writer.snapshots.take_snapshot(self.attached[job])

    def save_now(self, job: str, folder: Path) -> None:
        """Save a checkpoint between the runs of two Programs. In a run of one process this does the same as
        `save`."""
        self.save(job, folder)

    def take_unsaved(self) -> list[Unsaved]:
        """Return the checkpoints that could not be written and that no earlier call has returned."""
        return self.writer.take_unsaved()

    def finish_saves(self, job: str) -> None:
        """Wait until every requested checkpoint of the job has been written or could not be written."""
        self.writer.wait(job)

    def restore_base(self) -> None:
        """Wait until all files are written, and remove all adapters and fused layers from the base."""
        self.writer.close()
        self.passes.abandon()
        self.adapted.restore_base()

    # -- a window ----------------------------------------------------------------------------------------

    def run(
        self,
        program: Program,
        fetch: Fetch,
        stop: Callable[[], bool] = lambda: False,
        is_overdue: Callable[[], bool] = lambda: False,
    ) -> Iterator[Event]:
        """Run this worker's actions of the Program, which covers one window (a few global batches of every
        job), and yield events. Microbatches that are in flight at the end are kept for the next Program.
        After `stop` returns True, the run ends as soon as no global batch is unfinished. If that takes too
        long, or if `is_overdue` returns True, the run ends immediately and unfinished global batches are
        dropped."""
        self._check_program(program)
        with self.adapted.on_stream():
            self._continue_microbatches(program)
            self._timer.begin_window()
            self.weights.begin_window()
            self.activations.reserve(max_rows_in_flight(program, self.worker))
            self.passes.begin_window(program)
            self.scorer.begin_window()
            self.agreement.begin_window(program)
            self._program, self._fetch = program, fetch
            actions = program.devices[self.worker]
            self._trained_microbatches = frozenset(
                one.microbatch for one in actions if isinstance(one, Forward)
            )
            yield from self._run_actions(actions, StopRequest(stop), is_overdue)
            yield from self._guard_memory(self.agreement.finish_steps())
            self.agreement.end_window(self.weights.wait_time)
            if not self.agreement.shortage:
                self.unfinished = unfinished_work(program)

    def _continue_microbatches(self, program: Program) -> None:
        """Give the microbatches that the last Program left in flight the indices that they have in this
        Program, or drop them if this Program does not contain them."""
        if program.inherited:
            numbers = {one.number: index for index, one in enumerate(program.inherited)}
            self._in_flight = {numbers[old]: in_flight for old, in_flight in self._in_flight.items()}
            self.activations.renumber_microbatches(numbers)
            self.passes.renumber_microbatches(numbers)
        elif self.unfinished.batches or (self.part.layout.is_pipeline and self._is_busy()):
            self._in_flight.clear()
            self.activations.forget()
            self.passes.abandon()
            self.overlapped.forget()
            self.adapters.abandon()
        self.unfinished = FINISHED

    def _run_actions(
        self, actions: Sequence[Action], request: StopRequest, is_overdue: Callable[[], bool]
    ) -> Iterator[Event]:
        for together, run in groupby(actions, lambda action: isinstance(action, Step)):
            if together:
                steps = [action for action in run if isinstance(action, Step)]
                yield from self._guard_memory(self.agreement.step(steps))
                for step in steps:
                    self._set_version(step.job, step.step)
                continue
            for action in run:
                # Only at the end of a round are the stages where the next plan expects them.
                begins = isinstance(action, ForwardPass | ForwardHalf)
                if begins and request.is_pending() and not self._is_busy():
                    return
                late = request.is_overdue() or is_overdue()
                if late and isinstance(action, Compute | HalfPass) and not self.agreement.shortage:
                    yield from self._drop_unfinished_passes()
                    if self.agreement.end_early():
                        return
                self._timer.start()
                yield from self._guard_memory(self._run_action(action))
                yield from self._finish_action(action)
                if self.offer_turn is not None and isinstance(action, Compute):
                    # Otherwise the host is many passes ahead, and a new prompt would wait for all of them.
                    self._timer.await_start()
                    self.offer_turn()

    def _guard_memory(self, events: Iterator[Event]) -> Iterator[Event]:
        """Yield the events of an action. If the action runs out of memory, drop all unfinished work and
        report the shortage to the agreement."""
        shortage = ""
        try:
            yield from events
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            shortage = str(error) or "out of memory"
        if shortage:
            # Outside the handler, where no traceback holds the tensors of the failed pass any longer.
            yield from self._drop_unfinished_passes()
            self.agreement.report_shortage(shortage)

    def _is_busy(self) -> bool:
        return bool(self._in_flight) or self._roster.has_open_batch()

    def _finish_action(self, action: Action) -> Iterator[Event]:
        """Report an action that has run, and yield the resulting events. After a microbatch's last action on
        this worker, release its tensors."""
        span, passed = self._timer.stop(), None
        if (
            isinstance(action, Compute | HalfPass)
            and (in_flight := self._in_flight.get(action.microbatch)) is not None
        ):
            timed, number, own = in_flight.pass_times, action.microbatch, self.part.own_stages
            is_backward = isinstance(action, Backward | BackwardHalf)
            (timed.backward if is_backward else timed.forward).append(span)
            if action in (Backward(number, own[0]), Evaluate(number, own[-1]), Score(number, own[-1])):
                passed = self._in_flight.pop(number).pass_times
                self._release_sample_keys(passed.plan)
        yield from self.agreement.report_action(action, span, passed)

    def _drop_unfinished_passes(self) -> Iterator[Event]:
        """Drop all unfinished passes of microbatches. Optimizer steps that were already requested are
        finished first."""
        yield from self.agreement.finish_steps()
        self._in_flight.clear()
        self._sample_keys.clear()
        self._next_microbatch = None
        self.activations.forget()
        self.passes.abandon()
        self.overlapped.forget()

    def _run_action(self, action: Action) -> Iterator[Event]:
        if self.agreement.shortage and isinstance(action, Compute | HalfPass | Streaming):
            return
        match action:
            case Recv() if self.agreement.shortage:
                self.agreement.receive(action)
            case Load(stage):
                self.weights.load(stage)
            case Evict(stage):
                self.adapters.prepare_eviction(stage)
                self.weights.evict(stage)
            case Recv(number, stage, "gradient"):
                self.activations.store_gradient(StageVisit(number, stage), self.agreement.receive(action))
            case Recv(number, stage):
                input_TD = self.agreement.receive(action)
                self.activations.store_input(
                    StageVisit(number, stage), input_TD, has_backward=number in self._trained_microbatches
                )
            case Send(number, stage, what):
                self.agreement.send(action, self.activations.take_outgoing(StageVisit(number, stage), what))
            case ForwardHalf(number, stage, index):
                self._forward_half(StageVisit(number, stage), index)
            case BackwardHalf(number, stage, index):
                self._backward_half(StageVisit(number, stage), index)
            case Forward(number, stage):
                self._forward(StageVisit(number, stage))
            case Backward(number, stage):
                self._backward(StageVisit(number, stage))
            case Evaluate() | Score():
                yield from self.agreement.handle_arrival(action.stage)
                yield from self._run_forward_only(action)
            case Reduce(job, step, "scores"):
                self.agreement.send_scores(job, step, self.scorer.kl_sums(job, step))
            case Reduce(job, step, "kl"):
                yield from self._add_scores(job, step)
            case Reduce():
                self.agreement.reduce(action)
            case Save(job, step):
                yield from self.agreement.save(job, step)

    # -- passes ------------------------------------------------------------------------------------------

    def _forward_half(self, visit: StageVisit, index: int) -> None:
        in_flight = (
            self._find_in_flight(visit, Forward) if index == 0 else self._in_flight.get(visit.microbatch)
        )
        if index == 0:
            self._prepare_stage(
                visit.stage, self._program.microbatches[visit.microbatch], before_backward=False
            )
        if in_flight is not None:
            self.overlapped.forward_half(visit, in_flight, index)

    def _backward_half(self, visit: StageVisit, index: int) -> None:
        if (in_flight := self._in_flight.get(visit.microbatch)) is None:
            return
        if index + 1 == self._program.half_layer_count:
            assert in_flight.scores is not None, "losses come before the gradients of the last half layer"
            self._prepare_stage(
                visit.stage, self._program.microbatches[visit.microbatch], before_backward=True
            )
            self.overlapped.begin_backward(visit, in_flight.scores.gradient_TD(self.failed_jobs))
        self.overlapped.backward_half(visit, index)

    def _forward(self, visit: StageVisit) -> None:
        plan = self._program.microbatches[visit.microbatch]
        is_overlapped = self.overlapped.is_open(visit)
        in_flight = (
            self._in_flight[visit.microbatch] if is_overlapped else self._find_in_flight(visit, Forward)
        )
        # Not earlier: the microbatch is laid out while the data of the first Steps is still being copied.
        self._prepare_stage(visit.stage, plan, before_backward=False)
        if in_flight is not None:
            self._run_forward_pass(in_flight, visit)
        # After the pass, so that the device has work while the host launches these requests.
        self.adapters.prepare_next_passes(visit.stage, plan.jobs)

    def _run_forward_pass(self, in_flight: InFlight, visit: StageVisit) -> None:
        last = visit.stage == self._last_stage
        if self.overlapped.is_open(visit):
            h_TD = self.overlapped.end_forward(visit)
        else:
            keep = last or self.part.layout.is_pipeline
            h_TD = self.passes.forward(visit, in_flight, self._stage_input(visit), keep)
        if last:
            leaf_TD, program = h_TD.detach().requires_grad_(), self._program
            in_flight.scores = self.scorer.score(
                leaf_TD,
                in_flight.device_microbatch,
                program.supervised_token_count,
                program.supervised_tokens_by_sample,
            )
            return
        self.activations.store_input(StageVisit(visit.microbatch, visit.stage + 1), h_TD)
        if visit.stage > 0:
            self.activations.end_forward(visit)

    def _backward(self, visit: StageVisit) -> None:
        number, stage, own = visit.microbatch, visit.stage, self.part.own_stages
        self._prepare_stage(stage, self._program.microbatches[number], before_backward=True)
        if (in_flight := self._in_flight.get(number)) is None:
            return
        at = own.index(stage)
        if at and own[at - 1] > 0:
            self.activations.prefetch_input(StageVisit(number, own[at - 1]))
        if self.overlapped.is_open(visit):
            self.overlapped.end_backward(visit)
            dinput_TD = None
        else:
            scores = in_flight.scores if stage == self._last_stage else None
            dh_TD = scores.gradient_TD(self.failed_jobs) if scores else self.activations.take_gradient(visit)
            dinput_TD = self.passes.backward(visit, in_flight, self._stage_input(visit), dh_TD)
        self.adapters.record_backward(stage, in_flight.pass_times.plan.jobs)
        if dinput_TD is not None:
            self.activations.drop(visit)
            self.activations.store_gradient(StageVisit(number, stage - 1), dinput_TD)
        if stage == own[-1]:
            self._collect_losses(in_flight)
        if stage == own[0]:
            self._prepare_next_microbatch(number)

    def _run_forward_only(self, action: ForwardOnly) -> Iterator[Event]:
        """Run a microbatch's pass over a stage without a backward, for evaluation or scoring, and yield its
        events."""
        visit = StageVisit(action.microbatch, action.stage)
        plan = self._program.microbatches[visit.microbatch]
        in_flight = self._find_in_flight(visit, type(action))
        self._prepare_stage(visit.stage, plan, before_backward=False)
        if in_flight is not None:
            input_TD = self._stage_input(visit)
            h_TD = self.passes.evaluate(visit, in_flight, input_TD)
            if input_TD is not None:
                self.activations.drop(visit)
            if visit.stage < self._last_stage:
                self.activations.store_input(
                    StageVisit(visit.microbatch, visit.stage + 1), h_TD, has_backward=False
                )
            elif isinstance(action, Evaluate):
                yield from self.agreement.report_evaluations(
                    self.scorer.evaluate(h_TD, in_flight.device_microbatch)
                )
            else:
                yield from self.agreement.report_scores(self._sample_scores(h_TD, in_flight))
        self.adapters.prepare_next_passes(visit.stage, plan.jobs)

    def _sample_scores(self, h_TD: Tensor, in_flight: InFlight) -> list[Scored]:
        """Return the log-probability of each sample under the reference policy, for preference objectives.
        Those of mismatched samples (prompts with the completion of another sample, for the KL term of KTO)
        are not returned but stored for the losses that are computed later."""
        segments, sums = (
            in_flight.pass_times.plan.segments,
            self.scorer.sample_logprobs(h_TD, in_flight.device_microbatch),
        )
        self.scorer.record_mismatched_scores(sums, in_flight.device_microbatch)
        return [
            Scored(one.job, one.step, tuple(placed.sample for placed in one.samples), logprobs)
            for one, segment, logprobs in zip(
                segments, in_flight.device_microbatch.microbatch.segments, sums, strict=True
            )
            if not segment.kl_purpose
        ]

    def _add_scores(self, job: str, step: int) -> Iterator[Event]:
        """Replace this replica's sums for the KL term of KTO by the sums over all replicas (copies of the
        pipeline)."""
        sums = self.agreement.add_scores(job, step)
        if sums is not None:
            self.scorer.set_kl_sums(job, step, sums)
        elif not self.agreement.shortage:
            # The loss of this replica's samples is not known either, and no Step may be made with another.
            yield from self._drop_unfinished_passes()
            self.agreement.report_shortage(f"another replica could not score the samples of {job}")

    def _prepare_stage(self, stage: int, plan: MicrobatchPlan, before_backward: bool) -> None:
        """Make the weights of a stage, and the adapters of the microbatch's jobs, readable by the device
        before a pass. `before_backward` is True if the pass is a backward."""
        waited = self.adapters.make_readable(stage, plan.jobs, before_backward)
        if self.weights.make_readable(stage) or waited:
            self._timer.start()

    def _stage_input(self, visit: StageVisit) -> Tensor | None:
        return self.activations.read(visit) if visit.stage else None

    def _collect_losses(self, in_flight: InFlight) -> None:
        """Add a microbatch's losses and correct predictions to the sums of its jobs' unfinished global
        batches, after the backward of this worker's last stage. Workers without the last stage of the model
        add zeros."""
        segments, scores = in_flight.device_microbatch.microbatch.segments, in_flight.scores
        in_flight.scores = None
        if scores is not None:
            self._roster.collect(segments, scores.losses, scores.correct, scores.metrics)
        else:
            count = len(segments)
            self._roster.collect(segments, [self._none] * count, [self._none.long()] * count, [None] * count)

    # -- rows --------------------------------------------------------------------------------------------

    def _find_in_flight(self, visit: StageVisit, kind: type[ForwardPass]) -> InFlight | None:
        """Return the state of a microbatch that this worker is processing. At the worker's first stage,
        create the state and copy the microbatch's tensors to the device. Return None if all of its jobs have
        failed."""
        if visit.stage == self.part.own_stages[0]:
            plan = self.agreement.without_failed_jobs(self._program.microbatches[visit.microbatch])
            if plan.segments:
                training = kind is Forward
                if training and not self._in_flight:
                    self.passes.begin_round()
                if training and self._next_microbatch is not None and self._next_microbatch[0] == plan:
                    device_microbatch = self._next_microbatch[1]
                else:
                    device_microbatch = self._to_device_microbatch(plan, kind)
                timed = TimedPass(plan, training)
                self._in_flight[visit.microbatch] = InFlight(
                    device_microbatch, timed, self._find_sample_keys(plan)
                )
        return self._in_flight.get(visit.microbatch)

    def _find_sample_keys(self, plan: MicrobatchPlan) -> SampleKeys | None:
        """Return the attention keys and values of the long sample that the microbatch is a chunk of. None if
        the microbatch is not a chunk."""
        if (sample := self._program.whole_sample(plan)) is None:
            return None
        segment = plan.segments[0]
        key = segment.job, segment.step, sample.offset
        return self._sample_keys.setdefault(key, SampleKeys(sample.length))

    def _release_sample_keys(self, plan: MicrobatchPlan) -> None:
        """Release the keys and values of a long sample after the backward of its first chunk. Backwards run
        in the reverse order of chunks, so the first chunk is the last to run."""
        if (chunk := plan.chunk) is not None and chunk.chunk_start == 0:
            segment = plan.segments[0]
            del self._sample_keys[segment.job, segment.step, chunk.sample_offset]

    def _to_device_microbatch(self, plan: MicrobatchPlan, kind: type[ForwardPass]) -> DeviceMicrobatch:
        base = self.base
        return to_device_microbatch(self._fetch(plan, kind), plan.rows, base.device, base.shape.context)

    def _prepare_next_microbatch(self, number: int) -> None:
        """Copy the tensors of the microbatch after `number` to the device while the GPU computes, before an
        optimizer step makes the host wait."""
        self._next_microbatch = None
        if (
            self.adapted.stream is not None
            and number + 1 in self._trained_microbatches
            and number + 1 not in self._in_flight
        ):
            plan = self.agreement.without_failed_jobs(self._program.microbatches[number + 1])
            if plan.segments:
                self._next_microbatch = plan, self._to_device_microbatch(plan, Forward)

    def _check_program(self, program: Program) -> None:
        """Raise PlanError if the Program needs another layout than the one that this executor was built
        for."""
        layout = self.part.layout
        if len(program.devices) != layout.workers * layout.replicas:
            raise PlanError(
                f"this plan is for {len(program.devices)} devices, and only plans for "
                f"{layout.workers * layout.replicas} can be run here"
            )
        whole = layout.is_pipeline or (len(layout.stages) == 1 and layout.stages[0].is_resident)
        if program.has_chunks and not whole:
            raise PlanError(
                "this plan cuts samples into chunks, and here stages of the base take turns on a device"
            )
        if program.overlapped_microbatches and not self.overlapped.is_possible:
            raise PlanError("this plan overlaps microbatches, and here layers are no fused shards")
        actions = program.devices[self.worker]
        moved = {type(action).__name__ for action in actions if isinstance(action, Streaming)}
        if moved and not self.part.streamed_stages:
            raise PlanError(
                f"this plan holds {', '.join(sorted(moved))}, for a base that is streamed; here all of it is "
                "resident"
            )
        if program.stages != layout.stage_workers:
            raise PlanError(
                f"this plan is for a base in {len(program.stages)} stages, and here it has "
                f"{len(layout.stages)}"
            )


def max_rows_in_flight(program: Program, worker: int = 0) -> int:
    """Return the maximum number of rows in flight on a worker at any time. The rows of a microbatch are in
    flight from the microbatch's first forward to its last backward on the worker."""
    actions = program.devices[worker]
    first = min((one.stage for one in actions if isinstance(one, Forward)), default=0)
    rows = max_rows = 0
    for action in actions:
        match action:
            case Forward(number, stage) if stage == first:
                rows += program.microbatches[number].rows
            case Backward(number, stage) if stage == first:
                rows -= program.microbatches[number].rows
        max_rows = max(max_rows, rows)
    return max_rows
