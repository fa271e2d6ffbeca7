"""Uploads of hostile clients: bad rows, endless and slow bodies. Their memory stays bounded."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import openai
import psutil
import pytest

from tests.data.test_bad_rows import BAD, GOOD, OTHERS
from tests.service.api.running import start_service
from weftune.base.spec import BaseSpec
from weftune.errors import DataError
from weftune.service.preparer import Preparer, _load_base_parts, check_file, load_base_parts, prepare_job
from weftune.service.settings import ServiceSettings

MIB = 1 << 20
BOUNDARY = "weft"
HEAD = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
).encode()


@pytest.mark.parametrize("name", BAD)
def test_fault_13_a_bad_row_is_refused_with_its_line(name, client):
    line, expected = BAD[name]
    content = "\n".join([GOOD, "", line, GOOD, ""])
    with pytest.raises(openai.BadRequestError) as error:
        client.files.create(file=("rows.jsonl", content.encode()), purpose="fine-tune")
    message = error.value.body["message"]
    assert message.startswith("rows.jsonl:3: ")
    assert expected in message


NEED_THE_BASE = {
    "a token outside the vocabulary",
    "a negative token",
    "labels all masked",
    "only the first token supervised",
}
"""Kinds of wrong rows that are found when the job is prepared, since the upload is not yet for a base."""


@pytest.mark.parametrize("name", sorted(NEED_THE_BASE))
def test_fault_13_rows_that_do_not_fit_the_base_are_refused_when_the_job_is_prepared(name, tmp_path):
    path = tmp_path / "file-1.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in OTHERS[name][0]))
    assert check_file(path, "rows.jsonl", 100) == len(OTHERS[name][0])
    with pytest.raises(DataError, match=r"file-1\.jsonl:"):
        prepare_job(BaseSpec(model="demo"), {"name": "a", "data": {"path": str(path)}})


def test_the_base_is_loaded_before_the_first_job_is_prepared(tmp_path):
    base, path = BaseSpec(model="demo"), tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n')
    load_base_parts(base)
    loads = _load_base_parts.cache_info().misses
    prepare_job(base, {"name": "a", "data": {"path": str(path)}})
    assert _load_base_parts.cache_info().misses == loads
    preparer = Preparer(ServiceSettings(base=base, store=tmp_path), requests=None)
    before = set(psutil.Process().children())
    try:
        preparer.load_base()
        deadline = time.monotonic() + 30
        while not (started := set(psutil.Process().children()) - before):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        preparer.close()
    assert not any(process.is_running() for process in started)


@pytest.mark.parametrize("name", sorted(OTHERS.keys() - NEED_THE_BASE))
def test_fault_13_bad_rows_of_other_formats_are_refused_with_their_line(name, client):
    content = "".join(json.dumps(row) + "\n" for row in OTHERS[name][0])
    with pytest.raises(openai.BadRequestError) as error:
        client.files.create(file=("rows.jsonl", content.encode()), purpose="fine-tune")
    assert "rows.jsonl:" in error.value.body["message"]


@pytest.mark.timed
def test_fault_20_endless_and_slow_uploads_end_with_413_and_408(tmp_path):
    service = start_service(tmp_path, quotas={"file_bytes": 32 * MIB}, body_seconds=3.0, anew=True)
    try:
        before, waits = memory_bytes(service.process.pid), []
        slow = [drip(service) for _ in range(200)]
        begun = time.monotonic()
        endless = threading.Thread(target=lambda: answers.append(flood(service)))
        answers: list[bytes] = []
        endless.start()
        highest = before
        while time.monotonic() - begun < 5.0:
            at = time.monotonic()
            assert service.call("GET", "/healthz", tenant=None)[0] == 200
            waits.append(time.monotonic() - at)
            highest = max(highest, memory_bytes(service.process.pid))
            time.sleep(0.02)
        endless.join(60)
        assert answers[0].startswith(b"HTTP/1.1 413"), answers
        ended = [connection.recv(200) for connection in slow]
        assert {one[:12] for one in ended} == {b"HTTP/1.1 408"}
        assert highest - before < 68 * MIB
        waits.sort()
        assert waits[int(len(waits) * 0.99)] < 0.2
        assert not list(service.settings.files.iterdir())
    finally:
        service.stop()


def memory_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def open_upload(service, length: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", service.settings.port), timeout=60)
    connection.sendall(
        f"POST /v1/files HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {service.keys['acme']}\r\n"
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n".encode()
        + (f"Content-Length: {length}\r\n\r\n".encode() if length else b"Transfer-Encoding: chunked\r\n\r\n")
    )
    return connection


def drip(service) -> socket.socket:
    """Begin an upload that never goes on."""
    connection = open_upload(service, 10 * MIB)
    connection.sendall(HEAD + b"{")
    return connection


def flood(service) -> bytes:
    """Send an upload without an end until the service answers."""
    connection = open_upload(service, 0)
    chunk = b'{"text": "a"}\n' * 4096
    connection.sendall(b"%x\r\n%s\r\n" % (len(HEAD), HEAD))
    try:
        for _ in range(10_000):
            connection.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))
    except OSError:
        pass
    return connection.recv(200)


def test_an_upload_that_ends_in_its_middle_leaves_nothing(service):
    before = sorted(service.settings.files.iterdir())
    connection = open_upload(service, 10 * MIB)
    connection.sendall(HEAD + b'{"text": "a"}\n' * 1000)
    connection.close()
    deadline = time.monotonic() + 60
    while sorted(service.settings.files.iterdir()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sorted(service.settings.files.iterdir()) == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no multipart",
        HEAD,
        HEAD.replace(b'name="file"', b'name="other"') + b"a",
        HEAD + b"a\r\n" + HEAD + b"b\r\n--weft--\r\n",
        b"--weft\r\n\r\n--weft--\r\n",
    ],
)
def test_a_body_that_is_no_upload_is_refused(body, service):
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    status, _, content = service.call("POST", "/v1/files", body, headers=headers)
    assert status == 400, content


def test_what_an_upload_has_left_behind_is_removed_at_the_start(tmp_path):
    service = start_service(tmp_path)
    connection = open_upload(service, 10 * MIB)
    connection.sendall(HEAD + b'{"text": "a"}\n' * 1000)
    deadline = time.monotonic() + 60
    while not list(service.settings.files.glob("*.uploading")) and time.monotonic() < deadline:
        time.sleep(0.05)
    service.kill()
    assert list(service.settings.files.glob("*.uploading"))
    service.restart()
    try:
        assert not list(service.settings.files.iterdir())
    finally:
        service.stop()
