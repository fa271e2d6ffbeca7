"""A process that runs tests of a copy of the tree, with one module changed or none, and says what came of it.

Processes are forked from one that has imported torch and the like, but nothing of ours.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

OURS = ("weftune", "tests", "benchmarks")
MOST_BYTES = 8 << 30
"""Memory that a process may ask for: a mutant may gather without end."""
MARKS = "not slow and not gpu and not timed"
UNREWRITTEN = "ignore::pytest.PytestAssertRewriteWarning"
"""What this process has imported before pytest is not of our tests."""


@dataclass(slots=True)
class Known:
    """What running the tests of unchanged modules told."""

    seconds: float = 0.0
    durations: dict[str, float] = field(default_factory=dict)
    """Test → its seconds."""
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Module → test → the lines of it that the test runs through."""
    imported: list[str] = field(default_factory=list)
    """Modules that are not ours."""
    failed: list[str] = field(default_factory=list)
    """Tests, and files of tests that cannot be imported: they can find nothing."""


class _Watch:
    """Notes how long each test takes and which lines of some files it runs through."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.durations: dict[str, float] = {}
        self.lines: dict[str, dict[str, set[int]]] = {path: {} for path in paths}
        self.failed: list[str] = []
        self._test = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._test = item.nodeid
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations[report.nodeid] = self.durations.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        return self._line if frame.f_code.co_filename in self.lines else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        tests = self.lines[frame.f_code.co_filename]
        tests.setdefault(self._test, set()).add(frame.f_lineno)
        return self._line


class _Order:
    """Tests that run through the changed line first, of these the quickest: most mutants end there."""

    def __init__(self, known: Known, module: str, line: int) -> None:
        self.known, self.module, self.line = known, module, line

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.known.failed]
        items.sort(key=self._place)

    def _place(self, item: pytest.Item) -> tuple[bool, float]:
        near = self.line in self.known.lines[self.module].get(item.nodeid, ())
        return not near, self.known.durations.get(item.nodeid, 0.0)


def start(work: Callable[[], int], output: Path | None = None) -> int:
    """Run `work` in a process of its own, at the head of a group of its own; its number."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        shown = os.open(output or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(shown, 1)
        os.dup2(shown, 2)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def watch(tree: Path, modules: Sequence[str], tests: Sequence[str], record: Path) -> int:
    """Run the tests of unchanged modules and write down what they told."""
    _enter(tree)
    paths = {module: str(tree / module) for module in modules}
    seen = _Watch(paths.values())
    _pytest(tree, tests, seen, ["-q", "--continue-on-collection-errors"])
    told = {
        "durations": seen.durations,
        "lines": {
            module: {test: sorted(lines) for test, lines in seen.lines[path].items()}
            for module, path in paths.items()
        },
        "imported": [name for name in sys.modules if name.partition(".")[0] not in OURS],
        "failed": seen.failed,
    }
    record.write_text(json.dumps(told))
    return 0


def attempt(tree: Path, tests: Sequence[str], known: Known, module: str, line: int) -> int:
    """Run the tests of a changed module until one fails."""
    _enter(tree)
    code = _pytest(
        tree, [one for one in tests if one not in known.failed], _Order(known, module, line), ["-x"]
    )
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code


def preload(modules: Iterable[str]) -> None:
    """Import here what every process would import for itself. Triton decides at its first import whether
    kernels can be interpreted, as tests/conftest.py says."""
    importlib.import_module("tests.conftest")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        _import_all(modules)


def _import_all(modules: Iterable[str]) -> None:
    for name in modules:
        if name.partition(".")[0] in ("__main__", "__mp_main__", "conftest", "_pytest", "pytest", "xdist"):
            continue
        try:
            importlib.import_module(name)
        except Exception:
            # Some only exist as parts of others.
            continue


def _enter(tree: Path) -> None:
    """Leave the tree that this process was started in for the copy."""
    here = os.getcwd()
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", here))]
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(tree), *(path for path in others if path not in ("", here))]
    )
    os.chdir(tree)
    importlib.invalidate_caches()


def _pytest(tree: Path, tests: Sequence[str], plugin: object, options: Sequence[str]) -> int:
    from hypothesis import Phase, settings

    # The same examples for every mutant, and none is made smaller once it fails.
    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("mutants", deadline=None, derandomize=True, database=None, phases=phases)
    keys = [
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "-W",
        UNREWRITTEN,
        "-m",
        MARKS,
        "--rootdir",
        str(tree),
        "--hypothesis-profile=mutants",
    ]
    return int(pytest.main([*options, *keys, *tests], plugins=[plugin]))


def known_from(record: Path, seconds: float) -> Known:
    read: Mapping[str, Any] = json.loads(record.read_text())
    return Known(seconds, **read)
