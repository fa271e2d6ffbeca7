"""Workers of tests exchange tensors by NCCL's rules: what would hang or mix up messages with NCCL fails."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.run import executors
from tests.run.processes import run_workers
from tests.run.workers.test_agreed import CUTS, cut, make_jobs, on_worker, pipeline_program, whole_base
from weftune.plan.program.program import Forward
from weftune.run.parts import fetch_from
from weftune.run.workers import groups, ordered
from weftune.run.workers.groups import HOST_PURPOSES, NO_TIMEOUT
from weftune.run.workers.ordered import OrderError
from weftune.trainer.job import collate_plan


def libraries(connections):
    """The library of every connection of this worker, by purpose, and that of its shards."""
    own = connections.position.worker
    found = {
        link.purpose: dist.get_backend(group)
        for link, group in connections.groups.items()
        if own in (link.sender, link.receiver)
    }
    shards = connections.shard_group
    return found, None if shards is None else dist.get_backend(shards)


@pytest.mark.parametrize(("rules", "library"), [(True, "ordered"), (False, "gloo")])
def test_workers_of_tests_follow_the_rules_unless_a_test_says_otherwise(rules, library):
    for found, shards in run_workers(4, libraries, shards=2, rules=rules):
        assert {"activation", "gradient", "sums", "decision"} <= found.keys()
        assert shards == library
        for purpose, used in found.items():
            assert used == ("gloo" if purpose in HOST_PURPOSES else library)


def agreed_library(connections, with_gpus):
    """The library on which workers agree of which some have a GPU each."""
    has_gpus = connections.position.worker in with_gpus
    groups.has_separate_gpus = lambda *_: has_gpus
    return groups.agree_on_library(connections.position, torch.device("cpu"))


@pytest.mark.parametrize(("with_gpus", "library"), [((), "gloo"), ((0,), "gloo"), ((0, 1), "nccl")])
def test_workers_take_nccl_only_if_every_machine_has_a_gpu_for_each_of_them(with_gpus, library):
    assert run_workers(2, agreed_library, with_gpus, rules=False) == [library] * 2


# -- orders that gloo tolerates -----------------------------------------------------------------------------


def pair_of(connections, library):
    return dist.new_group([0, 1], backend=library, timeout=NO_TIMEOUT)


def both_send_first(connections, library):
    """On one communicator, both workers send and then receive, without waiting in between."""
    group, other = pair_of(connections, library), 1 - connections.position.worker
    given, got = torch.full((3,), float(other)), torch.zeros(3)
    works = [dist.isend(given, other, group=group), dist.irecv(got, other, group=group)]
    return outcome_of(works, got)


def one_sends_twice_as_much(connections, library):
    group, worker = pair_of(connections, library), connections.position.worker
    tensor = torch.ones(8 if worker == 0 else 4)
    works = [dist.isend(tensor, 1, group=group) if worker == 0 else dist.irecv(tensor, 0, group=group)]
    return outcome_of(works, tensor)


def sums_in_two_orders(connections, library):
    group, worker = pair_of(connections, library), connections.position.worker
    tensors = [torch.ones(2), torch.ones(3)]
    order = tensors if worker == 0 else tensors[::-1]
    return outcome_of([dist.all_reduce(one, group=group, async_op=True) for one in order], tensors[0])


def outcome_of(works, tensor):
    try:
        for work in works:
            work.wait()
    except OrderError as error:
        return str(error)
    return tensor.tolist()


def test_gloo_tolerates_that_both_send_first():
    assert run_workers(2, both_send_first, "gloo") == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(
    ("target", "mine", "theirs"),
    [
        (both_send_first, "a send of 3 values of float32", "a send of 3 values of float32"),
        (one_sends_twice_as_much, "a send of 8 values of float32", "a receive of 4 values of float32"),
        (sums_in_two_orders, "a sum of 2 values of float32", "a sum of 3 values of float32"),
    ],
)
def test_operations_that_do_not_match_are_told_on_both_workers(target, mine, theirs):
    first, second = run_workers(2, target, "ordered")
    assert f"worker 0 is at {mine}, where worker 1 is at {theirs}" in first
    assert f"worker 1 is at {theirs}, where worker 0 is at {mine}" in second


def send_before_its_receive(connections):
    """Whether a send had completed before its receive was posted, and whether it had afterwards."""
    group, worker = pair_of(connections, "ordered"), connections.position.worker
    tensor = torch.ones(2)
    if worker == 1:
        time.sleep(0.3)
        dist.barrier()
        dist.recv(tensor, 0, group=group)
        return None
    work = dist.isend(tensor, 1, group=group)
    dist.barrier()
    early = work.is_completed()
    work.wait()
    return early, work.is_completed()


def test_a_send_completes_only_when_its_receive_is_posted():
    assert run_workers(2, send_before_its_receive)[0] == (False, True)


def circle_of_three(connections):
    """Each worker waits for a tensor that its neighbour would send next."""
    ordered.STABLE_POLLS = 2
    pairs = [
        dist.new_group(sorted((one, (one + 1) % 3)), backend="ordered", timeout=NO_TIMEOUT)
        for one in range(3)
    ]
    worker, began = connections.position.worker, time.monotonic()
    tensor, before = torch.ones(2 + worker), (worker - 1) % 3
    told = outcome_of([dist.irecv(torch.ones(2 + before), before, group=pairs[before])], tensor)
    if isinstance(told, list):
        dist.isend(tensor, (worker + 1) % 3, group=pairs[worker])
    return told, time.monotonic() - began


def test_a_circle_of_waiting_workers_is_told_in_seconds():
    for worker, (told, seconds) in enumerate(run_workers(3, circle_of_three, replicas=3)):
        assert "wait for one another, as they would with NCCL" in told
        before = (worker - 1) % 3
        awaited = f"a receive of {2 + before} values of float32 with worker {before}"
        assert f"worker {worker} waits for {awaited}" in told
        assert seconds < 30


# -- what the device waits for ------------------------------------------------------------------------------


def train_while_passes_synchronise(connections, announces):
    """Train on two stages whose passes wait for every operation that this worker has started, as the capture
    of a graph on a GPU does. Without `announces`, receives are posted ahead, unannounced."""
    if not announces:
        connections.announcement_groups.clear()
        ordered.STABLE_POLLS = 2
    works = []
    isend, irecv = dist.isend, dist.irecv

    def noted(start):
        def started(*arguments, **options):
            work = start(*arguments, **options)
            if dist.get_backend(options["group"]) == "ordered":
                works.append(work)
            return work

        return started

    dist.isend, dist.irecv = noted(isend), noted(irecv)
    base = cut("llama", torch.float32, connections.position, CUTS[2])
    executor, _, transport = on_worker(base, connections, CUTS[2])
    jobs = make_jobs(whole_base("llama", torch.float32))
    for job in jobs:
        executor.attach(executors.job_training(base, job))

    def synchronise(*_):
        for work in list(works):
            work.wait()

    base.model.base_model.register_forward_pre_hook(synchronise)
    program = pipeline_program(jobs, connections.position, None)
    by_name = {job.name: job for job in jobs}
    filled = [(number, plan) for number, plan in enumerate(program.microbatches) if plan.segments]
    laid = {number: collate_plan(plan, Forward, by_name) for number, plan in filled}
    try:
        list(executor.run(program, fetch_from(program, laid)))
    except OrderError as error:
        return str(error)
    transport.flush()
    return {name: training.progress.step for name, training in executor.attached.items()}


def test_a_device_that_is_synchronised_never_waits_for_what_this_worker_does_next():
    assert run_workers(2, train_while_passes_synchronise, True) == [{"a": 5, "b": 3, "c": 4}] * 2


def test_receives_that_are_posted_ahead_on_a_device_make_workers_wait_for_one_another():
    for told in run_workers(2, train_while_passes_synchronise, False):
        assert "worker 0 waits for a receive of" in told
        assert "worker 1 waits for" in told
