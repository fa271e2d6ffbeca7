"""Tensor parallelism: devices share every layer, and MuxTune's order of subgraphs hides their communication.

Each layer has two collectives per pass, during which the stage could compute for another fusion group.
Two groups are interleaved; the saving is computed for microbatches of the average size.

Launch order of the operators (MuxTune's algorithm 1): each group's operators form a graph, cut into
subgraphs; the subgraphs of all graphs are launched so that one group computes while another communicates.
Launching by depth, as published, keeps all groups in step, so that a communication that follows little
compute is not hidden; a second rule lets the groups drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from benchmarks.studies.placement import ClusterCase, Placement, cluster_case, cut_stages
from benchmarks.studies.scheme import PricedWork, Scheme, order_passes, pack_scheme, run_passes
from weftune.plan.cost.cluster import Cluster
from weftune.plan.cost.estimate import JobOutline
from weftune.plan.outlook.forecast import Forecast
from weftune.plan.program.prices import PassPrice

COLLECTIVES = 2
"""Collectives per layer and pass: after attention and after the feed-forward part."""
ADAPTERS = 0.1
"""Share of a layer's compute that its adapters take, if they are separate operators."""


def sharded_placement(
    case: ClusterCase, jobs: Sequence[JobOutline], capacity: int, count: int = 2
) -> Placement:
    """Return the placement in which every `count` consecutive devices act as one device. Raise PlanError if
    it does not fit in memory."""
    cluster = case.cluster
    firsts = range(0, len(cluster.devices), count)
    devices = (cluster.devices[number] for number in firsts)
    wide = (
        replace(
            device,
            memory_bytes=count * device.memory_bytes,
            peak_flops=count * device.peak_flops,
            bandwidth=count * device.bandwidth,
        )
        for device in devices
    )
    speeds = (case.speeds[number] for number in firsts)
    faster = [
        replace(
            speed,
            flops=count * speed.flops,
            adapter_flops=count * speed.adapter_flops,
            bandwidth=count * speed.bandwidth,
        )
        for speed in speeds
    ]
    together = Cluster(tuple(wide), cluster.link, cluster.link_name, (len(firsts),))
    return cut_stages(cluster_case(case.shape, together, faster, case.recompute), jobs, capacity)


