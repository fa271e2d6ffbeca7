"""The engine of a run: the base loaded as its layout says, in this process or in several, and what the loop
needs to plan with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from weftune.base.host.streamed import load_streamed
from weftune.base.load import load_base
from weftune.base.model import Base
from weftune.core.clock import Phase, phase
from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import SPARE
from weftune.plan.cost.prior import arithmetic
from weftune.plan.cost.time import CostModel, JobShapes
from weftune.plan.layout.choose import Choice, choose
from weftune.plan.program.program import Program
from weftune.plan.window.window import Pacing
from weftune.run.assemble import resident_executor, streamed_executor
from weftune.run.executor import Executor
from weftune.run.measure.memory import limit_bytes
from weftune.run.workers.driver import Driver, open_pipeline
from weftune.run.workers.messages import Staff
from weftune.trainer.machine import Setup, machine_here, short_of_memory
from weftune.trainer.watchers import StreamWatcher, TimelineWatcher, Watcher, WorkerStreamWatcher

Price = Callable[[Program], float | None]
"""Function that predicts the seconds of a window."""


@dataclass(frozen=True, slots=True)
class Engine:
    executor: Executor | Driver
    choice: Choice
    known: CostModel
    """The time model before anything has been measured."""
    watchers: tuple[Watcher, ...] = ()
    """Observers of windows that add notes at the end of the run."""
    pacing: Callable[[], Pacing | None] = lambda: None
    """Measured speeds of a pipeline's stages."""
    price: Callable[[JobShapes], Price | None] = lambda shapes: None
    """Function that maps the attached jobs to a predictor of windows, used instead of the learned model if
    several workers share a window; None otherwise."""
    other_peaks: Callable[[], Sequence[int]] = tuple
    """Peak bytes in use on other workers."""
    deterministic: bool = False
    """Whether the planning of windows depends on nothing that the run measures."""

    @property
    def base(self) -> Base:
        return self.executor.base


@phase(Phase.LOADING)
def open_engine(setup: Setup, jobs: Sequence[JobShape], note: Callable[[str], None]) -> Engine:
    """Load the base as the choice for these jobs says; `note` is called with sentences about it."""
    # Chosen before the base is loaded: the machine counts what the process holds without it.
    choice = choose(setup.shape, jobs, machine_here(setup))
    for sentence in (choice.note, short_of_memory(setup)):
        if sentence:
            note(sentence)
    if setup.staff is not None:
        engine = _of_workers(setup, setup.staff, choice)
    else:
        engine = (_streamed if choice.streamed else _whole)(setup, choice)
    return replace(engine, deterministic=setup.deterministic)


def _whole(setup: Setup, choice: Choice) -> Engine:
    limit_bytes(setup.device, setup.gpu_memory)
    base = setup.base or load_base(setup.spec, setup.device)
    executor = resident_executor(base, part=choice.layout.on(0), at_once=False)
    return Engine(executor, choice, choice.cost or arithmetic(executor.base.shape))


def _streamed(setup: Setup, choice: Choice) -> Engine:
    limit_bytes(setup.device, setup.gpu_memory)
    executor = streamed_executor(load_streamed(setup.spec, setup.device, choice.layout, choice.mapped))
    known = choice.cost or arithmetic(executor.base.shape)
    return Engine(executor, choice, known, (StreamWatcher(executor, choice),))


def _of_workers(setup: Setup, staff: Staff, choice: Choice) -> Engine:
    most = choice.place.budget if choice.place else setup.gpu_memory and setup.gpu_memory // setup.sharing
    layout, checkpoints = choice.layout, setup.checkpoints
    driver = open_pipeline(
        staff, setup.spec, setup.device, layout, checkpoints, most=most, deterministic=setup.deterministic
    )
    driver.paces.loads = choice.loads
    paces = driver.paces.guesses if setup.deterministic else driver.paces.stages
    watchers: tuple[Watcher, ...] = (TimelineWatcher(driver),)
    if choice.streamed:
        watchers = (*watchers, WorkerStreamWatcher(driver, choice))
    return Engine(
        driver,
        choice,
        # Layers of a worker whose stages take turns are no base of their own: their numbers have gaps.
        arithmetic(choice.memory.shape if choice.streamed else driver.base.shape),
        watchers,
        pacing=lambda: Pacing(paces(), spare=SPARE) if layout.pipelined else None,
        price=partial(_price, driver, choice),
        other_peaks=lambda: driver.peaks,
    )


def _price(driver: Driver, choice: Choice, shapes: JobShapes) -> Price:
    """Return a predictor from the stages' measured passes; before there are any, from the profile."""

    def price(program: Program) -> float | None:
        if driver.paces.measured:
            return driver.paces.predicted_seconds(program)
        return choice.seconds_of(program, shapes)

    return price
