"""The supervisor, with members that are real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weftune.base.spec import BaseSpec
from weftune.errors import UserError
from weftune.service.processes import PIDS, Member, supervise
from weftune.service.settings import ServiceSettings

SECONDS = 60.0


def note(settings: ServiceSettings, line: str) -> None:
    with (settings.store / "notes").open("a") as file:
        file.write(f"{line}\n")


def patient(settings: ServiceSettings) -> None:
    """A member that runs until SIGTERM, and says so."""
    name = multiprocessing.current_process().name
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    note(settings, f"{name} begins")
    while not ended:
        time.sleep(0.01)
    note(settings, f"{name} ends")


def deaf(settings: ServiceSettings) -> None:
    """A member that does not end when it is told to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(settings, "deaf begins")
    time.sleep(SECONDS)


def refusing(settings: ServiceSettings) -> None:
    raise UserError("the base is missing; write another --base")


def without_torch(settings: ServiceSettings) -> None:
    note(settings, f"torch: {'torch' in sys.modules}")
    patient(settings)


def members(*functions: Callable[[ServiceSettings], None]) -> list[Member]:
    return [Member(one.__name__, f"{__name__}:{one.__name__}") for one in functions]


class Supervised:
    """A supervisor in a process of its own."""

    def __init__(self, store: Path, *functions: Callable[[ServiceSettings], None]) -> None:
        settings = ServiceSettings(base=BaseSpec(model="tiny"), store=store)
        context = multiprocessing.get_context("spawn")
        self.store = store
        self.process = context.Process(target=_supervise, args=(settings, members(*functions)))
        self.process.start()

    def notes(self) -> list[str]:
        path = self.store / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def pids(self) -> dict[str, int]:
        return json.loads((self.store / PIDS).read_text())

    def wait_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not true():
            assert time.monotonic() < deadline, self.notes()
            time.sleep(0.02)

    def end(self) -> int | None:
        self.process.join(SECONDS)
        return self.process.exitcode


def _supervise(settings: ServiceSettings, chosen: list[Member]) -> None:
    sys.exit(supervise(settings, chosen))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def start(tmp_path):
    started: list[Supervised] = []

    def begin(*functions):
        started.append(Supervised(tmp_path, *functions))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()


def test_a_member_that_is_killed_is_started_again_and_the_other_goes_on(start):
    service = start(patient, without_torch)
    service.wait_until(lambda: len(service.notes()) == 3)
    assert "torch: False" in service.notes(), "a process is not forked from one that has imported torch"
    before = service.pids()
    os.kill(before["patient"], signal.SIGKILL)
    service.wait_until(lambda: service.notes().count("patient begins") == 2)
    after = service.pids()
    assert after["patient"] != before["patient"]
    assert after["without_torch"] == before["without_torch"]
    os.kill(service.process.pid, signal.SIGTERM)
    assert service.end() == 0
    ends = [line for line in service.notes() if line.endswith("ends")]
    assert ends == ["patient ends", "without_torch ends"], "one after another, each by itself"
    assert not any(map(is_alive, after.values()))
    assert not (service.store / PIDS).exists()


def test_a_users_mistake_ends_the_service_with_its_sentence(start, capfd):
    service = start(patient, refusing)
    assert service.end() == 2
    error = capfd.readouterr().err
    assert "the base is missing; write another --base" in error
    assert "Traceback" not in error


def test_a_second_signal_kills_a_member_that_does_not_end(start):
    service = start(deaf)
    service.wait_until(lambda: service.notes() == ["deaf begins"])
    os.kill(service.process.pid, signal.SIGINT)
    time.sleep(0.5)
    assert service.process.is_alive()
    os.kill(service.process.pid, signal.SIGINT)
    service.process.join(10)
    assert service.process.exitcode == 0


def test_members_end_with_a_supervisor_that_is_killed(start):
    service = start(patient)
    service.wait_until(lambda: service.notes() == ["patient begins"])
    (pid,) = service.pids().values()
    os.kill(service.process.pid, signal.SIGKILL)
    service.wait_until(lambda: not is_alive(pid))
    assert service.notes() == ["patient begins", "patient ends"], "it was told to end and could save"
