"""Runs a Program on one device, action by action, and reports what happened. It decides nothing.

Shapes: T rows of a microbatch, D hidden width, S supervised rows.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.adapters.banks import Banks
from weft.base.model import Base
from weft.batch import IGNORED, Microbatch
from weft.objectives import sft
from weft.ops.logprobs import target_logprobs
from weft.ops.lora import Route
from weft.plan.cost import PassTime
from weft.plan.program import Backward, Evaluate, Forward, MicrobatchPlan, Program, Save, Step
from weft.run.events import Evaluated, Event, Failed, OutOfMemory, Passed, SaveDue, Stepped
from weft.run.training import NotFinite, OpenBatch, Training

Fetch = Callable[[MicrobatchPlan, bool], Microbatch]
"""Lays out the planned samples, of the training or (True) of the held-out rows, as tensors."""


@dataclass(frozen=True, slots=True)
class _Laid:
    """A microbatch on the device, with its supervised rows and where each segment's begin among them."""

    microbatch: Microbatch
    rows_S: Tensor
    sections: list[int]


@dataclass(slots=True)
class _Flight:
    """A microbatch between its Forward and its Backward; one loss and one count of hits per segment."""

    plan: MicrobatchPlan
    laid: _Laid
    losses: list[Tensor]
    hits: list[Tensor]
    seconds: float


@dataclass(slots=True)
class _Look:
    """Sums of one job's evaluation so far."""

    loss: float = 0.0
    hits: int = 0
    tokens: int = 0


