"""Untrusted work in a separate process with limits on time and memory.

An untrusted chat template, regular expression or compressed file can loop or grow without end, often inside
one call of a C library, where Python can neither count nor interrupt. Signals work in the main thread only,
and memory of a thread cannot be reclaimed. So such work runs in a small process without torch, whose
processor time and memory the operating system limits. The process is started at the first call and reused; a
batch of rows is one call, so the overhead is small.

Arguments are pickled, since they are trusted. Results are JSON, which cannot execute code in the caller.

Regular expressions are first tried in that process: Python's `re` backtracks, and `(.*.*)*x` takes
practically forever on a name of thirty letters. The cost of a pattern on a name is the same every time, so it
is tried once on all the names that it will be matched against, and used without a limit if it passes.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal

from weftune import errors
from weftune.errors import Mistake, UserError

MAX_BYTES = 256 * 2**20
SECONDS = 2.0
"""Maximum processor time per call of untrusted work, in seconds. Ordinary calls take milliseconds."""
WALL_SECONDS = 60.0
"""Maximum wall time per call of untrusted work, in seconds, where processor time cannot be limited
(Windows)."""
LENGTH_BYTES = 8
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "ARROW_IO_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Environment variables that keep libraries from reserving memory for threads and allocators, which would
count towards the memory limit."""
MAX_PATTERN_LETTERS = 10_000
PATTERN_SECONDS = 0.5
"""Maximum seconds for matching a pattern against all names together. Ordinary patterns take less than a
thousandth of this time."""
REPEATS = re.compile(r"[*+?{]")
TYPICAL_NAMES = tuple(
    f"{stem}.{layer}.{part}"
    for stem in ("model.layers", "transformer.h", "model.decoder.layers")
    for layer in (0, 17)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.gate_up_proj", "attn.c_attn")
)
"""Typical module paths, on which the speed of patterns is tested if the base is not known."""

Reason = Literal["time", "memory", "crash"]


class LimitExceeded(Exception):
    """Raised if a call in the limited process exceeded a limit on time or memory, or if the process died."""

    def __init__(self, reason: Reason, seconds: float) -> None:
        self.reason = reason
        sentences = {
            "time": f"took more than {seconds:g} s of processor time",
            "memory": f"needed more than {MAX_BYTES >> 20} MiB of memory",
            "crash": "crashed",
        }
        super().__init__(sentences[reason])


