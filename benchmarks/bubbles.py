"""What was found of a pipeline's bubbles, case by case: as a table, and beside the bars that it must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from weftune.bench.table import aligned

POINTS = 0.05
"""How far measured bubbles may be from what was foreseen."""
IDLE = 0.06
"""The most bubbles, where there are jobs enough to fill every wait."""
ENOUGH = 4
"""Jobs."""


@dataclass(frozen=True, slots=True)
class Found:
    """A case: what each worker takes for a microbatch, the shares of the steady time in which it waits, and
    what the whole windows came to."""

    name: str
    jobs: int
    passes: tuple[float, ...]
    """Seconds of a forward and a backward together."""
    measured: tuple[float, ...]
    predicted: tuple[float, ...]
    even: tuple[float, ...]
    """As predicted if every pass took what its stage takes on average."""
    spread: tuple[float, ...]
    """By how much the passes of each worker differ from that: a standard deviation, as a share."""
    tokens_per_second: float
    predicted_seconds: float
    seconds: float
    seam_seconds: float = 0.0
    """Mean seconds from the last action of a window to the first one of the next, where windows hand over."""

    @property
    def bubbles(self) -> float:
        """Of all workers together."""
        return mean(self.measured)

    @property
    def off(self) -> float:
        """Measured over foreseen, for all workers together."""
        return self.bubbles - mean(self.predicted)

    @property
    def worker_off(self) -> float:
        """How far the worker is that is furthest from what was foreseen of it."""
        return max(abs(one - other) for one, other in zip(self.measured, self.predicted, strict=True))


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that every case must keep, and the case that is nearest to breaking it, or furthest over."""

    about: str
    most: float
    found: float
    case: str

    @property
    def kept(self) -> bool:
        return self.found <= self.most

    def told(self) -> str:
        word = "kept" if self.kept else "not kept"
        return f"{self.about}, {100 * self.most:.0f} at most: {100 * self.found:.1f} ({self.case}); {word}."


def bars(found: Sequence[Found]) -> list[Bar]:
    """A pipeline's bubbles are those of all its workers; beside them, what its worst worker comes to."""
    filled = [one for one in found if one.jobs >= ENOUGH]
    off = max(found, key=lambda one: abs(one.off))
    furthest = max(found, key=lambda one: one.worker_off)
    kept = [
        Bar("Points between measured and predicted, all workers together", POINTS, abs(off.off), off.name),
        Bar("Points between measured and predicted, any worker", POINTS, furthest.worker_off, furthest.name),
    ]
    if filled:
        idle = max(filled, key=lambda one: one.bubbles)
        idlest = max(filled, key=lambda one: max(one.measured))
        kept += [
            Bar(f"Percent idle from {ENOUGH} jobs on, all workers together", IDLE, idle.bubbles, idle.name),
            Bar(f"Percent idle from {ENOUGH} jobs on, any worker", IDLE, max(idlest.measured), idlest.name),
        ]
    return kept


def told(found: Sequence[Found]) -> str:
    """The table of all cases, what they are beside the first, and whether the bars are kept."""
    first = found[0].tokens_per_second
    ratios = [
        f"{one.name}: {one.tokens_per_second / first:.2f} × the tokens per second of 1F1B job by job"
        for one in found[1:]
    ]
    seams = [f"{one.name}: {one.seam_seconds:.3f} s between two windows" for one in found if one.seam_seconds]
    return "\n".join([table(found), "", *ratios, *seams, "", *(bar.told() for bar in bars(found))])


def table(found: Sequence[Found]) -> str:
    """Every case over its workers."""
    titles = ["case", "worker", "ms a microbatch", "± %", "bubbles", "predicted", "if even"]
    titles += ["tokens/s", "seconds", "predicted"]
    rows = []
    for one in found:
        whole = [f"{one.tokens_per_second:.0f}", f"{one.seconds:.2f}", f"{one.predicted_seconds:.2f}"]
        columns = (one.passes, one.spread, one.measured, one.predicted, one.even)
        rows.append([one.name, "all", *_numbers([mean(column) for column in columns]), *whole])
        for worker, numbers in enumerate(zip(*columns, strict=True)):
            rows.append(["", str(worker), *_numbers(numbers), "", "", ""])
    return aligned(titles, rows)


def _numbers(numbers: Sequence[float]) -> list[str]:
    taken, spread, *shares = numbers
    # A share that was rounded to just below nothing would be told as −0.
    return [f"{1e3 * taken:.1f}", f"{100 * spread:.0f}", *(f"{max(share, 0.0):.1%}" for share in shares)]
