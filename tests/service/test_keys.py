"""Row 27: API keys are hashed at rest, compared in constant time, revoked at once, and never logged."""

from __future__ import annotations

import hmac
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.service.stores import start
from weftune.errors import UserError
from weftune.service import keys as module
from weftune.service.keys import PREFIX, KeyFile


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "store" / "keys.json")


def test_a_key_belongs_to_its_tenant_and_others_to_none(keys):
    assert keys.find_tenant(PREFIX + "anything") is None
    acme, globex = keys.create("acme"), keys.create("globex")
    assert acme.startswith("tml-")
    assert (keys.find_tenant(acme), keys.find_tenant(globex)) == ("acme", "globex")
    for wrong in ("", acme[:-1], acme + "x", acme.upper(), "\ud800", "ключ"):
        assert keys.find_tenant(wrong) is None
    assert len({keys.create("acme") for _ in range(20)}) == 20


def test_fault_27_only_hashes_are_stored_in_files_of_the_user_alone(keys):
    created = [keys.create("acme") for _ in range(3)]
    keys.revoke(created[0])
    folder = keys.path.parent
    for path in folder.iterdir():
        content = path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600
        assert not any(key in content or key.removeprefix(PREFIX) in content for key in created)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_fault_27_every_key_is_compared_whole_with_a_function_of_constant_time(keys, monkeypatch):
    created = [keys.create(f"tenant-{number}") for number in range(5)]
    compared: list[tuple[str, str]] = []

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(module, "hmac", type("hmac", (), {"compare_digest": staticmethod(compare)}))
    for key in (created[0], created[4], "tml-wft-unknown"):
        compared.clear()
        keys.find_tenant(key)
        assert len(compared) == 5, "the first match does not end the search"
        assert all(len(one) == len(other) == 64 for one, other in compared), (
            "hashes, whose length says nothing"
        )


def test_fault_27_a_key_revoked_by_another_process_is_refused_within_a_second(keys):
    key, other = keys.create("acme"), keys.create("acme")
    assert keys.find_tenant(key) == "acme"
    process, pipe = start(revoke, keys.path, key)
    pipe.recv()
    began = time.monotonic()
    while keys.find_tenant(key) is not None:
        assert time.monotonic() - began < 1
    assert keys.find_tenant(other) == "acme"
    process.join()


def revoke(pipe: Connection, path: Path, key: str) -> None:
    KeyFile(path).revoke(key)
    pipe.send("revoked")


def test_fault_27_no_key_is_in_a_log_or_a_message(keys, caplog, monkeypatch, capfd):
    caplog.set_level(logging.DEBUG)
    key = keys.create("acme")
    keys.find_tenant(key)
    unknown = PREFIX + "unknown-key"
    with pytest.raises(UserError) as raised:
        keys.revoke(unknown)
    keys.revoke(key)
    printed = "".join(capfd.readouterr())
    for secret in (key, unknown):
        assert secret not in caplog.text + str(raised.value) + repr(keys) + printed


def test_keys_created_at_the_same_time_are_all_kept(keys):
    with ThreadPoolExecutor(10) as threads:
        created = list(threads.map(lambda number: keys.create(f"tenant-{number}"), range(30)))
    assert [keys.find_tenant(key) for key in created] == [f"tenant-{number}" for number in range(30)]


def test_readers_see_the_old_or_the_new_file_while_it_is_replaced(keys):
    key = keys.create("acme")
    stop = threading.Event()

    def read() -> bool:
        reader = KeyFile(keys.path)
        while not stop.is_set():
            if reader.find_tenant(key) != "acme":
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        readers = [threads.submit(read) for _ in range(4)]
        for number in range(10):
            keys.revoke(keys.create(f"tenant-{number}"))
        stop.set()
        assert all(reader.result() for reader in readers)


@pytest.mark.parametrize("tenant", ["", "Acme", "a" * 41, "../x", "a b", "ä", "a\n"])
def test_a_tenant_whose_name_is_no_name_is_refused(keys, tenant):
    with pytest.raises(UserError, match="cannot name a tenant"):
        keys.create(tenant)
    assert not keys.path.exists()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"keys": [{"id": 1}]}', '{"keys": 3}', "\x00"])
def test_a_damaged_file_is_one_sentence(keys, content):
    keys.create("acme")
    keys.path.write_text(content)
    with pytest.raises(UserError, match="cannot be read"):
        keys.find_tenant("tml-wft-x")


def test_a_file_of_a_later_version_is_refused(keys):
    keys.create("acme")
    keys.path.write_text(json.dumps({"format": 99, "keys": []}))
    with pytest.raises(UserError, match="format 99"):
        keys.find_tenant("tml-wft-x")
