"""A send that failed is told, and a window ends only when all that was sent in it has settled."""

import threading
from types import SimpleNamespace

import pytest
import torch

from tests import bench
from weftune.plan.program.program import Program
from weftune.run.workers.agreed import WorkerReport
from weftune.run.workers.driver import Driver
from weftune.run.workers.mailbox import Outbox, PeerLane, PeerLost, create_inbox
from weftune.run.workers.messages import RunProgram
from weftune.run.workers.worker import Worker


def test_a_send_that_failed_is_told_by_the_next_send_and_when_the_outbox_settles():
    outbox = Outbox(PeerLane(None, 7), bench.CPU)
    # There is no process group here: whatever is sent fails, in the outbox's own thread.
    outbox.send(torch.zeros(3))
    with pytest.raises(PeerLost, match="worker 7 is gone"):
        outbox.flush()
    with pytest.raises(PeerLost, match="worker 7 is gone"):
        outbox.send(torch.zeros(3))
    outbox.close()


def test_a_receive_between_devices_that_failed_is_told_whenever_something_is_awaited():
    lane = PeerLane(None, 7, announcement_group="no group")
    inbox = create_inbox(lane, torch.float32, bench.CPU)
    inbox.expect([(3,)])
    for _ in range(2):
        with pytest.raises(PeerLost, match=r"^worker 7 is gone: (?!worker)"):
            inbox.receive()
    inbox.close()


NOTHING = Program(1, (), (), ((), ()), stages=(0, 1))


def test_a_worker_is_through_with_a_window_only_when_what_it_sent_has_settled():
    sent = []
    worker = SimpleNamespace(
        executor=SimpleNamespace(run=lambda *_, **__: iter(())),
        agreed=SimpleNamespace(report=WorkerReport()),
        transport=SimpleNamespace(flush=lambda: sent.append("settled")),
        receiver=SimpleNamespace(answer=sent.append, stop_requested=threading.Event()),
        base=SimpleNamespace(device=bench.CPU),
    )
    Worker._run(worker, RunProgram(NOTHING, {}))
    settled, through = sent
    assert settled == "settled"
    assert isinstance(through, WorkerReport)


def test_a_window_whose_last_message_never_arrived_ends_instead_of_waiting_for_who_is_gone():
    def to_peer_lost():
        raise PeerLost("worker 1 is gone")

    def wait(_):
        raise AssertionError("nobody would ever answer")

    pipeline = SimpleNamespace(
        replicas=1,
        shards=1,
        control=SimpleNamespace(workers=[1], command=lambda *_: None, next_answer=wait),
        _window_reports={},
        _own=SimpleNamespace(run=lambda *_, **__: iter(())),
        _transport=SimpleNamespace(flush=to_peer_lost),
    )
    with pytest.raises(PeerLost, match="worker 1 is gone"):
        list(Driver.run(pipeline, NOTHING, lambda *_: None, lambda: False))
