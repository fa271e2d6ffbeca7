"""The expected saving of halving: the samples of all rungs over those of all trials to their end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weftune.jobs.sweeps.draws import combinations, generations
from weftune.jobs.sweeps.rungs import quota, rung_steps
from weftune.jobs.sweeps.spec import Halving, SweepSpec


@dataclass(frozen=True, slots=True)
class TrialWork:
    """A trial's training: its steps, and its samples, tokens or seconds per step."""

    steps: int
    per_step: float


@dataclass(frozen=True, slots=True)
class Saving:
    rungs: tuple[int, ...]
    """Number of trials that begin each rung."""
    whole: float
    """Work of all trials if each is trained to its end."""
    expected: float
    """Work of the trials that halving is expected to train."""

    @property
    def share(self) -> float:
        return self.expected / self.whole


def trial_count(spec: SweepSpec) -> int:
    """Return the number of all trials of a sweep, including those of later generations."""
    return int(combinations(spec.over)) if spec.trials is None else spec.trials


def rung_counts(spec: SweepSpec) -> tuple[int, ...]:
    """Return the number of trials that begin each rung; every generation of `tpe` is halved by itself."""
    count = trial_count(spec)
    groups = generations(count) if spec.search == "tpe" else [count]
    return tuple(map(sum, zip(*(_counts(group, spec.halving) for group in groups), strict=True)))


def _counts(trials: int, halving: Halving | None) -> list[int]:
    counts = [trials]
    for _ in halving.at if halving else ():
        counts.append(quota(halving.keep if halving else 1.0, counts[-1]))
    return counts


def expected_saving(spec: SweepSpec, works: Sequence[TrialWork]) -> Saving:
    """Return the expected saving. Trials that leave are assumed to be like the mean of all; `works` may be
    only some of them."""
    counts = rung_counts(spec)
    scale = counts[0] / len(works)
    spans = [
        sum(parts) * scale for parts in zip(*(_spans(work, spec.halving) for work in works), strict=True)
    ]
    expected = sum(span * count / counts[0] for span, count in zip(spans, counts, strict=True))
    return Saving(counts, sum(spans), expected)


def _spans(work: TrialWork, halving: Halving | None) -> Iterable[float]:
    """Return the work from each rung to the next."""
    ends = [*rung_steps(halving, work.steps), work.steps]
    starts = [0, *ends[:-1]]
    return [(end - start) * work.per_step for start, end in zip(starts, ends, strict=True)]
