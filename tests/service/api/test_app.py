"""Health and readiness, asked of a real HTTP process."""

from __future__ import annotations

import json
import socket

from weftune.service.chat import socket_address


def readiness(service):
    status, headers, body = service.call("GET", "/readyz", tenant=None)
    assert (status == 503) == ("Retry-After" in headers or "retry-after" in headers)
    return status, json.loads(body)["reasons"]


def test_a_service_is_ready_once_its_base_is_loaded(service, request):
    assert service.call("GET", "/healthz", tenant=None)[0] == 200
    assert readiness(service) == (503, ["The training process does not run."])
    request.getfixturevalue("training")  # holds the lease
    assert readiness(service) == (503, ["The training process is loading the base."])
    path = service.settings.chat_socket
    with socket.socket(socket.AF_UNIX) as listening:
        with socket_address(path) as address:
            listening.bind(address)
        listening.listen()
        assert readiness(service) == (200, [])
    # A process that was killed leaves its socket behind.
    assert path.exists()
    assert readiness(service) == (503, ["The training process is loading the base."])
    path.unlink()
