"""The training process of a service: the training loop of `weftune train`, with jobs and commands from the
database."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from weftune.adapters.folder import CONFIG
from weftune.adapters.lora.spec import LoraSpec
from weftune.base.host.read_ahead import base_read_ahead
from weftune.base.load import inspect, load_tokenizer, select_device
from weftune.core.files import cache_folder
from weftune.core.interrupt import handle_interrupts
from weftune.core.shapes import JobShape, ModelShape
from weftune.data.encode import Encoder
from weftune.data.prepare import SharedData
from weftune.data.spec import EXACT_MATCH
from weftune.errors import Mistake, SpecError
from weftune.jobs.courses import adapter_sizes
from weftune.jobs.spec.checks import check_on_base
from weftune.jobs.spec.spec import JobSpec
from weftune.jobs.store.policy import QueuedJob, Ranking, TenantUsage
from weftune.jobs.store.status import State
from weftune.run.events import Evaluated, Passed, Stepped
from weftune.run.executor import Executor
from weftune.run.training import checkpoint
from weftune.service.announcer import Announcer
from weftune.service.chat import ChatServer
from weftune.service.ids import AdapterName
from weftune.service.inbox import ServiceInbox
from weftune.service.job_store import ANNOUNCED, ServiceJobStore
from weftune.service.queue_order import QUEUE, make_policy, queue_values
from weftune.service.settings import EPOCHS, Envelope, ServiceSettings
from weftune.service.store.database import StoreUnavailable, open_requests, open_training
from weftune.service.store.records import JobRow, LeaseLost, TrainingStore, process_name
from weftune.service.store.requests import RequestStore, Submission
from weftune.service.sweeps import ServiceSweep, unfinished_sweeps
from weftune.trainer.engine import open_engine
from weftune.trainer.job import PreparedJob, prepare_job
from weftune.trainer.journal import Journal
from weftune.trainer.loop import Loop
from weftune.trainer.options import Options
from weftune.trainer.results import CHECKPOINTS
from weftune.trainer.trainer import Quiet
from weftune.trainer.warm_up import warm_up

log = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
CHAT_REST_SECONDS = 60.0
"""Seconds after an answer during which forward and backward passes are kept short, since another prompt of
the chat may follow."""
ANNOUNCED_JOBS = 100
"""Maximum number of adapters, trained by earlier processes, that are announced to vLLM at the start. If there
are more, only the newest are announced."""
FINAL_SECONDS = 15.0
"""Maximum seconds to wait for a locked database at the start and at the end of the process."""
LEASE_LOST = 75
"""Exit code of a training process after another process has taken its lease (the exclusive right to
write)."""
BATCH_ROWS = 16
"""Assumed rows per global batch of the jobs that a service expects. The layout (which layers each device
holds) is chosen for these jobs."""
WARM_UP_JOBS = 2
"""Number of expected jobs whose passes are compiled, and captured as CUDA graphs, before the service is
ready."""
MAX_CRASHES = 3
"""Maximum number of crashes of the training process while a job is at the same step. When the number is
reached, the job fails."""
CRASHED = "the training process ended unexpectedly"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerMemory:
    """Device bytes that are reserved for generating answers. Jobs may use the remaining memory."""

    chat_bytes: int
    """Bytes of the KV cache for answers to clients' prompts."""
    evaluation_bytes: int
    """Bytes of the KV cache for answers that jobs generate at evaluations."""
    adapter_bytes: int
    """Bytes of adapters that are attached only to answer prompts."""

    @property
    def total_bytes(self) -> int:
        return self.chat_bytes + self.evaluation_bytes + self.adapter_bytes


ANSWER_MEMORY = {
    "cuda": AnswerMemory(chat_bytes=2 << 30, evaluation_bytes=1 << 30, adapter_bytes=1 << 30),
    "cpu": AnswerMemory(chat_bytes=256 << 20, evaluation_bytes=128 << 20, adapter_bytes=128 << 20),
}
"""Maps each device type to the memory that is reserved for answers."""


