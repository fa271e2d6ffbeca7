"""Host memory for a GPU, as far as a machine without one can tell."""

import sys
from pathlib import Path

import pytest
import torch

from weftune.base.host.pinned import Pages, allocate_host_bytes, host_vectors
from weftune.errors import BaseModelError

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc what is mapped")


def mapped(address):
    """The line of /proc that says what an address belongs to; None if to nothing."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= address < high:
            return line
    return None


@linux
def test_what_leaves_memory_is_done_while_it_is_still_mapped():
    pages = Pages(-1, 1 << 20)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    address, heard = buffer.data_ptr(), []
    pages.on_unmap = lambda: heard.append(mapped(address))
    view = buffer[10:20]
    del pages, buffer
    assert heard == []
    del view
    assert len(heard) == 1
    assert heard[0] is not None


@linux
def test_a_locked_piece_is_private_touched_and_registered_once_and_given_up_with_its_last_view(monkeypatch):
    """The library's two calls stand in for a GPU: what they are given, and when, is what counts."""
    calls = []

    class Library:
        def cudaHostRegister(self, address, size, flags):
            calls.append(("register", address, size, flags, mapped(address)))
            return 0

        def cudaHostUnregister(self, address):
            calls.append(("unregister", address, mapped(address)))

    monkeypatch.setattr(torch.cuda, "cudart", Library)
    (vector,) = host_vectors([(1 << 20, torch.float32)], torch.device("cuda"))
    name, address, size, flags, line = calls[0]
    assert (name, address, size, flags) == ("register", vector.data_ptr(), 4 << 20, 0)
    assert " rw-p " in line
    assert torch.count_nonzero(vector) == 0
    del vector
    assert [call[0] for call in calls] == ["register", "unregister"]
    assert calls[1][1] == address
    assert calls[1][2] is not None


def test_memory_that_may_not_be_locked_is_a_sentence(monkeypatch):
    class Library:
        def cudaHostRegister(self, *_):
            return 1

    monkeypatch.setattr(torch.cuda, "cudart", Library)
    with pytest.raises(BaseModelError, match=r"does not let Weftune lock 0\.0 GiB of host memory"):
        allocate_host_bytes(4096, torch.device("cuda"))
