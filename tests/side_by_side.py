"""Files of tests side by side, in forks of the one process that has collected them: `make test`.

`pytest -p tests.side_by_side --processes 3`; with `--costs 20` it prints which files and tests take most.
Imports and collection take each process of pytest-xdist half a minute in a new clone, and the server of its
forked processes as long again as the imports: here both are there. Tests with the mark `timed` come behind
all others, in two processes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, suppress
from importlib import import_module
from io import StringIO
from itertools import groupby, pairwise
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import pytest
from _pytest.config import create_terminal_writer

TIMED_PROCESSES = 2
"""Processes for tests that look at a clock: most of what they do is to wait."""
# Forks cannot use CUDA where the process that they come from has asked its driver for devices.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
MEMORY_FOLDER = "/dev/shm"
FILES_BYTES = 4 << 30
"""Free bytes of the folder in memory from which on tests write there."""
IMPORTED_LATE = (
    *("alembic.command", "alembic.config", "sqlalchemy.dialects.sqlite", "fastapi.telemetry"),
    *("uvicorn.protocols.http.auto", "uvicorn.protocols.websockets.auto", "uvicorn.loops.auto"),
    *("uvicorn.loops.asyncio", "uvicorn.lifespan.on", "weftune.service.answering", "weftune.launch.api"),
    *("openai.resources.fine_tuning.fine_tuning", "openai.resources.files", "openai.resources.chat.chat"),
    *("rich._emoji_codes", "rich.live", "rich.progress", "rich.table", "weftune.cli.plan_json"),
    *(f"weftune.adapters.{kind}.apply" for kind in ("lora", "dora", "vera", "prompt", "prefix", "pissa")),
    *(
        f"transformers.models.{family}.modeling_{family}"
        for family in ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "gpt2", "mixtral", "qwen3_moe")
    ),
)
"""Modules that forks would import one after another, each for itself."""
Files = Sequence[Sequence[pytest.Item]]


def pytest_addoption(parser):
    parser.addoption("--processes", type=int, default=0, help="run files of tests in so many forks")
    parser.addoption(
        "--costs", type=int, default=0, help="with --processes: print what the costliest files and tests took"
    )


def pytest_configure(config):
    if config.option.processes:
        write_files_to_memory()
        config.stash[DEMO] = start_demo_conversion()


def pytest_collection_finish(session):
    if (conversion := session.config.stash.get(DEMO, None)) is not None:
        conversion.wait()


def start_demo_conversion() -> subprocess.Popen[bytes]:
    """Convert the demo base in the user's cache while tests are collected, which takes one core."""
    words = [sys.executable, "-c", "from weftune.base.load import demo_folder; demo_folder()"]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def write_files_to_memory() -> None:
    """Let tests write to memory: they save thousands of small files, and would wait for the disk."""
    if "TMPDIR" in os.environ or not os.access(MEMORY_FOLDER, os.W_OK):
        return
    if shutil.disk_usage(MEMORY_FOLDER).free >= FILES_BYTES:
        os.environ["TMPDIR"] = MEMORY_FOLDER
        tempfile.tempdir = None


DEMO = pytest.StashKey[subprocess.Popen[bytes]]()
"""The process that converts the demo base."""
COSTS = pytest.StashKey[dict[str, tuple[float, float]]]()
"""Maps each test to its seconds of processors, also in processes that it started, and of the clock."""


