"""The settings of a service, which its processes share. This module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weftune.base.spec import BaseSpec
from weftune.core.files import FORMAT, refuse_unknown_format, replace_json
from weftune.errors import UserError

KEYS, CLAIM = "keys.json", "service.json"
EPOCHS = "epochs"
"""Name of the folder, inside a job's folder, that holds the adapters of the job's checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The jobs that a service expects to train. At the start, before any job exists, the service chooses for
    them how to divide the model and the memory."""

    jobs: int = 16
    """Expected number of jobs that train at the same time."""
    rank: int = 16
    """Rank of the expected adapters, which adapt all linears."""
    sample_tokens: int = 1024
    """Number of tokens of the longest sample in the expected jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Limits that apply to each tenant. A limit of None means unlimited."""

    queued_jobs: int | None = 1000
    """Maximum number of a tenant's jobs that have not ended."""
    running_jobs: int | None = None
    """Maximum number of a tenant's jobs that train at the same time; further jobs wait."""
    tokens_per_day: int | None = None
    """Maximum number of tokens that a tenant's jobs train on per calendar day (UTC). The jobs then wait until
    the next day."""
    stored_bytes: int | None = 16 << 30
    """Maximum total bytes of a tenant's uploaded files."""
    file_bytes: int = 512 << 20
    """Maximum bytes of one uploaded file."""
    file_rows: int = 1_000_000
    """Maximum rows of one uploaded file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    base: BaseSpec
    store: Path
    """Folder that holds databases, keys, uploaded files, and the folders of jobs."""
    host: str = "127.0.0.1"
    port: int = 8000
    database: str | None = field(default=None, repr=False)
    """URL of a PostgreSQL database, which may contain a password. None means two SQLite files in `store`."""
    device: str | None = None
    memory: int | None = None
    """Maximum bytes of host memory for training. None means most of the free memory."""
    gpu_memory: int | None = None
    """Maximum bytes of GPU memory for training and chat."""
    envelope: Envelope = field(default_factory=Envelope)
    quotas: Quotas = field(default_factory=Quotas)
    announce: str | None = field(default=None, repr=False)
    """URL of a running vLLM, without `/v1`, that loads finished adapters. None disables announcements."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Maps the name of each Python metric that jobs may use to `FILE.py:NAME`, with an absolute path."""

    @property
    def files(self) -> Path:
        """Folder of uploaded files, in which each file is named by its id."""
        return self.store / "files"

    @property
    def base_name(self) -> str:
        """Name of the base in the API. The name never contains a path of this machine."""
        return public_name(self.base)

    def file_path(self, id: str) -> Path:
        """Return the path of an uploaded file. The suffix determines how it is read."""
        return self.files / f"{id}.jsonl"

    @property
    def jobs(self) -> Path:
        """Folder with one folder per job, which is named by the job's id and holds the job's checkpoints and
        finished adapter."""
        return self.store / "jobs"

    @property
    def keys(self) -> Path:
        """File with the hashes of all API keys."""
        return self.store / KEYS

    @property
    def chat_socket(self) -> Path:
        """Unix socket on which the training process answers prompts."""
        return self.store / "chat.sock"


def public_name(base: BaseSpec) -> str:
    """Return the name of a base without local paths: for a local folder or file, only the last part of the
    path."""
    name = base.published_name
    return Path(name).name if Path(name).expanduser().exists() else name


def refuse_other_base(settings: ServiceSettings) -> None:
    """Raise an error if the store's jobs were trained on another base model, since their adapters do not fit
    this base."""
    path = settings.store / CLAIM
    try:
        claim = json.loads(path.read_bytes())
        refuse_unknown_format(claim.get("format"), path)
        base = BaseSpec.from_record(claim["base"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{path} cannot be read; put back a copy of it, or choose another --store") from None
    if base.record() != settings.base.record():
        raise UserError(
            f"the store {settings.store} belongs to the base {base.published_name}, with "
            f"{_changed_fields(base, settings.base)}; serve that base, or choose another --store"
        )


def _changed_fields(old_base: BaseSpec, new_base: BaseSpec) -> str:
    """Return the names of the fields in which two base specifications differ, each with the old value."""
    before, after = old_base.record(), new_base.record()
    return ", ".join(f"{key}: {before[key]}" for key in before if before[key] != after[key])


def claim_store(settings: ServiceSettings) -> None:
    """Create the folder of the service's store, and record the base model to which the store belongs."""
    refuse_other_base(settings)
    try:
        # Tenants' rows and adapters are there: no other user of the machine may read them.
        settings.store.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(
            f"cannot create {settings.store}: {error.strerror}; choose another --store"
        ) from error
    if not (settings.store / CLAIM).exists():
        replace_json(settings.store / CLAIM, {"format": FORMAT, "base": settings.base.record()})


def adapter_folder(jobs: Path, job: str, step: int | None = None) -> Path:
    """Return the folder of a job's finished adapter or, with a step, of the adapter of a checkpoint. `jobs`
    is the folder of all jobs."""
    return jobs / job if step is None else jobs / job / EPOCHS / f"step-{step}"