class Executor:
    def __init__(self, base: Base, route: Route | None = None) -> None:
        self.base = base
        self.route = route or (Route.segmented if base.device.type == "cpu" else Route.concatenated)
        self.banks = Banks(base.sites(), base.shape.sites, next(base.model.parameters()))
        self.aboard: dict[str, Training] = {}
        self.dead: set[str] = set()
        self._head = base.head()
        self._flights: dict[int, _Flight] = {}

    def attach(self, training: Training) -> None:
        self.banks.attach(training.member, training.layout, training.master.detach())
        self.aboard[training.job] = training

    def detach(self, job: str) -> Training:
        self.banks.detach(job)
        self.dead.discard(job)
        return self.aboard.pop(job)

    def kill(self, job: str) -> None:
        """From here on the job's rows and actions are skipped; the Program stands for the others."""
        self.dead.add(job)
        self.banks.zero(job)
        self.aboard[job].forget_open_batch()

    def run(self, program: Program, fetch: Fetch, stop: Callable[[], bool]) -> Iterator[Event]:
        """Run every action. Once `stop` says so, ends at the next point where no job is inside a step."""
        shortage = ""
        try:
            yield from self._act(program, fetch, stop)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            shortage = str(error) or "out of memory"
        if shortage:
            # Raised out here, where no traceback holds the tensors of the pass that failed any longer.
            self._abandon()
            raise OutOfMemory(shortage)

    def _act(self, program: Program, fetch: Fetch, stop: Callable[[], bool]) -> Iterator[Event]:
        looks: dict[tuple[str, int], _Look] = {}
        left = Counter(
            (segment.job, segment.step)
            for action, plan in program.compute()
            if isinstance(action, Evaluate)
            for segment in plan.segments
        )
        for action in program.actions:
            match action:
                case Forward(number):
                    if stop() and not self._inside_a_step():
                        return
                    self._start(number, program, fetch)
                case Backward(number):
                    yield from self._finish(number, program)
                case Step(job, step):
                    yield from self._step(job, program.batch(job, step).supervised)
                case Evaluate(number):
                    if stop() and not self._inside_a_step():
                        return
                    yield from self._evaluate(program.microbatches[number], fetch, looks, left)
                case Save(job, step):
                    if job not in self.dead:
                        yield SaveDue(job, step)

    def _inside_a_step(self) -> bool:
        return any(training.open is not None for training in self.aboard.values())

    def _abandon(self) -> None:
        self._flights.clear()
        self.banks.clear_gradients()
        for training in self.aboard.values():
            training.forget_open_batch()

    def _start(self, number: int, program: Program, fetch: Fetch) -> None:
        plan = program.microbatches[number].without(self.dead)
        if plan.segments:
            self._flights[number] = self._forward(plan, self._lay(fetch(plan, False)), program, self.route)

    def _lay(self, microbatch: Microbatch) -> _Laid:
        """Found on the host, so that the device is not asked how many rows there are."""
        rows_S = (microbatch.targets_T != IGNORED).nonzero().squeeze(1)
        begins = torch.tensor([segment.start for segment in microbatch.segments[1:]], dtype=rows_S.dtype)
        sections = torch.searchsorted(rows_S, begins).tolist()
        return _Laid(microbatch.to(self.base.device), rows_S.to(self.base.device), sections)

    def _forward(self, plan: MicrobatchPlan, laid: _Laid, program: Program, route: Route) -> _Flight:
        began = time.perf_counter()
        microbatch = laid.microbatch
        with self.banks.bound(microbatch, route, training=True):
            logprobs, hits = self._logprobs(laid)
        losses = [
            sft.loss(part_S, program.batch(segment.job, segment.step).supervised)
            for segment, part_S in zip(microbatch.segments, logprobs, strict=True)
        ]
        hit_counts = [part_S.sum() for part_S in hits]
        return _Flight(plan, laid, losses, hit_counts, time.perf_counter() - began)

    def _logprobs(self, laid: _Laid) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probabilities of the supervised targets, and which were the likeliest, segment by segment."""
        h_SD = self.base.hidden(laid.microbatch).index_select(0, laid.rows_S)
        targets_S = laid.microbatch.targets_T.index_select(0, laid.rows_S)
        logprobs_S, hits_S = target_logprobs(h_SD, targets_S, self._head)
        return list(logprobs_S.tensor_split(laid.sections)), list(hits_S.tensor_split(laid.sections))

    def _finish(self, number: int, program: Program) -> Iterator[Event]:
        flight = self._flights.pop(number, None)
        if flight is None:
            return
        began = time.perf_counter()
        self._backward(flight)
        if self.route is Route.concatenated and not self._finite(flight):
            # A reduction has mixed rows, so a NaN of one job may have reached another's gradient.
            # Segmented, every job's gradient comes from its own rows and weights alone.
            self.banks.clear_gradients()
            flight = self._forward(flight.plan, flight.laid, program, Route.segmented)
            self._backward(flight)
        self._collect(flight)
        seconds = flight.seconds + time.perf_counter() - began
        yield Passed(flight.plan, PassTime(flight.laid.microbatch.rows, seconds, training=True))

    def _backward(self, flight: _Flight) -> None:
        torch.stack(flight.losses).sum().backward()

    def _finite(self, flight: _Flight) -> bool:
        return bool(torch.stack(flight.losses).isfinite().all()) and self.banks.gradients_are_finite()

    def _collect(self, flight: _Flight) -> None:
        """Add the microbatch's gradients and sums to those of each job's open global batch."""
        for segment, loss, hits in zip(
            flight.laid.microbatch.segments, flight.losses, flight.hits, strict=True
        ):
            training = self.aboard[segment.job]
            self.banks.add_gradients(segment.job, training.gradient)
            if training.open is None:
                training.open = OpenBatch(torch.zeros_like(loss), torch.zeros_like(hits))
            training.open.loss += loss.detach()
            training.open.hits += hits
            training.open.tokens += segment.stop - segment.start
        self.banks.clear_gradients()

    def _step(self, job: str, supervised: int) -> Iterator[Event]:
        if job in self.dead:
            return
        training = self.aboard[job]
        try:
            outcome = training.take_step(supervised)
        except NotFinite as error:
            self.kill(job)
            yield Failed(job, str(error))
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Half an optimizer step cannot be replayed.
            self.kill(job)
            yield Failed(job, f"out of memory inside its optimizer step {training.progress.step + 1}")
            return
        self.banks.write(job, training.master.detach())
        yield Stepped(job, training.progress.step, outcome)

    @torch.no_grad()
    def _look(self, laid: _Laid) -> tuple[list[float], list[int], list[int]]:
        """Per segment: summed loss, hits, supervised tokens."""
        with self.banks.bound(laid.microbatch, self.route, training=False):
            logprobs, hits = self._logprobs(laid)
        sums = torch.stack([-part_S.sum() for part_S in logprobs])
        if self.route is Route.concatenated and not bool(sums.isfinite().all()):
            with self.banks.bound(laid.microbatch, Route.segmented, training=False):
                logprobs, hits = self._logprobs(laid)
            sums = torch.stack([-part_S.sum() for part_S in logprobs])
        return sums.tolist(), torch.stack([part_S.sum() for part_S in hits]).tolist(), [len(p) for p in hits]

    def _evaluate(
        self,
        plan: MicrobatchPlan,
        fetch: Fetch,
        looks: dict[tuple[str, int], _Look],
        left: Counter[tuple[str, int]],
    ) -> Iterator[Event]:
        left.subtract((segment.job, segment.step) for segment in plan.segments)
        alive = plan.without(self.dead)
        if not alive.segments:
            return
        began = time.perf_counter()
        microbatch = fetch(alive, True)
        sums = self._look(self._lay(microbatch))
        yield Passed(alive, PassTime(microbatch.rows, time.perf_counter() - began, training=False))
        for segment, loss, hits, tokens in zip(microbatch.segments, *sums, strict=True):
            if segment.job in self.dead:
                continue
            key = (segment.job, segment.step)
            look = looks.setdefault(key, _Look())
            look.loss, look.hits, look.tokens = look.loss + loss, look.hits + hits, look.tokens + tokens
            if not math.isfinite(loss):
                self.kill(segment.job)
                yield Failed(segment.job, f"its evaluation loss at step {segment.step} is {loss}")
            elif left[key] == 0:
                mean, accuracy = look.loss / look.tokens, look.hits / look.tokens
                yield Evaluated(segment.job, segment.step, mean, look.tokens, accuracy)


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
