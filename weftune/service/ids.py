"""Ids of stored objects, and the model names under which adapters answer prompts."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

CHECKPOINT = re.compile(r"ckpt-step-(\d+)")


def new_id(prefix: str) -> str:
    """Return a new id such as `ftjob-3f2a…`. The id is in lower case, so that it can be the name of a folder
    on any system."""
    return f"{prefix}-{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class AdapterName:
    """The parts of the model name under which an adapter answers prompts."""

    base: str
    tenant: str
    suffix: str
    job: str
    step: int | None = None
    """Step of a checkpoint. None for the finished adapter."""

    def __str__(self) -> str:
        name = f"ft:{self.base}:{self.tenant}:{self.suffix}:{self.job}"
        return name if self.step is None else f"{name}:ckpt-step-{self.step}"


def parse_adapter_name(text: str) -> AdapterName | None:
    """Return the parts of an adapter's name, or None if the string is not the name of an adapter."""
    rest, step = text, None
    head, _, last = text.rpartition(":")
    if (found := CHECKPOINT.fullmatch(last)) is not None:
        rest, step = head, int(found[1])
    start, *parts = rest.rsplit(":", 3)
    kind, _, base = start.partition(":")
    if kind != "ft" or not base or len(parts) != 3:
        return None
    tenant, suffix, job = parts
    return AdapterName(base, tenant, suffix, job, step)
