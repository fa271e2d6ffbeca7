"""Runs one rank's list of a Program: the passes of its stage, and what it exchanges with its neighbours.

Passes are named by microbatch and stage, since `rank_executor.py` has several stages on a rank.

It decides nothing but, on the first rank, whether a job's sums allow its step; the others take its word.

Shapes: T rows of a microbatch, D hidden width, N numbers that replicas exchange for one job.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weftune.base.model import Base
from weftune.core.batch import Microbatch, Segment
from weftune.ops.lora.routes import Route
from weftune.plan.program.program import (
    Action,
    Backward,
    Evaluate,
    Forward,
    GlobalBatch,
    Program,
    Recv,
    Reduce,
    Save,
    Send,
    Step,
)
from weftune.run.events import Failed, SaveDue, Stepped
from weftune.run.measure.memory import is_out_of_memory
from weftune.run.measure.timers import Clock, Moment
from weftune.run.passes.adapted import Woven
from weftune.run.passes.plain import Plain
from weftune.run.passes.rows import lay
from weftune.run.passes.scorer import Scores
from weftune.run.training.steps import (
    Due,
    Sums,
    batch_sums,
    batch_totals,
    close_batch,
    make_updates,
    why_no_step,
)
from weftune.run.workers.replicas import BEHIND
from weftune.run.workers.transport import Transport

RankEvent = Stepped | Failed | SaveDue


class RankFull(RuntimeError):
    """A pass did not fit. The other ranks are in the middle of theirs, so that the run cannot go on."""


DEAD = math.nan
"""The word on the step of a job that makes none from here on."""


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action, and when it ran on its rank's device, in seconds of the machine's clock; a Reduce or a Step
    begins when it has what it waits for."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class LookSums:
    """What one job's evaluation after `step` came to."""

    job: str
    step: int
    loss: float
    hits: int
    tokens: int

    def __add__(self, other: LookSums) -> LookSums:
        loss, hits, tokens = self.loss + other.loss, self.hits + other.hits, self.tokens + other.tokens
        return LookSums(self.job, self.step, loss, hits, tokens)


