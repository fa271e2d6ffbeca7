"""Runs a Program whose stages take turns on one device: what came in is kept or comes back, and each stage's
forward is made again when its turn to go back comes.

Only the last stage keeps what its forward made: its backward follows at once.

Shapes: T rows of a microbatch, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter

import torch

from weftune.base.host.streamed import StreamedBase
from weftune.ops.adamw import update
from weftune.ops.lora.routes import Route
from weftune.plan.program.program import (
    Action,
    Backward,
    Evaluate,
    Evict,
    Forward,
    Load,
    MicrobatchPlan,
    Program,
    Step,
)
from weftune.run.events import Event
from weftune.run.executor import Executor, Fetch, StepsAsked, TimedPass, refuse_other_devices
from weftune.run.measure.memory import release
from weftune.run.passes.graph_pool import GraphPool, Pool
from weftune.run.passes.plain import Plain
from weftune.run.passes.rows import deal, lay
from weftune.run.passes.stage_graphs import GraphVisit, StageGraph, StageGraphs, Way
from weftune.run.stream.activations import Visitor, most_rows, rows_at_once, stage_inputs
from weftune.run.stream.adapter_steps import Make, TravelBegun, TravelSteps
from weftune.run.stream.adapters import Travel
from weftune.run.stream.in_flight import Flight, Looking
from weftune.run.stream.visits import ThereAndBack, Visits
from weftune.run.stream.weights import Streamer
from weftune.run.training.state import Training


class StreamExecutor(Executor):
    def __init__(
        self,
        base: StreamedBase,
        route: Route | None = None,
        make: Make = update,
        graphs: bool = True,
        pool: Pool | None = None,
    ) -> None:
        """`make` makes the updates of adapters that travel. Passes are captured where they can be; with a
        `pool`, in it."""
        super().__init__(base.whole, route, graphs=False)
        self.streamed = base
        base.refuse_copies()
        # Loading and weaving leave holes behind; what stays must not settle in them.
        release(base.whole.device)
        self.travel = (
            Travel(base.part, base.whole.device, base.whole.dtype) if base.part.layout.travels else None
        )
        self.steps = TravelSteps(self.travel, make) if self.travel else None
        self.streamer = Streamer(base, self._come, self._go)
        self._returning: int | None = None
        """The stage that a round was last at on its way back, while it is in its place."""
        self._begun: TravelBegun | None = None
        self._waits = Visits(base.whole.device)
        """What the Steps that were last begun kept the arithmetic waiting."""
        self.inputs = stage_inputs(base, lambda: self.streamer.waited)
        if pool is None and graphs and self.layers is not None and self.layers.capturable:
            pool = GraphPool(base.whole.device)
        self.graphs = None if pool is None else StageGraphs(base, self.banks, pool)
        self._in_flight: dict[int, Flight] = {}
        self._looking: dict[int, Looking] = {}

    @property
    def captures(self) -> int | None:
        return None if self.graphs is None else self.graphs.captures

    def unweave(self) -> None:
        if self.graphs is not None:
            self.graphs.clear()
        super().unweave()

    # -- jobs --------------------------------------------------------------------------------------------

    @property
    def home(self) -> torch.device:
        return torch.device("cpu") if self.travel else self.base.device

    def attach(self, training: Training) -> None:
        if self.steps is None:
            super().attach(training)
            return
        with self._on_stream():
            traveller = self.steps.travel.board(training)
            self.steps.fit(training.job)
            state = training.state
            self.banks.attach(
                training.member, training.layout, state.weights, state.gradient, *traveller.parameters()
            )
        self.aboard[training.job] = training

    def detach(self, job: str) -> Training:
        self._make_all()
        training = super().detach(job)
        if self.travel is not None:
            self.travel.leave(job)
        return training

    def kill(self, job: str) -> None:
        self._make_all()
        super().kill(job)
        if self.travel is not None:
            with self._on_stream():
                self.travel.forget([job])
                self.travel.bring_weights([job])

    # -- actions -----------------------------------------------------------------------------------------

    def _refuse(self, program: Program) -> None:
        refuse_other_devices(program)
        stages = len(self.streamed.part.stages)
        assert len(program.stages) == stages, f"the plan has {len(program.stages)} stages, the base {stages}"

    def _act(self, program: Program, fetch: Fetch, stop: Callable[[], bool]) -> Iterator[Event]:
        self.streamer.settle()
        self.inputs.reserve(rows_at_once(program))
        if self.graphs is not None:
            self.graphs.reserve(most_rows(program))
        yield from super()._act(program, fetch, stop)

    def _do(self, action: Action, program: Program, fetch: Fetch) -> Iterator[Event]:
        match action:
            case Load(stage):
                self.streamer.load(stage)
            case Evict(stage):
                if self.travel is not None:
                    self.travel.measure(stage)
                self.streamer.evict(stage)
                self._returning = None
            case Forward(number, stage):
                self._forth(number, stage, program, fetch)
            case Backward(number, stage):
                self._use(stage, program.microbatches[number])
                self._return(stage)
                yield from self._back(number, stage)
            case Evaluate(number, stage):
                # A look need not wait for all Steps; but whom a Step has failed has no loss.
                if self.travel is None or stage + 1 == len(self.streamed.stages):
                    yield from self._made_steps()
                yield from self._look_on(number, stage, program, fetch)
            case _:
                yield from super()._do(action, program, fetch)

    def _use(self, stage: int, plan: MicrobatchPlan) -> None:
        """From here on the device may read the stage, with the weights there of the microbatch's jobs."""
        if self.steps is not None:
            if self._begun is not None:
                self._begun.used |= not self._begun.jobs.isdisjoint(plan.jobs)
            left = self.steps.left(stage, plan.jobs)
            if left or self.steps.asked(stage, plan.jobs):
                with self._waiting():
                    self.steps.ask(left, self.streamer.writable(stage))
                    self.steps.use(self.steps.asked(stage, plan.jobs))
        self.streamer.use(stage)

    def _ask_ahead(self, stage: int, plan: MicrobatchPlan) -> None:
        """What is left of Steps of this stage and of the next comes while this one is at work: those of
        everybody, since no pass has read there since, and the microbatch's own first. The next stage has to
        wait if it is not in its place yet."""
        if self.steps is None:
            return
        jobs = dict.fromkeys((*plan.jobs, *self.aboard))
        for one in range(stage, min(stage + 2, len(self.streamed.stages))):
            left = self.steps.left(one, jobs)
            if left and self.steps.travel.there(one):
                # If the host is not ahead, the device is idle meanwhile.
                with self._waiting():
                    self.steps.ask(left, self.streamer.writable(one))

    def _return(self, stage: int) -> None:
        """A round has come to this stage on its way back. The one behind it is through: if it stays, so that
        no Evict sends its gradients, they leave now; else they would all be waited for at the Step."""
        if self.steps is not None and self._returning not in (None, stage):
            self.steps.send(self._returning)
        self._returning = stage

    def _make_all(self) -> None:
        """What is left of Steps; all of it is on the host then."""
        if self.steps is None:
            return
        with self._on_stream():
            for stage, pairs in groupby(self.steps.all_left(), key=itemgetter(1)):
                self.steps.ask(list(pairs), self.streamer.writable(stage))
        self.steps.wait()

    def _come(self, stage: int) -> None:
        """What comes beside a stage."""
        if self.steps is not None:
            self.steps.wait_here(stage)
            self.steps.travel.come(stage, self.steps.unfinished)

    def _go(self, stage: int) -> None:
        if self.travel is not None:
            self.travel.go(stage)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """For Steps: the arithmetic has nothing else to do meanwhile."""
        self._waits.begin()
        with self.streamer.waiting():
            yield
        self._waits.mark()

    def _inside_a_step(self) -> bool:
        """A round that has begun is ended: stages are where the plan wants them only then."""
        return bool(self._in_flight or self._looking) or super()._inside_a_step()

    def _abandon(self) -> None:
        super()._abandon()
        self._in_flight.clear()
        self._looking.clear()
        self.inputs.forget()
        if self.graphs is not None:
            self.graphs.clear()
        self._returning = None
        if self.steps is not None:
            self.steps.wait_sent()
            self.steps.travel.forget(self.aboard)

    # -- training ----------------------------------------------------------------------------------------

    def _forth(self, number: int, stage: int, program: Program, fetch: Fetch) -> None:
        self._returning = None
        if stage == 0:
            if self.graphs is not None and not self._in_flight:
                self.graphs.begin_round()
            plan = program.microbatches[number].without(self.dead)
            if plan.segments:
                laid = lay(fetch(plan, False), plan.rows, self.base.device)
                dealt = deal(self.base, self.banks, laid, self.route)
                visits = ThereAndBack(Visits(self.base.device), Visits(self.base.device))
                self._in_flight[number] = Flight(plan, laid, dealt, visits)
        # Not before: what is laid out here is laid out while what the first part of Steps needs comes.
        self._use(stage, program.microbatches[number])
        if (flight := self._in_flight.get(number)) is not None:
            self._go_forth(flight, Visitor(number, stage), program)
        # Behind the pass, so that the device has work while the host asks.
        self._ask_ahead(stage, program.microbatches[number])

    def _go_forth(self, flight: Flight, visitor: Visitor, program: Program) -> None:
        last = visitor.stage + 1 == len(self.streamed.stages)
        passed = self._pass(flight, visitor, Way.turn if last else Way.forth)
        flight.visits.forward.begin()
        if last:
            self._end(flight, passed, program)
            flight.visits.forward.mark()
            return
        h_TD = passed.forth()
        flight.visits.forward.mark()
        self.inputs.give(Visitor(visitor.microbatch, visitor.stage + 1), h_TD)
        if visitor.stage > 0:
            self.inputs.passed(visitor)

    def _pass(self, flight: Flight, visitor: Visitor, way: Way) -> Plain | StageGraph:
        given_TD = self.inputs.read(visitor).detach() if visitor.stage else None
        if self.graphs is not None:
            served = self.graphs.serve(GraphVisit(way, visitor.stage), flight.laid)
            flight.settled &= served.settled
            if served.graph is not None:
                return served.graph.open(flight.laid, flight.dealt, given_TD)
        base = self.streamed.stages[visitor.stage]
        return Plain(base, self.banks, flight.laid, self.route, given_TD, flight.dealt)

    def _end(self, flight: Flight, passed: Plain | StageGraph, program: Program) -> None:
        """The last stage's forward, and what it comes to."""
        leaf_TD = passed.forward().detach().requires_grad_()
        flight.last, flight.scores = passed, self.scorer.score(leaf_TD, flight.laid, program.supervised)

    def _back(self, number: int, stage: int) -> Iterator[Event]:
        if (flight := self._in_flight.get(number)) is None:
            return
        if stage > 1:
            self.inputs.bring(Visitor(number, stage - 1))
        passed = flight.last or self._pass(flight, Visitor(number, stage), Way.back)
        flight.visits.backward.begin()
        if flight.last is not None:
            assert flight.scores is not None
            passed.backward(flight.scores.gradient_TD(self.dead))
            flight.last = None
        else:
            assert flight.dh_TD is not None
            passed.back(flight.dh_TD)
        if self.travel is not None:
            self.travel.note_backward(stage, flight.plan.jobs)
        flight.visits.backward.mark()
        if stage > 0:
            flight.dh_TD = passed.dgiven_TD
            self.inputs.drop(Visitor(number, stage))
            return
        del self._in_flight[number]
        yield from self._through(flight)

    def _through(self, flight: Flight) -> Iterator[Event]:
        """A microbatch has gone all the way back."""
        assert flight.scores is not None
        self._collect(flight.scores)
        self._timed.append(TimedPass(flight.plan, flight.visits, self._again("pass") and flight.settled))
        if self._stream is None:
            yield from self._passed(self._timed)
            self._timed.clear()

    def _step(self, program: Program, steps: Sequence[Step]) -> Iterator[Event]:
        """Where adapters travel, Steps are only noted: what a pass of the next round needs of them is made
        before it, beside the stage before, and what came of them is reported when that round has come to its
        own."""
        if self.steps is None:
            yield from super()._step(program, steps)
            return
        if self._begun is not None and self._begun.used:
            yield from self._made_steps()
        due = self._due(program, steps)
        if not due:
            return
        if self._asked is None or self._begun is None:
            self._begun, self._waits = TravelBegun(self.steps), Visits(self.base.device)
            self._asked = StepsAsked(self._begun, self._waits, self._again("step"), timed=[])
        self._asked.timed.extend(self._timed)
        self._timed.clear()
        with self._waiting():
            self.steps.wait_sent()
            self.steps.travel.take_gradients([one.training.job for one in due])
        self.steps.begin(self._begun, due, self.streamer.gone)

    def _made_steps(self) -> Iterator[Event]:
        if self.steps is not None and self._asked is not None:
            if self.steps.all_left():
                with self._waiting():
                    self._make_all()
            else:
                # Made beside the round's forward: the host hears of them while the device goes back, and is a
                # backward ahead of it when the next round begins.
                self.steps.wait()
            self._begun = None
        yield from super()._made_steps()

    # -- evaluation --------------------------------------------------------------------------------------

    def _look_on(self, number: int, stage: int, program: Program, fetch: Fetch) -> Iterator[Event]:
        if stage + 1 == len(self.streamed.stages):
            self._looks.begin(program.microbatches[number])
        if stage == 0:
            alive = program.microbatches[number].without(self.dead)
            if alive.segments:
                microbatch = fetch(alive, True)
                laid = lay(microbatch, microbatch.rows, self.base.device)
                dealt = deal(self.base, self.banks, laid, self.route)
                self._looking[number] = Looking(alive, laid, dealt, Visits(self.base.device))
        self._use(stage, program.microbatches[number])
        if (looking := self._looking.get(number)) is not None:
            yield from self._go_on(looking, number, stage)
        self._ask_ahead(stage, program.microbatches[number])

    def _go_on(self, looking: Looking, number: int, stage: int) -> Iterator[Event]:
        if self.graphs is not None:
            self.graphs.make_room()
        looking.visits.begin()
        base = self.streamed.stages[stage]
        passed = Plain(base, self.banks, looking.laid, self.route, looking.h_TD, looking.dealt)
        with torch.no_grad():
            h_TD = passed.forward(training=False)
        if stage + 1 < len(self.streamed.stages):
            looking.h_TD = h_TD
            looking.visits.mark()
            return
        del self._looking[number]
        yield from self._evaluated(looking.plan, looking.laid, looking.visits, h_TD)