def pytest_terminal_summary(terminalreporter, config):
    tests = config.stash.get(COSTS, {})
    if not tests:
        return
    files: dict[str, tuple[float, float]] = {}
    for test, (cpu, wall) in tests.items():
        before = files.get(file := test.partition("::")[0], (0.0, 0.0))
        files[file] = (before[0] + cpu, before[1] + wall)
    total = sum(cpu for cpu, _ in tests.values())
    terminalreporter.write_sep("=", f"costs: {total:.0f} s of processors in tests")
    for costs in (files, tests):
        for name, (cpu, wall) in sorted(costs.items(), key=lambda one: -one[1][0])[: config.option.costs]:
            terminalreporter.write_line(f"{cpu:6.1f} s of processors {wall:6.1f} s of the clock  {name}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    option = session.config.option
    if not option.processes or option.collectonly or session.testsfailed:
        return None
    with pytest.MonkeyPatch.context() as patch:
        prepare(session, patch)
        for timed in (False, True):
            items = [one for one in session.items if bool(one.get_closest_marker("timed")) is timed]
            files = [list(found) for _, found in groupby(items, key=lambda one: one.path)]
            run_files(session, files, TIMED_PROCESSES if timed else option.processes)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


def prepare(session: pytest.Session, patch: pytest.MonkeyPatch) -> None:
    """Do once what every fork, and every command that it forks, would do again: a third of a short run."""
    from typer.testing import CliRunner

    from tests.outputs import jobs_folder
    from tests.run.processes import MODULES
    from weftune.cli.main import app

    for name in MODULES:
        import_module(name)
    for name in IMPORTED_LATE:
        with suppress(ImportError):
            import_module(name)
    compile_pages_once(patch)
    build_commands_once(patch, app)
    with redirect_stderr(StringIO()):
        folder = jobs_folder(
            session.config._tmp_path_factory.mktemp("first"),
            [{"name": "a", "adapter": {}, "eval": {"fraction": 0.2}}],
        )
    # Nothing that computes: torch's threads would not survive a fork.
    shown = CliRunner().invoke(app, ["preview", str(folder / "jobs.yaml")])
    assert shown.exit_code == 0, shown.output
    gc.collect()
    gc.freeze()


def compile_pages_once(patch: pytest.MonkeyPatch) -> None:
    """Every run ends with a page, and the compilation of its template would be half of a run of one step."""
    from jinja2 import Environment, UndefinedError

    from weftune.report.template import render_template

    compile_source, compiled = Environment.compile, {}

    def compile_once(self, source, *names):
        if type(self) is not Environment:
            return compile_source(self, source, *names)
        key = (self.autoescape, self.trim_blocks, self.lstrip_blocks, source, *names)
        if key not in compiled:
            compiled[key] = compile_source(self, source, *names)
        return compiled[key]

    patch.setattr(Environment, "compile", compile_once)
    with suppress(UndefinedError):
        render_template("page.html.jinja", {}, {})


def build_commands_once(patch: pytest.MonkeyPatch, app: Any) -> None:
    """Every call of the command line builds all commands anew, a tenth of a run of a few steps."""
    import typer.main
    import typer.testing

    build, command = typer.main.get_command, typer.main.get_command(app)

    def build_once(one: typer.Typer) -> Any:
        return command if one is app else build(one)

    patch.setattr(typer.main, "get_command", build_once)
    patch.setattr(typer.testing, "_get_command", build_once)


def run_files(session: pytest.Session, files: Files, processes: int) -> None:
    """Hand out the files in their order, and report what comes back as if it had happened here."""
    context = multiprocessing.get_context("fork")
    started, running = [], {}
    for _ in range(min(processes, len(files))):
        mine, theirs = context.Pipe()
        started.append(context.Process(target=run_worker, args=(session, files, theirs)))
        started[-1].start()
        theirs.close()
        running[mine] = "before the first test"
    try:
        collect_reports(session, iter(range(len(files))), running)
    except BaseException:
        for process in started:
            process.terminate()
        raise


def collect_reports(session: pytest.Session, waiting: Iterator[int], running: dict[Connection, str]) -> None:
    """Answer the forks until all have ended; `running` maps each to the test that it began last."""
    while running:
        for connection in wait(list(running)):
            try:
                message = connection.recv()
            except EOFError:
                report(session.config, report_of_death(running.pop(connection)))
                continue
            if message is None:
                connection.send(None if session.shouldfail or session.shouldstop else next(waiting, None))
            elif message == "":
                del running[connection]
            elif isinstance(message, str):
                running[connection] = message
            elif isinstance(message, tuple):
                session.config.stash.setdefault(COSTS, {})[running[connection]] = message
            else:
                report(
                    session.config,
                    session.config.hook.pytest_report_from_serializable(config=session.config, data=message),
                )


def report(config: pytest.Config, found: pytest.TestReport) -> None:
    config.hook.pytest_runtest_logreport(report=found)
    if found.when == "teardown":
        config.hook.pytest_runtest_logfinish(nodeid=found.nodeid, location=found.location)


def report_of_death(test: str) -> pytest.TestReport:
    words = "The process of this test has died, there or behind it; the rest of its file did not run."
    return pytest.TestReport(test, (test.split("::")[0], None, test), {}, "failed", words, "call")


def run_worker(session: pytest.Session, files: Files, parent: Connection) -> None:
    """In a fork: run one file after another, and know the next one before the last test of a file ends."""
    plugins = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(ReportSender(session.config, parent), "terminalreporter")
    captured: Any = plugins.getplugin("capturemanager")
    # Or all forks would write to the same file.
    captured.stop_global_capturing()
    captured.start_global_capturing()
    start_server()

    def ask() -> int | None:
        parent.send(None)
        return parent.recv()

    costs = bool(session.config.option.costs)
    # One test ends where the next one begins, since to look takes as long as many a test.
    began = (processor_seconds(), time.monotonic()) if costs else (0.0, 0.0)

    def run(item: pytest.Item, following: pytest.Item | None) -> None:
        nonlocal began
        parent.send(item.nodeid)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if costs:
            ended = (processor_seconds(), time.monotonic())
            parent.send((ended[0] - began[0], ended[1] - began[1]))
            began = ended

    number = ask()
    while number is not None:
        items = files[number]
        for item, following in pairwise(items):
            run(item, following)
        number = ask()
        run(items[-1], None if number is None else files[number][0])
    parent.send("")


def processor_seconds() -> float:
    """Return the processor seconds of this process and of all that it has started, and those have."""
    me, seconds = psutil.Process(), 0.0
    for one in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            # Those of its own, and of its children that have ended.
            seconds += sum(one.cpu_times()[:4])
    return seconds


def start_server() -> None:
    """Fork the server of forked processes, which the tests' own fixtures would start with all its imports."""
    from tests.forks import fork_server

    fork_server()


class ReportSender:
    """In the place of the reporter that prints: sends reports to the process that has it."""

    def __init__(self, config: pytest.Config, parent: Connection) -> None:
        self.config, self.parent = config, parent
        # What pytest-timeout prints of the threads of a test that hangs goes to what the test has printed.
        self._tw = create_terminal_writer(config, sys.__stderr__)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        made = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.parent.send(made)
