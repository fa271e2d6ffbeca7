"""A worker that hears nothing more from the others, or from the store they share, says so in ten seconds."""

import os
import queue
import signal
import time

import pytest
from torch.distributed import TCPStore

import weftune.run.workers.heartbeat
from tests.run.processes import context
from weftune.run.workers.groups import WorkerPosition
from weftune.run.workers.heartbeat import LOST_AFTER_SECONDS, Heartbeat

NOTICED = 10.0


def hold_store(ports):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports.put(store.port)
    time.sleep(600)


@pytest.mark.timed
def test_a_store_that_does_not_answer_is_a_loss_in_ten_seconds():
    """As when the network is cut: the connection is open, and nothing comes."""
    ports = context().Queue()
    holder = context().Process(target=hold_store, args=(ports,), daemon=True)
    holder.start()
    try:
        told: queue.Queue[str] = queue.Queue()
        store = TCPStore("127.0.0.1", ports.get(timeout=60), wait_for_workers=False)
        heartbeat = Heartbeat(WorkerPosition(0, 2), store, told.put)
        heartbeat.start()
        time.sleep(1.5)
        assert told.empty()
        os.kill(holder.pid, signal.SIGSTOP)
        began = time.monotonic()
        sentence = told.get(timeout=NOTICED)
        assert time.monotonic() - began >= LOST_AFTER_SECONDS - 2
        assert sentence == "the store that all workers share has not answered for 7 seconds"
    finally:
        holder.kill()
        holder.join()


def test_a_worker_that_never_appears_is_a_loss(monkeypatch):
    """The launcher sees one that ends before it has left a mark; nobody else sees one that hangs there."""
    monkeypatch.setattr(weftune.run.workers.heartbeat, "ABSENT_AFTER_SECONDS", 2.0)
    told: queue.Queue[str] = queue.Queue()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heartbeat = Heartbeat(WorkerPosition(0, 3), store, told.put)
    store.set("weftune/beat/0/1", "done")
    heartbeat.start()
    assert told.get(timeout=NOTICED) == "worker 2 has not appeared in 2 seconds"
    heartbeat.stop()
