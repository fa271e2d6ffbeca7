"""What passes between workers moves while they compute: a step takes the longer of the two, not their sum."""

import time

import pytest
import torch
import torch.distributed as dist

from tests import bench
from tests.run import executors
from tests.run.processes import run_workers
from tests.run.workers.test_agreed import CAPACITY, CUTS, PACE, cut, make_jobs, on_worker, whole_base
from weftune.plan.program.program import Forward, Send
from weftune.plan.window.pipeline import PipelineOrder, PipelineRules, plan_pipeline
from weftune.run.parts import fetch_from
from weftune.run.workers.groups import create_groups
from weftune.run.workers.mailbox import create_inbox
from weftune.run.workers.transport import Transport
from weftune.trainer.job import collate_plan

COMPUTE = 0.03
"""Seconds of a forward, slept through: a device that is busy without taking a core from the other worker."""


def timed_window(connections, delay):
    """Of a window whose links take `delay` per message: its seconds, its microbatches, and how long each Send
    kept this worker from computing."""
    base = cut("llama", torch.float32, connections.position, CUTS[2])
    executor, agreed, transport = on_worker(base, connections, CUTS[2], delay)
    jobs = make_jobs(whole_base("llama", torch.float32))
    for job in jobs:
        executor.attach(executors.job_training(base, job))
    base.model.base_model.register_forward_pre_hook(lambda *_: time.sleep(COMPUTE))
    rules = PipelineRules(CAPACITY, (PACE, PACE), PipelineOrder.multi_job, spare_microbatches=4)
    program = plan_pipeline([job.job_window(0, 5, False) for job in jobs], rules)
    by_name = {job.name: job for job in jobs}
    filled = [(number, plan) for number, plan in enumerate(program.microbatches) if plan.segments]
    laid = {number: collate_plan(plan, Forward, by_name) for number, plan in filled}
    list(executor.run(program, fetch_from(program, laid)))
    transport.flush()
    times = agreed.report.times
    passes = sum(isinstance(one.action, Forward) for one in times)
    sending = [one.stop - one.start for one in times if isinstance(one.action, Send)]
    return times[-1].stop - times[0].start, passes, sorted(sending)


def quickest(delay):
    """Of three windows: whatever else the machine does only adds to one."""
    return min(run_workers(2, timed_window, delay)[0] for _ in range(3))