def main(settings: ServiceSettings) -> None:
    """Train the jobs of a service until SIGTERM or Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    settings.jobs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        training = TrainingStore(open_training(settings, writable=True))
        stack.callback(training.close)
        requests = RequestStore(open_requests(settings, writable=False))
        stack.callback(requests.close)
        stop = stack.enter_context(handle_interrupts(lambda: log.info("stopping; jobs are saved first")))
        stack.enter_context(_HeldLease(training))
        TrainingService(settings, training, requests).run(stop)


def end_process(lost_lease: LeaseLost) -> None:
    """End the process immediately, so that it writes nothing after another process has taken over."""
    log.error("%s", lost_lease)
    os._exit(LEASE_LOST)


class _HeldLease:
    """A context manager that holds the lease, by which only one training process writes to the database. A
    thread renews the lease until the context ends."""

    def __init__(self, training: TrainingStore) -> None:
        self._training = training
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_leases, name="lease", daemon=True)

    def __enter__(self) -> None:
        # The lease of a process that was killed on this machine is free at once.
        self._training.acquire_lease(process_name(), LEASE_SECONDS, wait_seconds=2 * LEASE_SECONDS)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with suppress(StoreUnavailable, LeaseLost):
            self._training.release_lease()

    def _renew_leases(self) -> None:
        while not self._ended.wait(LEASE_SECONDS / 4):
            try:
                self._training.renew_lease(LEASE_SECONDS)
            except StoreUnavailable as error:
                log.warning("%s", error)
            except LeaseLost as lost:
                end_process(lost)


class TrainingService:
    """The training process of a service: the training loop, its job store and inbox, and the policy of
    admission."""

    def __init__(self, settings: ServiceSettings, training: TrainingStore, requests: RequestStore) -> None:
        self.settings, self.training, self.requests = settings, training, requests
        self.store = ServiceJobStore(settings, training, end_process)
        self.inbox = ServiceInbox(requests, self.store, self.prepare)
        self.policy = make_policy(settings.quotas)
        self._queue: dict[str, Any] = {}
        """Inputs with which the scheduling policy last ranked the jobs, as JSON values."""
        self.loop: Loop | None = None
        self._suspects: dict[str, int] = {}
        """Maps each job that was training at more than one crash of the process to its step at the last
        crash."""

    def run(self, stop: Callable[[], bool]) -> None:
        settings = self.settings
        self.store.is_stopping = stop
        device = select_device(settings.device)
        shape = self.shape = inspect(settings.base, device)
        self.tokenizer = load_tokenizer(settings.base)
        self.encoder = Encoder(self.tokenizer)
        reserved = ANSWER_MEMORY[device.type]
        expected = expected_jobs(settings.envelope, shape)
        options = Options(
            device=settings.device,
            memory=settings.memory,
            gpu_memory=settings.gpu_memory,
            decoder_bytes=reserved.total_bytes,
        )
        with base_read_ahead(settings.base):
            engine = open_engine(
                options,
                settings.base,
                device,
                shape,
                expected,
                lambda name: self.store.output / name / CHECKPOINTS,
                lambda sentence: log.info("%s", sentence),
            )
        journal = Journal(self.store, Quiet(), lambda line: None)
        self.loop = loop = Loop(engine, self.tokenizer, self.store, journal)
        loop.answers.cache_bytes = reserved.evaluation_bytes
        loop.inbox, loop.rank_jobs, loop.watch_pass = self.inbox, self.rank_jobs, self._record_pass
        self.store.describe_device = self._describe_device
        executor = engine.executor
        assert isinstance(executor, Executor), "a service trains in one process"
        with ExitStack() as stack:
            self._announce_adapters(stack)
            self._resume_jobs()
            stack.callback(executor.restore_base)
            if device.type == "cuda" and not engine.choice.is_streamed:
                log.info("compiling kernels")
                warm_up(loop, LoraSpec(rank=settings.envelope.rank), expected[:WARM_UP_JOBS], stop)
            # `/readyz` is answered with 200 from here on, since the socket listens.
            chat = ChatServer(
                executor.adapted,
                self.tokenizer,
                self.store.output,
                settings.chat_socket,
                reserved.chat_bytes,
                reserved.adapter_bytes,
            )
            stack.callback(chat.close)
            executor.offer_turn = partial(loop.take_turn, chat.take_turn)
            loop.fitted_models.unused_decoder_bytes = lambda: (
                chat.unused_adapter_bytes + loop.answers.unused_bytes
            )
            loop.windows.is_decoding = partial(chat.was_active_within, CHAT_REST_SECONDS)
            self.inbox.serve_idle = partial(serve_chat, chat)
            log.info("ready to train on %s", settings.base_name)
            loop.run(stop, self._on_event)
        self.store.flush(FINAL_SECONDS)

    # -- start -------------------------------------------------------------------------------------------

    def _resume_jobs(self) -> None:
        """Queue the unfinished jobs of earlier training processes again. Jobs that clients have paused stay
        paused."""
        assert self.loop is not None
        self.inbox.cursors |= self.training.cursors()
        for window in self.training.last_windows(1):
            self.store.restore_recent_tokens(window)
        unfinished = []
        for row in self.training.unfinished_jobs():
            submission = self.requests.submission(None, row.id)
            assert submission is not None, f"{row.id} was submitted"
            self.store.admit_submission(submission, row)
            if row.state is State.PAUSED:
                continue
            if row.state is State.RUNNING:
                self.store.move_job(row.id, State.QUEUED, f"{CRASHED} at step {row.status.step}")
            self._rewind_job(row)
            unfinished.append((row, submission))
        for sweep in unfinished_sweeps(self.store):
            self._begin_sweep(sweep)
        for row, submission in unfinished:
            # A sweep may have dropped a trial just before the last process died.
            if self.store.job(row.id).state.has_ended or self._has_crashed_too_often(row):
                continue
            self._recover_epochs(row.id)
            if (job := self.inbox.prepare(submission)) is not None:
                self.loop.add_job(job)
        self.store.flush(FINAL_SECONDS)

    def _begin_sweep(self, name: str) -> None:
        """Add a sweep to the training loop, with the decisions that earlier processes have recorded, and
        remove sweeps that have ended."""
        assert self.loop is not None
        sweeps = self.loop.sweeps
        for ended in [one for one in sweeps.sweeps if isinstance(one, ServiceSweep) and one.has_ended]:
            sweeps.remove_sweep(ended)
            self.store.forget_ended(ended.trials)
        if any(one.sweep.name == name for one in sweeps.sweeps):
            return
        submission = self.requests.submission(None, name)
        assert submission is not None, f"{name} was submitted"
        sweep = ServiceSweep(submission, self.requests.trials(name), self.store)
        sweep.restore()
        sweeps.add_sweep(sweep)

    def _announce_adapters(self, stack: ExitStack) -> None:
        """Announce adapters to vLLM: those that finish from now on, and those of earlier processes whose
        announcement has no recorded outcome. Ask vLLM to unload adapters that were deleted."""
        settings = self.settings
        if settings.announce is None:
            return
        announcer = Announcer(
            settings.announce, settings.base, self.store.output, self.store.record_announcement
        )
        stack.callback(announcer.close)
        self.store.announce, self.store.withdraw = announcer.announce, announcer.withdraw
        for row in self.training.jobs(states=[State.SUCCEEDED], limit=ANNOUNCED_JOBS):
            outcomes = [
                event.data[ANNOUNCED] for event in self.training.events(row.id) if ANNOUNCED in event.data
            ]
            if not outcomes:
                announcer.announce(row)
            elif outcomes[0] and row.model is None:
                announcer.withdraw(row.id, self._model_name(row))

    def _model_name(self, row: JobRow) -> str:
        """Return the name of a job's adapter, even if the adapter has been deleted."""
        submission = self.requests.submission(None, row.id)
        assert submission is not None, f"{row.id} was submitted"
        return str(AdapterName(self.settings.base_name, row.tenant, submission.suffix or "", row.id))

    def _rewind_job(self, row: JobRow) -> None:
        found = checkpoint.newest_progress(self.store.output / row.id / CHECKPOINTS)
        step, tokens = (found.step, found.trained_tokens) if found else (0, 0)
        self.store.advance_job(row.id, step, row.status.steps, tokens)

    def _has_crashed_too_often(self, row: JobRow) -> bool:
        """Return whether the process has died `MAX_CRASHES` times while this job was at the same step, and
        mark the job as failed if so. If it has died less often, but more than once, the job is a suspect, and
        suspects are trained one at a time."""
        reasons = [one.reason for one in self.training.transitions(row.id) if one.new is State.QUEUED]
        if row.state is State.RUNNING:
            reasons.append(f"{CRASHED} at step {row.status.step}")
        if not reasons or not reasons[-1].startswith(CRASHED):
            return False
        crashes = 0
        for reason in reversed(reasons):
            if reason != reasons[-1]:
                break
            crashes += 1
        if crashes >= MAX_CRASHES:
            message = f"the training process died {crashes} times while this job trained"
            self.store.fail_job(row.id, {"code": "training_crashed", "message": message, "param": None})
            return True
        if crashes > 1:
            self._suspects[row.id] = row.status.step
        return False

    def _recover_epochs(self, name: str) -> None:
        """Record a job's checkpoints that the previous process wrote to disk, but not to the database before
        it died."""
        known = {one.step for one in self.training.checkpoints(name)}
        for folder in sorted((self.store.output / name / EPOCHS).glob("step-*")):
            step = int(folder.name.removeprefix("step-"))
            if step not in known and (folder / CONFIG).exists():
                self.store.add_checkpoint(name, step, {"step": step})

    # -- jobs --------------------------------------------------------------------------------------------

    def prepare(self, submission: Submission) -> PreparedJob:
        """Return a job that is ready to train. Its tokens are read from the cache, to which the HTTP process
        has written them."""
        metric = submission.job.get("eval", {}).get("metric")
        if metric not in (None, EXACT_MATCH, *self.settings.metrics.values()):
            sentence = "is no longer registered with this service; submit the job with another metric"
            raise SpecError(Mistake("eval.metric", f"{metric.rpartition(':')[2]} {sentence}"))
        spec = JobSpec(**{**submission.job, "name": submission.id})
        if mistakes := check_on_base((spec,), self.shape, self.settings.base):
            raise SpecError(mistakes)
        row = self.store.row(submission.id)
        cache = cache_folder() / "tokens"
        # Not kept: the job holds its data itself, as long as it needs them.
        shared = SharedData(self.encoder, cache, self.shape.context)
        job = prepare_job(spec, submission.number, self.tokenizer, self.shape, cache, None, shared)
        assert self.loop is not None
        self.loop.answers.check_memory(job)
        if submission.sweep is not None:
            self._begin_sweep(submission.sweep)
        priority = spec.priority if row is None else row.priority
        return replace(job, shape=replace(job.shape, priority=priority))

    def rank_jobs(self, waiting: Sequence[JobShape], attached: Sequence[JobShape]) -> Ranking:
        """Rank the jobs by the service's scheduling policy, and hold back jobs that may have crashed the
        process."""
        now, notes = time.time(), self.store.notes
        jobs = [
            QueuedJob(
                shape=shape,
                is_attached=is_attached,
                tenant=notes[shape.name].submission.tenant,
                submission_number=notes[shape.name].submission.number,
                queued_seconds=notes[shape.name].waited_seconds(now),
                deadline=notes[shape.name].submission.deadline,
                remaining_seconds=self._remaining_seconds(shape.name, now),
            )
            for shapes, is_attached in ((waiting, False), (attached, True))
            for shape in shapes
        ]
        usage = {
            tenant: TenantUsage(
                recent_tokens=self.store.recent_tokens(tenant, now),
                tokens_today=self.store.tokens_today(tenant, now),
            )
            for tenant in {job.tenant for job in jobs}
        }
        self._queue = queue_values(jobs, usage)
        suspects = self._suspects_that_wait(waiting, attached)
        found = self.policy.rank([job for job in jobs if job.shape.name not in suspects], usage, now)
        return replace(found, hold_reasons={**found.hold_reasons, **suspects})

    def _remaining_seconds(self, name: str, current_time: float) -> float:
        row = self.store.row(name)
        return (
            0.0
            if row is None or row.estimated_finish is None
            else max(0.0, row.estimated_finish - current_time)
        )

    def _suspects_that_wait(
        self, waiting: Sequence[JobShape], attached: Sequence[JobShape]
    ) -> dict[str, str]:
        """Map each job that may have crashed the process, and must wait, to the reason. Only one such job
        trains at a time."""
        for name in [name for name in self._suspects if name not in self.store.notes]:
            del self._suspects[name]
        suspects = [shape.name for shape in (*attached, *waiting) if shape.name in self._suspects]
        reason = "the training process died while it trained beside another job, which is tried first"
        return dict.fromkeys(suspects[1:], reason)

    # -- events ------------------------------------------------------------------------------------------

    def _record_pass(self, event: Passed) -> None:
        assert self.loop is not None
        cost, one = self.loop.fitted_models.cost, event.time
        predict = cost.pass_seconds if one.training else cost.evaluation
        predicted = predict(one.work) if cost.is_measured else None
        self.store.record_pass(event.microbatch, one.seconds, predicted, one.training)

    def _describe_device(self) -> dict[str, Any]:
        """Return the device's name, its memory in bytes by purpose, and the inputs of the admission
        policy."""
        assert self.loop is not None
        memory, device = self.loop.fitted_models.memory, self.loop.base.device
        attached = [self.loop.jobs[name].shape for name in self.loop.executor.attached]
        return {
            QUEUE: self._queue,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "memory": {
                "budget_bytes": memory.budget_bytes,
                "base_bytes": memory.shape.base_bytes,
                "answer_bytes": memory.decoder_bytes,
                "jobs": {shape.name: memory.state_bytes([shape]) for shape in attached},
            },
        }

    def _on_event(self, event: Stepped | Evaluated) -> None:
        assert self.loop is not None
        name = event.job
        if not isinstance(event, Stepped) or name not in self.store.notes:
            return
        if event.step > self._suspects.get(name, event.step):
            del self._suspects[name]
        job, notes = self.loop.jobs[name], self.store.notes[name]
        budget = notes.submission.token_budget
        if budget is not None and self.store.job(name).trained_tokens >= budget:
            self.loop.fail(name, f"it has trained on its budget of {budget:,} tokens")
        if event.step < job.recipe.steps and event.step % job.sample_order.steps_per_epoch == 0:
            self._save_epoch(job, event.step, dict(notes.metrics))

    def _save_epoch(self, job: PreparedJob, step: int, metrics: dict[str, Any]) -> None:
        """Begin to write the adapter of a job at this step to a folder of its own, as a checkpoint that can
        answer prompts. Another thread writes the files."""
        assert self.loop is not None
        executor, folder = self.loop.executor, self.store.epoch_folder(job.name, step)
        assert isinstance(executor, Executor), "a service trains in one process"
        written = self.loop.result_writer.write_snapshot(job, executor.snapshot(job.name), folder)

        def record(done: Any) -> None:
            if done.exception() is None:
                self.store.add_checkpoint(job.name, step, {**metrics, "step": step})
            else:
                log.warning("%s: its checkpoint of step %d: %s", job.name, step, done.exception())

        written.add_done_callback(record)


def serve_chat(chat: ChatServer, seconds: float) -> None:
    """Answer prompts for at most the given seconds, or until no prompt is left."""
    deadline = time.monotonic() + seconds
    while (remaining := deadline - time.monotonic()) > 0:
        if not chat.take_turn() and not chat.wait(remaining):
            return


def expected_jobs(envelope: Envelope, shape: ModelShape) -> list[JobShape]:
    """Return the shapes (sizes) of the jobs that a service expects. The layout is chosen for them when the
    service starts."""
    tokens = min(envelope.sample_tokens, shape.context or envelope.sample_tokens)
    sizes = adapter_sizes(LoraSpec(rank=envelope.rank), shape)
    return [
        replace(
            sizes,
            name=f"expected-{n}",
            file_position=n,
            max_sample_tokens=tokens,
            batch_tokens=BATCH_ROWS * tokens,
        )
        for n in range(envelope.jobs)
    ]
