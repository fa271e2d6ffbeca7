"""API keys. Their hashes are in a file, which `weftune keys` can replace while the service runs."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from weftune.core.files import FORMAT, refuse_unknown_format, replace_json, temporary_path
from weftune.errors import UserError

PREFIX = "tml-wft-"
"""Beginning of every key. Some clients refuse keys that do not begin with `tml-`."""
TENANT = re.compile(r"[a-z0-9-]{1,40}")
ID_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The stored record of an API key. The record contains a hash of the key, not the key itself, which is
    shown only when it is created."""

    id: str
    """Identifier for listing and revoking the key. The identifier reveals nothing about the key itself."""
    tenant: str
    sha256: str
    """Hash of the key. A slow hash is not needed, since the key has 256 random bits."""
    created_at: float


class KeyFile:
    """The API keys in one file. Every call reads changes that other processes have made to the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._keys: tuple[ApiKey, ...] = ()
        self._version: tuple[int, int, int] | None = None
        """Inode, modification time and size of the file when `_keys` was read. None if the file does not
        exist."""
        self._one_reader = threading.Lock()

    def find_tenant(self, key: str) -> str | None:
        """Return the tenant of a key. None if the key does not exist or has been revoked.

        Keys are compared in constant time.
        """
        presented, tenant = _key_hash(key), None
        for known in self.keys():
            if hmac.compare_digest(known.sha256, presented):
                tenant = known.tenant
        return tenant

    def keys(self) -> tuple[ApiKey, ...]:
        """Return all keys, the oldest first. Raise UserError if the file cannot be read."""
        with self._one_reader:
            try:
                found = self.path.stat()
                version = found.st_ino, found.st_mtime_ns, found.st_size
                if version != self._version:
                    self._keys, self._version = _read_keys(self.path), version
            except FileNotFoundError:
                self._keys, self._version = (), None
            return self._keys

    def create(self, tenant: str) -> str:
        """Create a key for a tenant and return it; only its hash is stored."""
        if not TENANT.fullmatch(tenant):
            raise UserError(
                f"{tenant!r} cannot name a tenant; write up to 40 lower-case letters, digits and hyphens."
            )
        key = PREFIX + secrets.token_urlsafe(32)
        new = ApiKey(secrets.token_hex(ID_CHARACTERS // 2), tenant, _key_hash(key), time.time())
        with self._hold_lock():
            self._replace_keys((*self.keys(), new))
        return key

    def revoke(self, id_or_key: str) -> ApiKey:
        """Delete a key, given by its id or as the key itself, and return its record."""
        with self._hold_lock():
            known = self.keys()
            found = [one for one in known if one.id == id_or_key or one.sha256 == _key_hash(id_or_key)]
            if not found:
                # The argument may be a key, which no message may contain.
                raise UserError(f"{self.path} has no such key; weftune keys list shows the ids of all keys.")
            self._replace_keys(tuple(one for one in known if one not in found))
        return found[0]

    def _replace_keys(self, keys: tuple[ApiKey, ...]) -> None:
        # Created first, since the mode of an existing file is kept.
        temporary_path(self.path).touch(mode=0o600)
        replace_json(self.path, {"format": FORMAT, "keys": [asdict(one) for one in keys]})

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Hold a lock on the file, so that only one process at a time reads and replaces it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UserError(
                f"cannot write to {self.path.parent}: {error.strerror}; choose another --store"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _key_hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _read_keys(path: Path) -> tuple[ApiKey, ...]:
    try:
        values = json.loads(path.read_bytes())
        refuse_unknown_format(values.get("format"), path)
        return tuple(ApiKey(**one) for one in values["keys"])
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error}); put back a copy of it.") from error