def test_a_worker_computes_on_while_what_it_sent_is_under_way():
    delay = 3 * COMPUTE
    for _, passes, sending in run_workers(2, timed_window, delay):
        assert len(sending) >= passes // 2
        # The median: whatever else the machine does holds up one or the other.
        assert sending[len(sending) // 2] < delay / 3


@pytest.fixture(scope="module")
def without_delay():
    return quickest(0.0)


@pytest.mark.slow
def test_a_link_faster_than_the_compute_costs_next_to_nothing(without_delay):
    base_seconds, passes, _ = without_delay
    delay = COMPUTE / 2
    seconds, *_ = quickest(delay)
    one_after_another = base_seconds + 2 * passes * delay
    print(f"{passes} passes: {base_seconds:.2f} s, with {delay} s links {seconds:.2f} s, "
          f"their sum would be {one_after_another:.2f} s")  # fmt: skip
    assert seconds < base_seconds + 0.25 * (one_after_another - base_seconds)


@pytest.mark.slow
def test_a_link_slower_than_the_compute_sets_the_pace_by_itself(without_delay):
    base_seconds, passes, _ = without_delay
    delay = 3 * COMPUTE
    seconds, *_ = quickest(delay)
    print(f"{passes} passes: links alone {passes * delay:.2f} s, measured {seconds:.2f} s")
    assert passes * delay <= seconds < 0.85 * (passes * delay + base_seconds)


@pytest.mark.parametrize("rules", [True, False])
def test_a_transport_keeps_what_it_sends_until_the_peer_has_it(rules):
    got = run_workers(2, exchange, rules=rules)
    assert got == [None, [float(number) for number in range(20)]]


def exchange(connections):
    """Worker 0 sends many tensors and lets go of each at once; worker 1 takes them late."""
    transport = Transport(connections, 1000, torch.float64, bench.CPU)
    if connections.position.worker == 0:
        for number in range(20):
            transport.send(Send(number, 1, "activation", 1), torch.full((50, 1000), float(number)).double())
        transport.flush()
        return None
    time.sleep(0.3)
    inbox = create_inbox(connections.incoming_lanes("activation")[0], torch.float64, bench.CPU)
    inbox.expect([(50, 1000)] * 20)
    taken = [inbox.receive() for _ in range(20)]
    assert all(bool((one == one[0, 0]).all()) for one in taken)
    return [one[0, 0].item() for one in taken]


def greetings(connections):
    """Whom this worker meets while wires are laid once more, in order; it never starts two at once."""
    met, send, recv = [], dist.send, dist.recv

    def sent(tensor, peer, **keys):
        met.append((connections.position.worker, peer))
        send(tensor, peer, **keys)

    def received(tensor, peer, **keys):
        met.append((peer, connections.position.worker))
        recv(tensor, peer, **keys)

    dist.send, dist.recv = sent, received
    create_groups(connections.position, torch.device("cpu"))
    dist.send, dist.recv = send, recv
    return met


def test_workers_meet_in_every_way_in_one_order_before_a_receive_is_posted():
    """Two stages of two replicas: forth and back in each, and both ways between the copies of a stage."""
    met = run_workers(4, greetings, replicas=2)
    ways = [(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (1, 3), (2, 0), (3, 1)]
    for worker, own in enumerate(met):
        assert own == [way for way in ways if worker in way]


LATE = 0.2
"""Seconds after which the receiver of a message first asks for it."""

SENDS = {
    "activation": lambda transport, value: transport.send(Send(0, 1, "activation", 1), value),
    "gradient": lambda transport, value: transport.send(Send(0, 0, "gradient", 0), value),
    "sums": lambda transport, value: transport.send_sums(value),
    "decision": lambda transport, value: transport.send_decision(value),
    "share": lambda transport, value: transport.exchange.send_to_replicas(("a", 1), value),
}


def settle_each_way(connections):
    """For every way: when this worker had settled what it sent, and when it first asked for what came."""
    transport = Transport(connections, 4, torch.float64, bench.CPU)
    found = {}
    for way, send in SENDS.items():
        settled = asked = None
        # The one sends before the other asks, so that no two of them wait for each other.
        for sends in (0, 1):
            dist.barrier()
            if connections.position.worker % 2 == sends:
                if connections.outgoing_lanes(way):
                    send(transport, torch.full((4,), 7.0, dtype=torch.float64))
                    transport.flush()
                    settled = time.monotonic()
            elif lanes := connections.incoming_lanes(way):
                time.sleep(LATE)
                asked = time.monotonic()
                inbox = create_inbox(lanes[0], torch.float64, bench.CPU)
                inbox.expect([(4,)])
                assert inbox.receive().tolist() == [7.0] * 4
        found[way] = settled, asked
    transport.close()
    return found


@pytest.mark.parametrize("rules", [True, False])
@pytest.mark.parametrize(
    ("replicas", "ways"), [(1, {"activation", "gradient", "sums", "decision"}), (2, {"decision", "share"})]
)
def test_whatever_a_transport_sends_is_with_its_receiver_once_it_has_settled(replicas, ways, rules):
    first, second = run_workers(2, settle_each_way, replicas=replicas, rules=rules)
    seen = set()
    for way in SENDS:
        for (settled, _), (_, asked) in ((first[way], second[way]), (second[way], first[way])):
            if settled is not None:
                seen.add(way)
                assert settled >= asked, f"{way} had settled before anybody asked for it"
    assert seen == ways