def run_limited(function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> Any:
    """Run `function`, defined in a module of Weftune, in the limited process and return its result as JSON
    values. Raise LimitExceeded at a limit, or the UserError that the function raised."""
    return _shared_process().call(function, arguments, seconds)


@functools.cache
def _shared_process() -> _LimitedProcess:
    return _LimitedProcess()


class _LimitedProcess:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._owner = 0
        atexit.register(self._kill_process)

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> Any:
        payload = pickle.dumps((function.__module__, function.__qualname__, seconds, arguments))
        with self._lock:
            process = self._running_process()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                reply = _send_request(process, process.stdin, process.stdout, payload)
            except BaseException:  # interrupted: a late reply must not be taken for the next call's
                self._kill_process()
                raise
            if reply is None or reply.get("stopped"):
                self._kill_process()
                timed = {-getattr(signal, name) for name in ("SIGPROF", "SIGXCPU") if hasattr(signal, name)}
                ending: Reason = "time" if process.returncode in timed or not timed else "crash"
                raise LimitExceeded("memory" if reply else ending, seconds)
        if "mistakes" in reply:
            mistakes = [Mistake(*mistake) for mistake in reply["mistakes"]]
            raise getattr(errors, reply["error"])(mistakes)
        return reply["value"]

    def _running_process(self) -> subprocess.Popen[bytes]:
        """Return the limited process. Start one if there is none, if it has ended, or if it was started by
        the parent of a fork."""
        if self._running is None or self._owner != os.getpid() or self._running.poll() is not None:
            self._running, self._owner = start_server(__name__, SINGLE_THREADED), os.getpid()
        return self._running

    def _kill_process(self) -> None:
        process, self._running = self._running, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()


def _send_request(
    process: subprocess.Popen[bytes], stdin: IO[bytes], stdout: IO[bytes], payload: bytes
) -> dict[str, Any] | None:
    """Send a request to the limited process and return the reply, or None if the process died."""
    watch = None if hasattr(signal, "setitimer") else threading.Timer(WALL_SECONDS, process.kill)
    try:
        if watch is not None:
            watch.start()
        send_bytes(stdin, payload)
        reply = receive_bytes(stdout)
    except BrokenPipeError:
        reply = None
    finally:
        if watch is not None:
            watch.cancel()
    return None if reply is None else json.loads(reply)


def start_server(module: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that runs the function `serve` of a module, connected by pipes."""
    paths = [str(Path(__file__).parents[2]), *(path for path in sys.path if path)]
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}; from {module} import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | environment,
    )


def send_bytes(stream: IO[bytes], payload: bytes) -> None:
    stream.write(len(payload).to_bytes(LENGTH_BYTES, "little"))
    stream.write(payload)
    stream.flush()


def receive_bytes(stream: IO[bytes]) -> bytes | None:
    head = stream.read(LENGTH_BYTES)
    length = int.from_bytes(head, "little")
    payload = stream.read(length) if len(head) == LENGTH_BYTES else b""
    return payload if len(head) == LENGTH_BYTES and len(payload) == length else None


def serve() -> None:
    """Answer calls inside the limited process until the caller closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both, and the parent decides
    with suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (payload := receive_bytes(sys.stdin.buffer)) is not None:
        send_bytes(sys.stdout.buffer, _answer_call(payload))


def _answer_call(payload: bytes) -> bytes:
    try:
        module, name, seconds, arguments = pickle.loads(payload)
        function = getattr(import_module(module), name)
        limit_seconds(seconds)
        reply = {"value": function(*arguments)}
    except MemoryError:
        reply = {"stopped": "memory"}
    except UserError as error:
        mistakes = [(mistake.location, mistake.sentence) for mistake in error.mistakes]
        reply = {"error": type(error).__name__, "mistakes": mistakes}
    finally:
        limit_seconds(0.0)
    try:
        return json.dumps(reply).encode()
    except MemoryError:
        return b'{"stopped": "memory"}'


def limit_seconds(seconds: float) -> None:
    """Limit the further processor time of this process to `seconds` seconds, after which the operating system
    kills the process."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def suffix_expression(pattern: str) -> str:
    """Return a regular expression for module paths that end in the regular expression `pattern`, as PEFT
    matches them."""
    return rf"(.*\.)?({pattern})"


def slow_pattern_error(expressions: Iterable[str], names: Sequence[str] = TYPICAL_NAMES) -> str | None:
    """Return an error message if the regular expressions are too slow to match against `names`, or None.
    Expressions that do not compile are ignored."""
    return next(
        filter(None, (_find_pattern_error(expression, tuple(names)) for expression in expressions)), None
    )


@functools.lru_cache(maxsize=256)
def _find_pattern_error(expression: str, names: tuple[str, ...]) -> str | None:
    if len(expression) > MAX_PATTERN_LETTERS:
        return f"is a regular expression of more than {MAX_PATTERN_LETTERS:,} characters; write a shorter one"
    bare = expression.removeprefix(r"(.*\.)?")
    if len(bare) < 500 and "(?" not in bare and len(REPEATS.findall(bare)) <= 1:
        return None  # at most one repeat besides that of `suffix_expression` cannot take long
    try:
        run_limited(match_whole_names, expression, names, seconds=PATTERN_SECONDS)
    except LimitExceeded as stopped:
        return (
            f"is a regular expression that {stopped} on the names of modules; write it without repeats "
            "inside repeats, or list the endings of module paths instead"
        )
    return None


def match_whole_names(expression: str, names: Sequence[str]) -> list[bool]:
    """Return, for each name, whether the regular expression matches the whole name. Return an empty list if
    the expression does not compile."""
    try:
        compiled = re.compile(expression)
    except (re.error, RecursionError, OverflowError):
        return []
    return [compiled.fullmatch(name) is not None for name in names]
