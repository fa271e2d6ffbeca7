"""`make mutants`: changes modules in small ways and counts how many of the changes their tests find.

Each module has its tests in table.toml. Survivors that are known, because they behave like the original or
differ on a GPU only, are named with the reason in survivors.toml and counted by themselves.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.mutants import trial
from tests.mutants.make import Mutant, changes, mutants_of

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
AT_LEAST = 0.95
"""The share of mutants that tests are to find."""
ANY = "any"
"""What a named line may become where survivors.toml does not say it: the line holds a tuning number."""


@dataclass(frozen=True, slots=True)
class Target:
    """Modules and the tests that are to find their mutants."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Survivor:
    mutant: Mutant
    was: str
    becomes: str

    def __str__(self) -> str:
        gone = "\n".join(f"    - {line}" for line in self.was.splitlines())
        come = "\n".join(f"    + {line}" for line in self.becomes.splitlines())
        return f"{self.mutant.module}:{self.mutant.line} {self.mutant.operator}\n{gone}\n{come}"


@dataclass(frozen=True, slots=True)
class Counts:
    module: str
    outcomes: Counter[str]
    survivors: tuple[Survivor, ...]

    @property
    def judged(self) -> int:
        """Mutants whose survival is not explained."""
        return sum(self.outcomes[one] for one in ("found", "timed out", "survived"))

    @property
    def share(self) -> float:
        return 1 - self.outcomes["survived"] / self.judged if self.judged else 1.0


@dataclass(slots=True)
class Running:
    mutant: Mutant
    changed: str
    tree: Path
    ends: float


class Trees:
    """Copies of the tree: each process that runs tests has one in which it may change a module."""

    def __init__(self, folder: Path, count: int) -> None:
        self.paths = [folder / f"tree{number}" for number in range(count)]
        self.paths[0].mkdir()
        for entry in ROOT.iterdir():
            there = self.paths[0] / entry.name
            if entry.name in ("weftune", "tests"):
                shutil.copytree(entry, there, ignore=shutil.ignore_patterns("__pycache__"))
            elif entry.name != ".git":
                there.symlink_to(entry)
        shared = ROOT.parent / "shared"
        if shared.exists():  # real data and models, which tests look for beside the tree
            (folder / "shared").symlink_to(shared.resolve())

    def fill(self) -> None:
        """All are like the first, in which tests have run: what Python compiles comes along."""
        for path in self.paths[1:]:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(self.paths[0], path, symlinks=True)


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    table = tomllib.loads((HERE / "table.toml").read_text())
    named = tomllib.loads((HERE / "survivors.toml").read_text())["mutant"]
    # A process that has talked to a GPU cannot be forked.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    targets = list(_targets(table, options.modules))
    if options.list:
        return _list(targets)
    found = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = Trees(Path(folder), options.jobs)
        for target in targets:
            known = _watched(target, trees)
            for module in target.modules:
                counts = _measure(module, target.tests, known, trees, options, named)
                found.append(counts)
                print(_row(counts), *counts.survivors, sep="\n", flush=True)
    print()
    print(_table(found))
    return 0 if all(one.share >= AT_LEAST for one in found) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--modules", default="", help="parts of paths, e.g. plan/check,run/steps")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants of each module, at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--lines", default="", help="only mutants of these lines, e.g. 10-40,52")
    parser.add_argument("--list", action="store_true", help="only count the mutants")
    return parser.parse_args()


def _targets(table: Mapping[str, Any], parts: str) -> Iterator[Target]:
    """Those of whose path a part is asked for, or all."""
    wanted = parts.replace(",", " ").split()
    for entry in table["target"]:
        paths = [path for pattern in entry["modules"] for path in sorted(ROOT.glob(pattern))]
        assert paths, f"table.toml: there is no {entry['modules']}"
        modules = [str(path.relative_to(ROOT)) for path in paths if path.stat().st_size]
        asked = tuple(one for one in modules if not wanted or any(part in one for part in wanted))
        if asked:
            yield Target(asked, tuple(one for one in entry["tests"] if (ROOT / one).exists()))


def _numbers(ranges: str) -> Iterator[int]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _list(targets: Sequence[Target]) -> int:
    for module in (module for target in targets for module in target.modules):
        print(f"{len(mutants_of(module, (ROOT / module).read_text())):5} {module}")
    return 0


