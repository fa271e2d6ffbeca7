"""The network interface that reaches the other workers of a pipeline, for the libraries that must bind one.

The default of gloo and NCCL is the interface of the machine's own name: often the loopback, although other
workers are on other machines, or a public one, although all are on this machine.
"""

from __future__ import annotations

import os
import socket

import psutil

from weftune.run.workers.groups import WorkerPlace

LIBRARIES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables with each library's interface; a value set by the user is kept."""


def bind_interface(place: WorkerPlace) -> None:
    """Set the interface that reaches the other workers for the libraries. If all are on this machine, gloo
    listens on the loopback only; NCCL needs no network then."""
    alone = place.local_workers == place.workers
    found = loopback() if alone else interface_towards(os.environ["MASTER_ADDR"])
    if found is not None:
        for name in LIBRARIES[:1] if alone else LIBRARIES:
            os.environ.setdefault(name, found)


def loopback() -> str | None:
    return next((name for name, addresses in _addresses().items() if any(map(_is_loopback, addresses))), None)


def interface_towards(host: str) -> str | None:
    """Return the interface through which `host` is reached; on the host itself, the one that has its address.

    None if that is not known: `host` is unknown, or is the loopback and there are several others.
    """
    own = _address_towards(host)
    held = _addresses()
    outward = [name for name, addresses in held.items() if not all(map(_is_loopback, addresses))]
    if own is None or _is_loopback(own):
        # The machine's own name is its loopback address; others may know it by another address.
        return outward[0] if len(outward) == 1 else None
    return next((name for name in outward if own in held[name]), None)


def _addresses() -> dict[str, set[str]]:
    """Return a map from each interface to its addresses."""
    return {
        name: {address.address for address in addresses if address.family is socket.AF_INET}
        for name, addresses in psutil.net_if_addrs().items()
    }


def _address_towards(host: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: connecting a datagram socket only determines its own address.
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
