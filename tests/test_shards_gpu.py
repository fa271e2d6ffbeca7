"""Shards of a base on one GPU: two processes that exchange sums over gloo, and NCCL with a single member."""

import pytest
import torch
import torch.distributed as dist

from tests import bench
from tests.run import executors
from tests.run.models import deep
from tests.run.processes import run_workers
from tests.run.test_sharded import WHOLE, AloneOnShard, trained
from tests.run.workers.test_agreed import CAPACITY, assert_equal, losses_of, pipeline_program, views
from tests.run.workers.test_shards import training_of
from weftune.base.model import Base
from weftune.base.shards import cut_shard
from weftune.base.spec import BaseSpec
from weftune.core.shards import ShardTeam
from weftune.plan.program.layout import pipeline_layout
from weftune.run.assemble import resident_executor
from weftune.run.parts import fetch_from
from weftune.run.passes.graphs import capture_graph
from weftune.run.workers.transport import Transport
from weftune.run.workers.worker import shard_team, worker_executor
from weftune.trainer.job import collate_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ROUNDS = 6
LOSS_GAP, WEIGHT_GAP = 1e-4, 5e-2
"""Of float32, in which Adam makes a whole step for a gradient near zero that changes sign."""


def whole_base(device):
    return Base.from_model(deep("llama", torch.float32), BaseSpec(model="tiny/llama"), device)


def make_jobs(base):
    """Jobs that the kernels compute, at linears that are cut by their outputs and by their inputs."""
    adapters = {
        "dropping": {"rank": 8, "dropout": 0.2, "targets": "all-linear"},
        "vera": {"kind": "vera", "rank": 8, "targets": ["v_proj", "down_proj"]},
        "ia3": {"kind": "ia3"},
    }
    return [
        executors.prepare(
            base,
            name,
            steps=ROUNDS,
            batch_size=2,
            adapter=adapter,
            data=bench.rows(bench.samples(8, seed, shortest=16, longest=16)),
        )
        for seed, (name, adapter) in enumerate(adapters.items())
    ]


def whole_run(device):
    whole = whole_base(device)
    jobs = make_jobs(whole)
    return trained(resident_executor(whole), whole, jobs, executors.plan_program(jobs, ROUNDS, CAPACITY))


def as_shard(connections):
    device, position = torch.device("cuda", 0), connections.position
    jobs, team = make_jobs(whole_base(device)), shard_team(connections)
    base = cut_shard(deep("llama", torch.float32), BaseSpec(model="tiny/llama"), device, team, WHOLE)
    transport = Transport(connections, base.shape.hidden, base.dtype, device)
    part = pipeline_layout([WHOLE], 1, position.shards).for_worker(0)
    executor, _ = worker_executor(base, part, transport, position.list_index, team)
    assert executor.is_fused
    for job in jobs:
        executor.attach(training_of(base, job))
    program, by_name = pipeline_program(jobs, position, None, ROUNDS), {job.name: job for job in jobs}
    kinds = program.pass_kinds()
    microbatches = {
        number: collate_plan(plan, kinds[number], by_name) for number, plan in enumerate(program.microbatches)
    }
    events = list(executor.run(program, fetch_from(program, microbatches)))
    transport.flush()
    weights = {key: value.cpu() for key, value in views(executor.attached).items()}
    return losses_of(events), weights, executor.captures


def on_host(found):
    return tuple(
        {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in one.items()}
        for one in found
    )


def test_kernels_of_two_shards_on_one_gpu_train_as_the_whole_base_does():
    want = on_host(whole_run(torch.device("cuda", 0)))
    for losses, weights, captures in run_workers(2, as_shard, shards=2, device="cuda", rules=False):
        assert not captures, "gloo cannot be part of a graph"
        assert_equal((losses, weights), want, LOSS_GAP, WEIGHT_GAP)


@pytest.fixture
def sum_of_one():
    """A sum over the only member of an NCCL communicator, which has been used once."""
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    dist.all_reduce(torch.ones(1, device=device))
    yield dist.all_reduce
    dist.destroy_process_group()


def test_nccl_inside_a_captured_graph_with_a_communicator_of_one_member(sum_of_one):
    device = torch.device("cuda", 0)
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    values = torch.arange(8.0, device=device)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(device))
        with capture_graph(graph, torch.cuda.graph_pool_handle(), stream):
            doubled = values * 2
            sum_of_one(doubled)
            result = doubled + 1
        values.add_(1.0)
        graph.replay()
    torch.cuda.synchronize(device)
    assert torch.equal(result.cpu(), 2 * (torch.arange(8.0) + 1) + 1)


def test_captured_passes_of_a_shard_contain_its_sums(sum_of_one):
    """One shard, which has whole linears, with sums by NCCL: it runs all that a shard of several runs."""
    device, found, sums = torch.device("cuda", 0), [], []

    def count_sum(tensor):
        sums.append(torch.cuda.is_current_stream_capturing())
        sum_of_one(tensor)

    for graphs in (False, True):
        team = ShardTeam(0, 1, count_sum, is_capturable=True)
        spec = BaseSpec(model="tiny/llama")
        base = cut_shard(deep("llama", torch.bfloat16), spec, device, team, WHOLE)
        executor = resident_executor(base, graphs=graphs, make_agreement=AloneOnShard, team=team)
        jobs = make_jobs(base)
        run = trained(executor, base, jobs, executors.plan_program(jobs, ROUNDS, CAPACITY))
        found.append(on_host(run))
        assert bool(executor.captures) == graphs
        assert any(sums) == graphs, "sums are captured with the passes"
    assert_equal(found[1][:2], found[0], LOSS_GAP, WEIGHT_GAP)