def _measure(
    module: str,
    tests: Sequence[str],
    known: trial.Known,
    trees: Trees,
    options: argparse.Namespace,
    named: Sequence[Mapping[str, str]],
) -> Counts:
    source = (ROOT / module).read_text()
    mutants = mutants_of(module, source)
    if options.lines:
        wanted = set(_numbers(options.lines))
        mutants = [one for one in mutants if one.line in wanted]
    if options.sample and options.sample < len(mutants):
        mutants = random.Random(f"{options.seed} {module}").sample(mutants, options.sample)
    mine = [one for one in named if one["module"] == module]
    accepted = {(one["was"].strip(), one.get("becomes", ANY).strip()) for one in mine}
    outcomes: Counter[str] = Counter()
    survivors = []
    for mutant, changed, outcome in _tried(mutants, source, tests, known, trees):
        survivor = Survivor(mutant, *changes(source, changed)) if outcome == "survived" else None
        if survivor and not accepted.isdisjoint((survivor.was, one) for one in (survivor.becomes, ANY)):
            outcome = "named"
        elif survivor:
            survivors.append(survivor)
        outcomes[outcome] += 1
    return Counts(module, outcomes, tuple(sorted(survivors, key=lambda one: one.mutant.line)))


def _watched(target: Target, trees: Trees) -> trial.Known:
    """The tests on the unchanged modules; those that fail are said and left out."""
    tree = trees.paths[0]
    record, output = tree.parent / "record.json", tree.parent / "output.txt"
    began = time.monotonic()
    child = trial.start(lambda: trial.watch(tree, target.modules, target.tests, record), output)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"{output.read_text()}\n{target.tests} cannot be run")
    known = trial.known_from(record, time.monotonic() - began)
    if known.failed:
        print(output.read_text(), "left out, since they fail without any change:", *known.failed, sep="\n")
    trial.preload(known.imported)
    _refuse_failing(target, known, tree, output)
    trees.fill()
    return known


def _refuse_failing(target: Target, known: trial.Known, tree: Path, output: Path) -> None:
    """Run the tests of the unchanged modules once more, as those of a mutant are run: a test that fails so
    would count every mutant as found."""
    module = target.modules[0]
    child = trial.start(lambda: trial.attempt(tree, target.tests, known, module, line=0), output)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"{output.read_text()}\n{target.tests} fail without any change when run as for a mutant")


def _tried(
    mutants: Sequence[Mutant], source: str, tests: Sequence[str], known: trial.Known, trees: Trees
) -> Iterator[tuple[Mutant, str, str]]:
    """Each mutant with its source and what came of it."""
    free: list[Path] = list(trees.paths)
    running: dict[int, Running] = {}
    left = iter(mutants)
    try:
        while True:
            while free and (mutant := next(left, None)) is not None:
                changed = mutant.source(source)
                if changed is None or changed == source:
                    continue
                tree = free.pop()
                _put(tree / mutant.module, changed)
                child = trial.start(partial(trial.attempt, tree, tests, known, mutant.module, mutant.line))
                running[child] = Running(mutant, changed, tree, time.monotonic() + 20 + 3 * known.seconds)
            if not running:
                return
            time.sleep(0.02)
            for child, one in list(running.items()):
                outcome = _outcome(child, one.ends)
                if outcome is not None:
                    del running[child]
                    _put(one.tree / one.mutant.module, source)
                    free.append(one.tree)
                    yield one.mutant, one.changed, outcome
    finally:
        for child in running:
            _kill(child)


def _outcome(child: int, ends: float) -> str | None:
    """What came of a process, or None while it runs."""
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        _kill(child)
        return "survived" if status == 0 else "found"
    if time.monotonic() < ends:
        return None
    _kill(child)
    os.waitpid(child, 0)
    return "timed out"


def _kill(child: int) -> None:
    """With all that it started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def _put(path: Path, source: str) -> None:
    """Write a module, and drop what Python compiled of it: the clock of files is too coarse to tell."""
    path.write_text(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


COLUMNS = ("found", "timed out", "survived", "named")


def _row(counts: Counts) -> str:
    cells = " | ".join(str(counts.outcomes[column]) for column in COLUMNS)
    return f"| {counts.module} | {counts.judged} | {cells} | {counts.share:.1%} |"


def _table(found: Sequence[Counts]) -> str:
    total: Counter[str] = sum((one.outcomes for one in found), Counter())
    rows = [_row(one) for one in (*found, Counts("all", total, ()))]
    return "\n".join(
        [f"| module | mutants | {' | '.join(COLUMNS)} | share |", "|---|---|---|---|---|---|---|", *rows]
    )


if __name__ == "__main__":
    sys.exit(main())
