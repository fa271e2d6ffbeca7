"""CUDA graphs of passes whose forward is kept for the backward. One launch replaces thousands of kernel
launches.

A graph is captured for a stage, a key and an instance, the number of a memory pool. The key consists of the
number of rows, the buckets (rounded-up values) of the longest sample and of the number of samples (or their
exact values if all samples are equally long), the limits of the attached adapters (such as the largest rank),
and the layers that are recomputed. The attached jobs and the positions of their rows are values of tensors
that the graph reads, so jobs can change without another capture. Every microbatch in flight uses a separate
instance, whose memory pool holds the results of its forward until its backward.

Shapes: T rows, D hidden width.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from weftune.adapters.banks import Banks
from weftune.base.model import Base
from weftune.core.clock import Phase, phase
from weftune.core.deterministic import are_kernels_deterministic
from weftune.ops.lora.routes import Route
from weftune.plan.program.program import NOTHING, Program
from weftune.run.measure.memory import release_cached_memory
from weftune.run.measure.timers import DeviceClock, DeviceSpan, Moment
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.passes.graph_inputs import GraphInputs, GraphKey, make_graph_key
from weftune.run.passes.payback import Payback, WatchedPass
from weftune.run.passes.plain import PlainPasses
from weftune.run.passes.rows import DeviceMicrobatch, InFlight, StageVisit, renumber_visits

MAX_GRAPHS = 128
"""Maximum number of CUDA graphs. Before another one is captured, the least recently used graph is dropped."""


GraphPlace = tuple[GraphKey, int, int]
"""Key, stage and instance of a captured graph. The instance is the number of the memory pool that the graph
uses; microbatches in flight at the same time use different instances."""


class CapturedPasses:
    """Passes over stages that keep activations from forward to backward, captured as CUDA graphs where that
    saves time. The first pass with a key (the sizes that a graph fixes) runs uncaptured, so that its kernels
    are compiled."""

    def __init__(self, adapted: AdaptedBase, stages: Mapping[int, Base], captures_early: bool = True) -> None:
        """Prepare to capture passes over these stages. If `captures_early`, a pass is captured when its key
        (the sizes that a graph fixes) occurs for the second time, even if that may not save time."""
        self.adapted, self.stages = adapted, stages
        self._plain = PlainPasses(adapted, stages)
        self._payback = Payback(captures_early)
        self._clock = DeviceClock(adapted.base.device)
        self._watched_passes: dict[StageVisit, WatchedPass] = {}
        self._banks = adapted.banks
        self._captures = 0
        self._recompute = NOTHING
        self._seen_keys: set[tuple[GraphKey, int]] = set()
        self._graphs: dict[GraphPlace, Graph] = {}
        self._pools: list[Any] = []
        """Memory pools of the graphs. Graphs of microbatches that are in flight at the same time use
        different pools."""
        self._replayed_graphs: dict[StageVisit, GraphPlace] = {}
        """Maps each pass of a microbatch over a stage to its graph, while its forward has been replayed and
        its backward has not."""

    @property
    def captures(self) -> int:
        return self._captures

    @property
    def failed_captures(self) -> int:
        return 0

    def begin_window(self, program: Program) -> None:
        self._plain.begin_window(program)
        self._recompute = program.recompute

    def begin_round(self) -> None:
        pass

    def forward(
        self, visit: StageVisit, in_flight: InFlight, input_TD: Tensor | None, keeps_activations: bool
    ) -> Tensor:
        assert keeps_activations, "a forward that is recomputed is captured otherwise"
        # Gathered rows may be summed in another order, and whether a pass is captured depends on timing.
        # Their capture begins with a pass that runs, whose sums over shards no other shard would expect.
        gathers = not are_kernels_deterministic() and self.adapted.team is None
        capturable = in_flight.sample_keys is None and self._banks.is_capturable(
            in_flight.device_microbatch.microbatch, gathers
        )
        if self._recompute.tile_rows or not capturable:
            return self._plain.forward(visit, in_flight, input_TD, keeps_activations)
        context = self.adapted.base.shape.context
        key = make_graph_key(in_flight.device_microbatch, self._banks, self._recompute, context)
        is_new = (key, visit.stage) not in self._seen_keys
        self._seen_keys.add((key, visit.stage))
        before = self._captures
        place = None if is_new else self._find_or_capture(visit.stage, key, in_flight.device_microbatch)
        began = self._clock.mark()
        if place is None:
            h_TD = self._plain.forward(visit, in_flight, input_TD, keeps_activations)
        else:
            self._replayed_graphs[visit] = place
            h_TD = self._graphs[place].forward(in_flight.device_microbatch, input_TD)
        if not is_new:
            self._watched_passes[visit] = WatchedPass(
                (key, visit.stage), key.rows, is_replayed=place is not None
            )
            self._record_span(visit, began)
        in_flight.pass_times.is_typical &= not is_new and self._captures == before
        return h_TD

    def backward(
        self, visit: StageVisit, in_flight: InFlight, input_TD: Tensor | None, dh_TD: Tensor
    ) -> Tensor | None:
        place = self._replayed_graphs.pop(visit, None)
        began = self._clock.mark()
        if place is None:
            dinput_TD = self._plain.backward(visit, in_flight, input_TD, dh_TD)
        else:
            dinput_TD = self._graphs[place].backward(dh_TD)
        if visit in self._watched_passes:
            self._record_span(visit, began)
            self._payback.watch(self._watched_passes.pop(visit))
        return dinput_TD

    def _record_span(self, visit: StageVisit, start: Moment) -> None:
        self._watched_passes[visit].spans.append(DeviceSpan(start, self._clock.mark()))

    def evaluate(self, visit: StageVisit, in_flight: InFlight, input_TD: Tensor | None) -> Tensor:
        return self._plain.evaluate(visit, in_flight, input_TD)

    def renumber_microbatches(self, numbers: Mapping[int, int]) -> None:
        """Give the microbatches in flight the indices that they have in the next Program: `numbers` maps each
        old index to the new one. Each microbatch keeps its graphs."""
        self._plain.renumber_microbatches(numbers)
        self._replayed_graphs = renumber_visits(self._replayed_graphs, numbers)
        self._watched_passes = renumber_visits(self._watched_passes, numbers)

    def abandon(self) -> None:
        self._plain.abandon()
        self._replayed_graphs.clear()
        self._watched_passes.clear()
        self._graphs.clear()
        self._pools.clear()

    def _find_or_capture(
        self, stage: int, key: GraphKey, device_microbatch: DeviceMicrobatch
    ) -> GraphPlace | None:
        """Return the key, stage and instance (number of the memory pool) of a graph that no microbatch in
        flight uses, and capture the graph if necessary. None if a capture does not pay off."""
        busy = set(self._replayed_graphs.values())
        taken = {instance for _, _, instance in busy}
        instance = next(number for number in range(len(taken) + 1) if number not in taken)
        place = key, stage, instance
        if place in self._graphs:
            self._graphs[place] = self._graphs.pop(place)
            return place
        if not self._payback.should_capture((key, stage)):
            return None
        if len(self._graphs) >= MAX_GRAPHS:
            del self._graphs[next(oldest for oldest in self._graphs if oldest not in busy)]
        while len(self._pools) <= instance:
            self._pools.append(torch.cuda.graph_pool_handle())
        began = time.perf_counter()
        graph = Graph(self.stages[stage], self._banks, key, self._pools[instance], device_microbatch)
        self._graphs[place] = graph
        self._payback.record_capture(time.perf_counter() - began)
        self._captures += 1
        return place


class Graph:
    """The CUDA graphs of one pass of a microbatch over a stage. For a pass, inputs are copied into fixed
    tensors, then the graphs of forward and backward are replayed."""

    def __init__(
        self, base: Base, banks: Banks, key: GraphKey, pool: Any, device_microbatch: DeviceMicrobatch
    ) -> None:
        """Capture the pass. `device_microbatch` is any microbatch with the sizes in `key`."""
        self._inputs = feed = GraphInputs(banks, key, base.device)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        shape = (0 if base.is_first else key.rows, base.shape.hidden)
        self._input_TD = torch.zeros(shape, dtype=base.dtype, device=base.device)
        self._has_next_stage, self._has_previous_stage = not base.is_last, not base.is_first
        """Whether a later stage reads this stage's output, and whether an earlier stage computes this stage's
        input."""
        stream = torch.cuda.current_stream(base.device)
        with banks.bind(feed.microbatch, Route.tiled, True, feed.rows, feed.gathering.gathered):
            if key.gathered_jobs:
                self._run_uncaptured(base, device_microbatch)
            with capture_graph(self._forward, pool, stream):
                input_TD = self._input_TD.detach().requires_grad_() if self._has_previous_stage else None
                h_TD = base.hidden(feed.microbatch, feed.pack, input_TD)
            self._returns = h_TD.requires_grad
            """Whether there is a backward to replay. False at a first stage on which no job has an
            adapter."""
            self._dh_TD = torch.empty_like(h_TD)
            if self._returns:
                with capture_graph(self._backward, pool, stream):
                    h_TD.backward(self._dh_TD)
                    if input_TD is not None:
                        assert input_TD.grad is not None
                        self._input_TD.copy_(input_TD.grad)
        self._h_TD = h_TD.detach()

    def _run_uncaptured(self, base: Base, device_microbatch: DeviceMicrobatch) -> None:
        """Run the pass once uncaptured, so that the kernels that gather rows are loaded before the capture.
        The gradient of its output is zero, so no job's gradient changes."""
        self._inputs.fill(device_microbatch)
        input_TD = self._input_TD.detach().requires_grad_() if self._has_previous_stage else None
        h_TD = base.hidden(self._inputs.microbatch, self._inputs.pack, input_TD)
        if h_TD.requires_grad:
            h_TD.backward(torch.zeros_like(h_TD))

    def forward(self, device_microbatch: DeviceMicrobatch, input_TD: Tensor | None) -> Tensor:
        """Replay the forward and return the hidden states. At the last stage they are the graph's own tensor,
        valid until `backward`. At other stages they are a copy, which may be sent while the graph is replayed
        for another microbatch."""
        self._inputs.fill(device_microbatch)
        if input_TD is not None:
            self._input_TD.copy_(input_TD)
        self._forward.replay()
        return self._h_TD.clone() if self._has_next_stage else self._h_TD

    def backward(self, dh_TD: Tensor) -> Tensor | None:
        """Replay the backward and return the gradient of the input, or None at the first stage."""
        self._dh_TD.copy_(dh_TD)
        if self._returns:
            self._backward.replay()
        return self._input_TD.clone() if self._has_previous_stage else None