@dataclass(slots=True)
class RankReport:
    """What only this rank knows when its list of a window is through."""

    looks: list[LookSums] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Jobs that broke here after the first rank had given its word, with the reason."""
    times: list[TimedAction] = field(default_factory=list)
    copied_bytes: int = 0
    """That came from the host since the rank began, where stages take turns."""
    waited: float = 0.0
    """Seconds that its device waited for them."""


@dataclass(slots=True)
class _Flight:
    """A microbatch between its Forward and its Backward on this stage."""

    passed: Plain
    scores: Scores | None = None
    """Behind the last stage."""


class StageExecutor(Woven):
    def __init__(self, base: Base, transport: Transport, rank: int, route: Route | None = None) -> None:
        super().__init__(base, route, graphs=False)
        self.transport = transport
        self.rank = rank
        self.report = RankReport()
        self._program: Program | None = None
        self._batches: dict[tuple[str, int], tuple[int, GlobalBatch]] = {}
        self._microbatches: Mapping[int, Microbatch] = {}
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._arrived: dict[tuple[int, int, str], Tensor] = {}
        """By the stage that takes it, as in the Recv."""
        self._made: dict[tuple[int, int, str], Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        """What batches came to here and beyond, on the first rank until it decides."""
        self._beyond: dict[int, Tensor] = {}
        """What batches came to on the stages after, where these ended in another order: replicas may."""
        self._words: dict[int, float] = {}
        self._clock = Clock(base.device)
        self._began: Moment = 0.0
        """When the action that runs began; what it waited for others is not counted."""
        self._zero = torch.zeros((), dtype=base.dtype, device=base.device)

    def run(self, program: Program, microbatches: Mapping[int, Microbatch]) -> Iterator[RankEvent]:
        """Run this rank's list to its end; `report` then holds what the first rank must be told."""
        self._refuse(program)
        actions = program.devices[self.rank]
        if self.layers is not None:
            self.layers.recompute = program.recompute
        self._program, self._microbatches = program, microbatches
        self._batches = {(one.job, one.step): (at, one) for at, one in enumerate(program.batches)}
        self.report = RankReport()
        sizes = {job: training.layout.size for job, training in self.aboard.items()}
        self.transport.expect(program, self.rank, sizes)
        ran: list[tuple[Action, Moment, Moment]] = []
        try:
            with self._on_stream():
                self._clock = Clock(self.base.device)
                self._begin()
                for action in actions:
                    self._began = self._clock.mark()
                    yield from self._act(action)
                    ran.append((action, self._began, self._clock.mark()))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise RankFull(f"rank {self.rank} is out of memory: {error}") from error
        told = self._clock.seconds
        self.report.times = [TimedAction(action, told(start), told(stop)) for action, start, stop in ran]
        assert not self._flights, "a microbatch is still in flight at the window's end"
        assert not self._arrived, "something arrived that nobody used"
        assert not self._beyond, "sums came for which there is no Reduce"
        assert not self._words, "a word was given that no Step took"

    def _refuse(self, program: Program) -> None:
        assert program.stages == tuple(range(program.width)), "stage s is on rank s of every replica"

    def _begin(self) -> None:
        """Have what a window begins with."""

    def _act(self, action: Action) -> Iterator[RankEvent]:
        match action:
            case Recv(number, stage, what):
                self._arrived[number, stage, what] = self.transport.receive(action)
            case Send(number, stage, what):
                self.transport.send(action, self._made.pop((number, stage, what)))
            case Forward(number, stage):
                self._forward(number, stage)
            case Backward(number, stage):
                self._backward(number, stage)
            case Evaluate(number, stage):
                self._evaluate(number, stage)
            case Reduce(job, step, "gradient"):
                self._hand_out(job, step)
            case Reduce(job, step):
                self._reduce(job, step)
            case Step(job, step):
                if self.rank == 0:
                    yield from self._decide(job, step)
                else:
                    self._obey(job, step)
            case Save(job, step):
                if job not in self.dead:
                    yield SaveDue(job, step)
            case _:
                raise AssertionError(f"a rank does not run {action}")

    # -- passes ------------------------------------------------------------------------------------------

    def _pass(self, number: int, stage: int) -> Plain:
        microbatch = self._microbatches[number]
        given_TD = None if self.base.first else self._arrived.pop((number, stage, "activation"))
        laid = lay(microbatch, microbatch.rows, self.base.device)
        return Plain(self.base, self.banks, laid, self.route, given_TD)

    def _forward(self, number: int, stage: int) -> None:
        passed = self._pass(number, stage)
        if passed.base.last:
            self._flights[number, stage] = self._end(passed)
            return
        self._made[number, stage + 1, "activation"] = self._hand_on(passed)
        self._flights[number, stage] = _Flight(passed)

    def _hand_on(self, passed: Plain) -> Tensor:
        return passed.forward()

    def _end(self, passed: Plain) -> _Flight:
        """The last stage's forward, and what it comes to."""
        leaf_TD = passed.forward().detach().requires_grad_()
        return _Flight(passed, self.scorer.score(leaf_TD, passed.laid, self._supervised))

    def _supervised(self, segment: Segment) -> int:
        return self._batches[segment.job, segment.step][1].supervised

    def _backward(self, number: int, stage: int) -> None:
        flight = self._flights.pop((number, stage))
        passed = flight.passed
        scores = flight.scores
        dh_TD = scores.gradient_TD(self.dead) if scores else self._arrived.pop((number, stage, "gradient"))
        self._go_back(passed, dh_TD)
        if not passed.base.first:
            self._made[number, stage - 1, "gradient"] = passed.dgiven_TD
        if stage == self._counting:
            for index, segment in enumerate(passed.laid.microbatch.segments):
                if segment.job not in self.dead:
                    self._collect(segment, flight, index)

    def _go_back(self, passed: Plain, dh_TD: Tensor) -> None:
        passed.backward(dh_TD)

    @property
    def _counting(self) -> int:
        """The stage here that goes back first: there what a batch comes to is counted."""
        assert self._program is not None
        return self.rank % self._program.width

    def _collect(self, segment: Segment, flight: _Flight, index: int) -> None:
        scores = flight.scores
        loss, hits = (scores.losses[index], scores.hits[index]) if scores else (self._zero, self._zero.long())
        self.aboard[segment.job].collect(segment, loss, hits)

    @torch.no_grad()
    def _evaluate(self, number: int, stage: int) -> None:
        passed = self._pass(number, stage)
        h_TD = passed.forward(training=False)
        if not passed.base.last:
            self._made[number, stage + 1, "activation"] = h_TD
            return
        sums = self.scorer.evaluate(h_TD, passed.laid)
        for segment, more in zip(passed.laid.microbatch.segments, sums, strict=True):
            told = LookSums(segment.job, segment.step, more.loss, more.hits, more.tokens)
            self.report.looks.append(told)

    # -- steps -------------------------------------------------------------------------------------------

    def _hand_out(self, job: str, step: int) -> None:
        """Tell the other replicas what this one's share of a batch came to on this stage."""
        gradient_N = self.aboard[job].gradient
        if job in self.dead:
            message_N = gradient_N.new_full((len(gradient_N) + BEHIND,), DEAD)
        else:
            message_N = torch.cat([gradient_N, batch_totals(self.aboard[job])])
        self.transport.exchange.hand_out((job, step), message_N)

    def _add_shares(self, job: str, step: int) -> None:
        """Put the sums over all replicas in the place of this one's."""
        total_N = self.transport.exchange.sum((job, step), self.rank)
        self._began = self._clock.mark()
        if job not in self.dead:
            tokens = self._batches[job, step][1].tokens
            self.aboard[job].take_batch(total_N[:-BEHIND], total_N[-2], total_N[-1], tokens)

    def _reduce(self, job: str, step: int) -> None:
        """Add this rank's part of what the batch came to, and hand it on to the first rank."""
        assert self._program is not None
        if self._program.replicas > 1:
            self._add_shares(job, step)
        if self._program.replica(self.rank) > 0:
            return
        at, _ = self._batches[job, step]
        if job in self.dead:
            sums = torch.full((3,), DEAD, dtype=torch.float64)
        else:
            (own,) = batch_sums([self.aboard[job]])
            sums = torch.tensor([own.loss, own.hits, own.norm**2], dtype=torch.float64)
        if self.rank + 1 < self._program.width:
            sums += self._sums_beyond(at)
        self._began = self._clock.mark()
        if self.rank == 0:
            self._sums[at] = sums
        else:
            self.transport.sums_to_before(torch.cat([sums.new_tensor([at]), sums]))

    def _sums_beyond(self, at: int) -> Tensor:
        while at not in self._beyond:
            number, *sums = self.transport.sums_from_next().tolist()
            self._beyond[int(number)] = torch.tensor(sums, dtype=torch.float64)
        return self._beyond.pop(at)

    def _decide(self, job: str, step: int) -> Iterator[RankEvent]:
        """On the first rank: give the word, then make the step or let the job die."""
        at, batch = self._batches[job, step]
        loss, hits, squares = self._sums.pop(at).tolist()
        if job in self.dead:
            self._give_word(at, DEAD)
            return
        training = self.aboard[job]
        sums = Sums(loss=loss, norm=math.sqrt(squares) if squares >= 0 else squares, hits=hits)
        reason = why_no_step(training, sums)
        self._give_word(at, DEAD if reason else sums.norm)
        update = training.update(sums.norm)
        reason = reason or make_updates([update])[0]
        if reason is not None:
            self.kill(job)
            yield Failed(job, reason)
            return
        outcome = close_batch(Due(training, batch.supervised), sums, update.learning_rate)
        yield Stepped(job, training.progress.step, outcome)

    def _obey(self, job: str, step: int) -> None:
        """On every other rank: make the step as the first rank's word has it."""
        at, batch = self._batches[job, step]
        while at not in self._words:
            number, norm = self.transport.word_from_before().tolist()
            self._words[int(number)] = norm
        norm = self._words.pop(at)
        self._began = self._clock.mark()
        if job in self.dead:
            return
        if math.isnan(norm):
            self.kill(job)
            return
        (reason,) = make_updates([self.aboard[job].update(norm)])
        if reason is not None:
            self.report.failures[job] = reason
            self.kill(job)
            return
        close_batch(Due(self.aboard[job], batch.supervised), Sums(0.0, norm, 0.0), 0.0)

    def _give_word(self, at: int, norm: float) -> None:
        self.transport.word_on(torch.tensor([at, norm], dtype=torch.float64))
