"""The process groups of a pipeline: between neighbours one for each direction and purpose, and between the
first rank and every other one for commands and one for reports."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import UserError
from weft.run.transport import Lane, Lanes

FOREVER = timedelta(days=30)
"""Nobody is given up for being slow: who is gone is found by the heartbeat."""


PATIENCE = timedelta(minutes=5)
"""How long a rank waits for the store to be there, or for another rank to come."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which process of a pipeline this is."""

    rank: int
    ranks: int
    local_rank: int = 0
    """Among the ranks of this machine."""
    local_ranks: int = 1


def place_here() -> Place | None:
    """What torchrun, or our own launcher, says in the environment; None where this is the only process."""
    ranks = _number("WORLD_SIZE", 1)
    if ranks == 1 or "RANK" not in os.environ:
        return None
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(
            f"The environment says rank {os.environ['RANK']} of {ranks}, but not {missing[0]}; start the "
            "ranks with torchrun or --pipeline, or unset RANK and WORLD_SIZE to train in one process"
        )
    return Place(_number("RANK", 0), ranks, _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1))


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, str(otherwise))
    if not text.isdecimal():
        raise UserError(f"The environment variable {name} is {text!r}; torchrun sets it to a number")
    return int(text)


def attempt() -> int:
    """How often torchrun has started all ranks again; our own launcher says so with the command line."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@dataclass(frozen=True, slots=True)
class Wires:
    place: Place
    lanes: Lanes
    commands: Mapping[int, Any]
    """Rank → the group in which the first rank commands it."""
    reports: Mapping[int, Any]
    """Rank → the group in which it reports to the first rank."""


def connect(place: Place, device: torch.device) -> Wires:
    """Meet the other ranks at the address in the environment, and lay all wires."""
    # Not by `env://`: torchrun may keep its store over a restart, with addresses of ranks that are gone.
    store = dist.PrefixStore(f"weft/meet/{attempt()}", store_here(place))
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.ranks, timeout=FOREVER)
    return lay_wires(place, device)


def store_here(place: Place) -> dist.TCPStore:
    """A connection to the store at the address in the environment, the launcher's or the first rank's own.
    Everybody who may wait in it needs one for itself."""
    launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=place.rank == 0 and not launchers,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=PATIENCE,
    )


def lay_wires(place: Place, device: torch.device) -> Wires:
    """Every rank makes every group, in the same order, as torch wants it."""
    backend = "nccl" if own_gpus(place, device) else "gloo"
    pairs = [(k, k + 1) for k in range(place.ranks - 1)]
    activation = [_group(pair, backend) for pair in pairs]
    gradient = [_group(pair, backend) for pair in pairs]
    sums, words = ([_group(pair, "gloo") for pair in pairs] for _ in range(2))
    others = range(1, place.ranks)
    commands = {rank: _group((0, rank), "gloo") for rank in others}
    reports = {rank: _group((0, rank), "gloo") for rank in others}

    def after(groups: list[Any]) -> Lane | None:
        return Lane(groups[place.rank], place.rank + 1) if place.rank + 1 < place.ranks else None

    def before(groups: list[Any]) -> Lane | None:
        return Lane(groups[place.rank - 1], place.rank - 1) if place.rank > 0 else None

    lanes = Lanes(
        activation_in=before(activation),
        activation_out=after(activation),
        gradient_in=after(gradient),
        gradient_out=before(gradient),
        sums_in=after(sums),
        sums_out=before(sums),
        word_in=before(words),
        word_out=after(words),
    )
    return Wires(place, lanes, commands, reports)


def own_gpus(place: Place, device: torch.device) -> bool:
    """Whether every rank of this machine has a GPU for itself; NCCL wants that."""
    return device.type == "cuda" and torch.cuda.device_count() >= place.local_ranks


def _group(pair: tuple[int, int], backend: str) -> Any:
    return dist.new_group(list(pair), backend=backend, timeout=FOREVER)