# -- the memory pool of captured work ---------------------------------------------------------------------

Work = Callable[[], None]
"""A function that launches kernels which read and write only at fixed addresses, so that it can be
captured."""


class Pool(Protocol):
    def capture(self, work: Work) -> Work:
        """Capture the work (a function that launches kernels) and return a function that replays it. Whether
        the work itself also runs now depends on the implementation."""

    def has_room(self) -> bool:
        """Return whether there is enough free memory to run work without a graph. Such a run needs about as
        much memory as the pool holds."""

    def clear(self) -> None:
        """Free the memory of the pool. All graphs that use it must have been dropped."""


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Return a context that captures the kernels launched in it into `graph`. Other threads may use their own
    streams meanwhile, for example to read stages from files.

    Garbage collection is disabled in the context, because freeing graphs or page-locked memory would abort a
    capture.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with (
            phase(Phase.CAPTURING),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            yield
    finally:
        if collects:
            gc.enable()


class GraphPool:
    """A memory pool shared by several CUDA graphs, of which only one is replayed at a time. Its results must
    be copied elsewhere before the next replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = torch.cuda.graph_pool_handle()
        self.held_bytes = 0

    def capture(self, work: Work) -> Work:
        # The allocator releases nothing during a capture.
        release_cached_memory(self._device)
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        with capture_graph(graph, self._handle, stream):
            work()
        self.held_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph.replay

    def has_room(self) -> bool:
        total = torch.cuda.get_device_properties(self._device).total_memory
        limit = int(total * torch.cuda.get_per_process_memory_fraction(self._device))
        free, _ = torch.cuda.mem_get_info(self._device)
        used = torch.cuda.memory_allocated(self._device) + self.held_bytes
        within = min(limit - used, free + torch.cuda.memory_reserved(self._device) - used)
        return within >= self.held_bytes

    def clear(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self.held_bytes = 0
        release_cached_memory(self._device)
