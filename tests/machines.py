"""Two machines on one: network namespaces that see each other through a virtual cable, which can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
ADDRESSES = ("10.213.77.1", "10.213.77.2")


class Machines:
    def __init__(self) -> None:
        self.names = tuple(f"weftune{os.getpid()}-{number}" for number in range(2))
        self.ports = tuple(f"wv{os.getpid()}-{number}" for number in range(2))
        self._agents: list[subprocess.Popen[bytes]] = []

    def lay(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        cable = ["type", "veth", "peer", "name", self.ports[1], "netns", self.names[1]]
        ip("link", "add", self.ports[0], "netns", self.names[0], *cable)
        for name, port, address in zip(self.names, self.ports, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", port)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", port, "up")

    def remove(self) -> None:
        for agent in self._agents:
            agent.kill()
            agent.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def link(self, state: str) -> None:
        ip("-n", self.names[1], "link", "set", self.ports[1], state)

    def torchrun(self, folder: Path, *words: str) -> list[subprocess.Popen[bytes]]:
        """`torchrun … -m weftune WORDS` on both, as docs/guide.md has it; logs are `machine-N.log`."""
        found = []
        for number, (name, address) in enumerate(zip(self.names, ADDRESSES, strict=True)):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400"]
            command += ["--rdzv-conf", f"is_host={1 - number}", "--local-addr", address]
            environment = os.environ | {
                "PYTHONPATH": str(REPOSITORY),
                "OMP_NUM_THREADS": "1",
                "WEFTUNE_SECRET": "of this test",
            }
            with open(folder / f"machine-{number}.log", "wb") as log:
                command += ["-m", "weftune", *words]
                agent = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
            found.append(agent)
        self._agents += found
        return found

    def workers(self) -> list[int]:
        """The processes of either machine beside its torchrun."""
        agents = {agent.pid for agent in self._agents}
        texts = [ip("netns", "pids", name) for name in self.names]
        return [pid for text in texts for pid in map(int, text.split()) if pid not in agents]


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def two_machines() -> Iterator[Machines]:
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and the ip command")
    machines = Machines()
    try:
        try:
            machines.lay()
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield machines
    finally:
        machines.remove()