def sharded_forecast(
    shards: Placement, count: int, scheme: Scheme, jobs: Sequence[JobOutline], interleave: bool
) -> Forecast:
    """Return the forecast of a run with `count` devices per stage. With `interleave`, passes of two groups
    overlap, each with microbatches of half the capacity."""
    placement = shards
    if interleave:
        half = max(shards.capacity // 2, max(job.shape.max_sample_tokens for job in jobs))
        placement = replace(shards, capacity=half)
    laid = _with_collectives(pack_scheme(scheme, jobs, placement), shards, count, interleave)
    passes = order_passes(scheme.order, laid, placement)
    forecast = run_passes(scheme.name, passes, laid, jobs, placement).forecast
    # Each stage stands for `count` devices, all equally busy.
    return replace(forecast, busy_seconds=forecast.busy_seconds * count, devices=forecast.devices * count)


def _with_collectives(priced: PricedWork, shards: Placement, count: int, interleave: bool) -> PricedWork:
    """Return the work with the times of collectives added to its passes. The collectives of a recomputed
    forward count twice."""
    filled, stages = priced.work.filled_microbatches, range(len(shards.stages))
    again = 2 if shards.case.recompute.recomputed_layers else 1
    layers = [sum(layer.kind == "layer" for layer in shards.layers(stage)) for stage in stages]
    saved = [1.0] * len(stages)
    if interleave:
        tokens = sum(priced.work.microbatches[number].tokens for number in filled) / len(filled)
        size = int(tokens) * shards.case.layers[0].output_bytes
        for stage in stages:
            typical = sum(priced.prices.passes[number][stage].forward for number in filled) / len(filled)
            saved[stage] = _interleaved_ratio(layers[stage], typical, _all_reduce(size, shards, count))

    def add_collectives(price: PassPrice, stage: int) -> PassPrice:
        collectives = layers[stage] * COLLECTIVES * _all_reduce(price.activation_bytes, shards, count)
        return replace(
            price,
            forward=saved[stage] * (price.forward + collectives),
            backward=saved[stage] * (price.backward + again * collectives),
        )

    passes = tuple(
        tuple(add_collectives(price, stage) for stage, price in enumerate(one))
        for one in priced.prices.passes
    )
    return replace(priced, prices=replace(priced.prices, passes=passes))


def _all_reduce(size: int, shards: Placement, count: int) -> float:
    return shards.case.cluster.link.all_reduce_seconds(size, count)


def _interleaved_ratio(layers: int, forward: float, collective: float) -> float:
    """Return the time of two interleaved passes divided by their time one after another. Per layer, a pass
    has two halves, each with matrix products, an adapter in parallel, and a collective."""
    if not layers:
        return 1.0
    share = forward / layers / COLLECTIVES
    graph: list[Operator] = []
    before: tuple[str, ...] = ()
    for number in range(layers * COLLECTIVES):
        base, adapter, sent = f"base{number}", f"adapter{number}", f"reduce{number}"
        graph.append(Operator(base, OperatorKind.compute, (1 - ADAPTERS) * share, before))
        graph.append(Operator(adapter, OperatorKind.adapter, ADAPTERS * share, before))
        graph.append(Operator(sent, OperatorKind.communication, collective, (base, adapter)))
        before = (sent,)
    found = overlap([tuple(graph)] * 2)
    return found.best.seconds / found.sequential.seconds


# -- launch order of operators ------------------------------------------------------------------------------


class OperatorKind(Enum):
    compute = "compute"
    communication = "communication"
    adapter = "adapter"


@dataclass(frozen=True, slots=True)
class Operator:
    name: str
    kind: OperatorKind
    seconds: float
    needs: tuple[str, ...] = ()
    """Names of earlier operators in the same graph whose results the operator needs."""


Graph = tuple[Operator, ...]
"""Operators of one fusion group on one stage, in an order in which they could run."""


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Operators that are launched together: compute with the communication that follows it, or adapters."""

    graph: int
    number: int
    depth: int
    """Length of the longest path to this subgraph, counted in subgraphs."""
    operators: tuple[Operator, ...]
    needs: tuple[int, ...]
    """Numbers of the subgraphs in the same graph that must come before it."""

    @property
    def seconds(self) -> float:
        return sum(operator.seconds for operator in self.operators)


@dataclass(frozen=True, slots=True)
class OperatorSpan:
    graph: int
    operator: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch order of subgraphs, and the resulting times of their operators on the compute lane and on the
    communication lane of a stage."""

    order: tuple[Subgraph, ...]
    compute: tuple[OperatorSpan, ...]
    communication: tuple[OperatorSpan, ...]

    @property
    def seconds(self) -> float:
        return max((lane[-1].stop for lane in (self.compute, self.communication) if lane), default=0.0)


@dataclass(frozen=True, slots=True)
class Overlap:
    sequential: Launch
    """Launch order with each graph completed before the next."""
    by_depth: Launch
    """Launch order of algorithm 1: the shallowest subgraph first, and the longest among equals."""
    by_start: Launch
    """Launch order by earliest start; a graph continues until it has to wait."""

    @property
    def best(self) -> Launch:
        return min(self.sequential, self.by_depth, self.by_start, key=lambda launch: launch.seconds)


class _OverlapLanes:
    """The compute lane and the communication lane of a stage. Each runs its operators in the order in which
    they are launched, once their inputs are ready."""

    def __init__(self) -> None:
        self.compute: list[OperatorSpan] = []
        self.communication: list[OperatorSpan] = []
        self.ended: dict[tuple[int, str], float] = {}
        self.last = -1
        """Number of the graph whose subgraph was launched last."""

    def start(self, operator: Operator, graph: int) -> float:
        """Return the time at which the operator would start if it were launched next."""
        lane = self._lane(operator)
        free = lane[-1].stop if lane else 0.0
        return max([free, *(self.ended[graph, need] for need in operator.needs)])

    def launch(self, subgraph: Subgraph) -> None:
        self.last = subgraph.graph
        for operator in subgraph.operators:
            start = self.start(operator, subgraph.graph)
            span = OperatorSpan(subgraph.graph, operator.name, start, start + operator.seconds)
            self._lane(operator).append(span)
            self.ended[subgraph.graph, operator.name] = span.stop

    def _lane(self, operator: Operator) -> list[OperatorSpan]:
        return self.communication if operator.kind is OperatorKind.communication else self.compute


_Rule = Callable[[Subgraph, _OverlapLanes], tuple[float, ...]]
"""A function that returns a sort key for a subgraph. The subgraph with the smallest key is launched next. No
two keys are equal."""


def overlap(graphs: Sequence[Graph]) -> Overlap:
    cut = [subgraphs(graph, number) for number, graph in enumerate(graphs)]
    return Overlap(_launch(cut, _sequential), _launch(cut, _by_depth), _launch(cut, _by_start))


def _sequential(subgraph: Subgraph, lanes: _OverlapLanes) -> tuple[float, ...]:
    return (subgraph.graph, subgraph.number)


def _by_depth(subgraph: Subgraph, lanes: _OverlapLanes) -> tuple[float, ...]:
    return (subgraph.depth, -subgraph.seconds, subgraph.graph, subgraph.number)


def _by_start(subgraph: Subgraph, lanes: _OverlapLanes) -> tuple[float, ...]:
    start = lanes.start(subgraph.operators[0], subgraph.graph)
    return (start, subgraph.graph != lanes.last, subgraph.depth, subgraph.graph, subgraph.number)


def subgraphs(graph: Graph, number: int = 0) -> tuple[Subgraph, ...]:
    """Return the graph cut into subgraphs, those of the smallest depth first. It is cut between compute and
    adapters, and after every communication. An adapter that directly feeds a communication is in its
    subgraph."""
    depth = _depths(graph)
    root = _runs(graph, depth)
    members: dict[str, list[Operator]] = {}
    for operator in sorted(graph, key=lambda one: depth[one.name]):
        members.setdefault(root[operator.name], []).append(operator)
    numbers = {run: index for index, run in enumerate(members)}
    return tuple(
        Subgraph(
            number,
            numbers[run],
            depth[run],
            tuple(operators),
            tuple(sorted({numbers[root[need]] for one in operators for need in one.needs} - {numbers[run]})),
        )
        for run, operators in members.items()
    )


def _launch(graphs: Sequence[Sequence[Subgraph]], rule: _Rule) -> Launch:
    """Return the launch order of the subgraphs by Kahn's algorithm: of the subgraphs that are ready, the one
    with the smallest key by `rule` is next."""
    lanes = _OverlapLanes()
    order: list[Subgraph] = []
    unmet = {(one.graph, one.number): len(one.needs) for graph in graphs for one in graph}
    ready = [one for graph in graphs for one in graph if not one.needs]
    while ready:
        chosen = min(ready, key=lambda one: rule(one, lanes))
        ready.remove(chosen)
        lanes.launch(chosen)
        order.append(chosen)
        for one in graphs[chosen.graph]:
            if chosen.number in one.needs:
                unmet[one.graph, one.number] -= 1
                if not unmet[one.graph, one.number]:
                    ready.append(one)
    return Launch(tuple(order), tuple(lanes.compute), tuple(lanes.communication))


def _is_cut(first: OperatorKind, second: OperatorKind) -> bool:
    """Return whether the graph is cut between an operator of kind `first` and an operator of kind `second`
    that needs its result."""
    return first is OperatorKind.communication or (
        first is not second and second is not OperatorKind.communication
    )


def _depths(graph: Graph) -> dict[str, int]:
    """Return a dict from each operator to its depth: the largest number of places at which the graph is cut
    on a path to the operator. All operators of a subgraph have the same depth."""
    kinds: dict[str, OperatorKind] = {}
    depth: dict[str, int] = {}
    for operator in graph:
        assert all(need in depth for need in operator.needs), f"{operator.name} comes before what it needs"
        steps = (depth[need] + _is_cut(kinds[need], operator.kind) for need in operator.needs)
        depth[operator.name] = max(steps, default=0)
        kinds[operator.name] = operator.kind
    return depth


def _runs(graph: Graph, depth: dict[str, int]) -> dict[str, str]:
    """Return a dict from each operator to the first operator of its subgraph. A subgraph consists of
    operators of the same depth that are connected. Since depth only grows along a path, subgraphs never wait
    for each other in a cycle."""
    root: dict[str, str] = {}
    for operator in graph:
        fed = {root[need] for need in operator.needs if depth[need] == depth[operator.name]}
        chosen = min(fed, key=list(root).index, default=operator.name)
        root[operator.name] = chosen
        for name, run in root.items():
            if run in fed:
                root[name] = chosen
    return root
