"""Work of strangers ends at a limit of time or memory, and the next call finds a process that works."""

from __future__ import annotations

import os
import signal

import pytest

from weftune.core.limited import MAX_BYTES, LimitExceeded, run_limited
from weftune.errors import DataError, Mistake


def double(number: int) -> int:
    return 2 * number


def loop() -> None:
    while True:
        pass


def loop_in_c() -> None:
    pow(3, 10**9)


def swell() -> None:
    kept = []
    while True:
        kept.append(bytearray(1 << 20))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def complain() -> None:
    raise DataError([Mistake("here", "is wrong"), Mistake("", "and this")])


def is_ignored() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_function_is_run_elsewhere_and_its_value_comes_back() -> None:
    assert run_limited(double, 4) == 8
    assert run_limited(os.getpid) != os.getpid()
    assert run_limited(os.getpid) == run_limited(os.getpid)


def test_a_mistake_comes_back_as_it_was_raised() -> None:
    with pytest.raises(DataError) as caught:
        run_limited(complain)
    assert caught.value.mistakes == (Mistake("here", "is wrong"), Mistake("", "and this"))


@pytest.mark.parametrize(
    ("work", "reason", "seconds"),
    [(loop, "time", 0.2), (loop_in_c, "time", 0.2), (swell, "memory", 10.0), (die, "crash", 0.2)],
)
def test_work_without_end_is_stopped_and_the_next_call_works(
    work: object, reason: str, seconds: float
) -> None:
    with pytest.raises(LimitExceeded) as caught:
        run_limited(work, seconds=seconds)  # type: ignore[arg-type]
    assert caught.value.reason == reason
    assert run_limited(double, 1) == 2


def test_what_is_too_large_to_be_answered_is_stopped_too() -> None:
    with pytest.raises(LimitExceeded, match=f"more than {MAX_BYTES >> 20} MiB"):
        run_limited(double, "x" * (MAX_BYTES // 4))


def test_an_interrupt_is_left_to_whoever_asked() -> None:
    assert run_limited(is_ignored) is True


def test_a_fork_has_a_process_of_its_own() -> None:
    asked = run_limited(os.getpid)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(run_limited(os.getpid)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reader, 99)) != asked
    assert run_limited(os.getpid) == asked
