"""The wall time of a run, divided among its phases.

Each second belongs to the innermost open phase, so phases exclude one another and their sum is the wall time.
A clock measures the thread that started it, since the user waits for that one: concurrent work of other
threads is not counted, but waiting for them is. One exception: threads that Python did not start, such as
those in which autograd runs a backward, work while the owner waits for them, so their phases count.

Phases are entered in every layer, from kernels to the command line, so the clock is looked up by thread
instead of being passed as an argument. Without a clock, a phase does nothing.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

COMMAND_STARTED = "WEFTUNE_COMMAND_STARTED"
"""Name of the environment variable that tells subprocesses the start time of the command, in seconds since
1970."""
MAX_START_SECONDS = 3600.0
"""Maximum plausible age of a process when Weftune is imported, in seconds. A larger value means that the
clock was misread."""


class Phase(StrEnum):
    """Phases of a run, in the order in which they are reported."""

    IMPORTS = "imports"
    TOKENISING = "tokenising"
    LOADING = "loading"
    CHECKING = "checking"
    COMPILING = "compiling"
    TRYING = "trying"
    CAPTURING = "capturing"
    TRAINING = "training"
    SAVING = "saving"
    EXPORT = "export"
    REPORT = "report"
    OTHER = "other"
    """Wall time that belongs to no other phase of a run."""


@dataclass(frozen=True, slots=True)
class WallTime:
    started: float
    """Start time of the run, in seconds since 1970."""
    seconds: float
    phases: Mapping[Phase, float]
    """Maps each phase of the run to its seconds. Their sum is the wall time."""


class PhaseClock:
    def __init__(
        self, elapsed_seconds: float = 0.0, read_clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start a clock of a run's phases, `elapsed_seconds` in the past. These seconds count as `OTHER`
        until they are reassigned."""
        self.started = time.time() - elapsed_seconds
        self._now = read_clock
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._open = [Phase.OTHER]
        self._since = read_clock() - elapsed_seconds

    def enter_phase(self, phase: Phase) -> None:
        with self._lock:
            self._add_elapsed_time()
            self._open.append(phase)

    def leave_phase(self) -> None:
        with self._lock:
            self._add_elapsed_time()
            self._open.pop()

    def reassign_seconds(self, phase: Phase, seconds: float) -> None:
        """Move the last `seconds` of the open phase to `phase`, for durations that are known only
        afterwards."""
        with self._lock:
            self._add_elapsed_time()
            self._seconds[self._open[-1]] -= seconds
            self._seconds[phase] += seconds

    def read(self) -> WallTime:
        with self._lock:
            self._add_elapsed_time()
            return WallTime(self.started, sum(self._seconds.values()), dict(self._seconds))

    def _add_elapsed_time(self) -> None:
        now = self._now()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now


_CLOCKS: dict[int, PhaseClock] = {}
"""Maps the id of each thread whose wall time is measured to its clock."""


@contextmanager
def use_clock(clock: PhaseClock) -> Iterator[PhaseClock]:
    """Return a context manager that measures the phases of the current thread with `clock`."""
    owner = threading.get_ident()
    before = _CLOCKS.get(owner)
    _CLOCKS[owner] = clock
    try:
        yield clock
    finally:
        if before is None:
            del _CLOCKS[owner]
        else:
            _CLOCKS[owner] = before


def current_clock() -> PhaseClock | None:
    """Return the clock that measures the wall time of the current thread, or None."""
    own = _CLOCKS.get(threading.get_ident())
    if own is not None or not _CLOCKS:
        return own
    # With several owners it is unknown which of them waits for this thread.
    return next(iter(_CLOCKS.values())) if len(_CLOCKS) == 1 and _is_foreign_thread() else None


def _is_foreign_thread() -> bool:
    """Return whether the current thread was not started by Python."""
    return isinstance(threading.current_thread(), threading._DummyThread)


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Return a context manager or decorator that counts the enclosed wall time as this phase of the run."""
    clock = current_clock()
    if clock is None:
        yield
        return
    clock.enter_phase(name)
    try:
        yield
    finally:
        clock.leave_phase()


@contextmanager
def count_imports() -> Iterator[None]:
    """Return a context manager that counts the enclosed wall time as imports. Meanwhile garbage collection is
    off, since it would repeatedly traverse all imported definitions, and afterwards collections skip these
    definitions, which never become garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with phase(Phase.IMPORTS):
            yield
    finally:
        if collects:
            gc.freeze()
            gc.enable()


def reassign_seconds(name: Phase, seconds: float) -> None:
    """Move the last `seconds` of the run's open phase to the phase `name`, if the current thread has a
    clock."""
    clock = current_clock()
    if clock is not None:
        clock.reassign_seconds(name, seconds)


def process_clock() -> PhaseClock:
    """Return a clock that started with the command line, in which the age of this process counts as
    imports."""
    age = process_seconds()
    clock = PhaseClock(max(age, command_seconds()))
    clock.reassign_seconds(Phase.IMPORTS, age)
    return clock


def command_seconds() -> float:
    """Return the seconds since the command was started, or 0 if no command started this process."""
    try:
        return time.time() - float(os.environ[COMMAND_STARTED])
    except (KeyError, ValueError):
        return 0.0


def process_seconds() -> float:
    """Return the age of this process in seconds or, if unknown, its processor time."""
    try:
        # The name of the process, in parentheses, may hold spaces.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()
    return age if 0.0 <= age < MAX_START_SECONDS else time.process_time()
