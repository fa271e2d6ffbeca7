"""An event simulator for Programs: when each action begins and ends, and how much memory is in use.

Each device has five lanes that overlap: compute, send, receive, load and sum. Actions of the compute, send
and load lanes keep their order in the device's list. A pass waits for its Recv and for the Load of its stage.
A Send waits for its pass, for the send lane of its device and for the receive lane of the other. Received
data stays in memory until it is used. A Load begins once the preceding compute action in the list has begun.
A Reduce (sum over devices) waits for the Reduce of the next device, and a Step for the Step of the previous
device. The messages of both are small, so they take only the latency of the link and occupy no lane.
Gradients that replicas exchange take the time of their size, and occupy no lane either. Sums over shards
(all-reduces) occupy the compute lane: each list of actions stands for all shards of its layers, which wait
for every sum together. A gradient is summed over shards at its first Reduce, or at its Step if there is none.
Only the sum that follows a half layer (an attention or a feed-forward, see `ForwardHalf`) occupies the sum
lane instead, and the next action of the same microbatch waits for it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import count

import numpy as np

from weftune.plan.program.check import StepMessage, StepMessages
from weftune.plan.program.prices import HalfPrice, PricedCluster, Prices
from weftune.plan.program.program import (
    Action,
    Backward,
    BackwardHalf,
    Compute,
    Evaluate,
    Evict,
    Forward,
    ForwardHalf,
    ForwardOnly,
    ForwardPass,
    HalfPass,
    Load,
    Program,
    Recv,
    Reduce,
    Save,
    Score,
    Send,
    Step,
)

Arrival = tuple[int, int, str]
"""Key of data that is sent between stages: (microbatch, receiving stage, "activation" or "gradient")."""


class Lane(StrEnum):
    compute = "compute"
    send = "send"
    receive = "receive"
    load = "load"
    sum = "sum"


@dataclass(frozen=True, slots=True)
class Span:
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start

    def computing_seconds(self, event: Event) -> float:
        """Return the seconds within this span of time in which the device computes the action of `event`.
        Waits for all-reduces over shards are assumed to be spread evenly over the event."""
        inside = min(event.stop, self.stop) - max(event.start, self.start)
        if inside <= 0:
            return 0.0
        return (
            inside * (1.0 - event.waiting_seconds / (event.stop - event.start))
            if event.waiting_seconds
            else inside
        )


@dataclass(frozen=True, slots=True)
class Event:
    """A simulated action on one lane of a device, such as compute or send, with the times in seconds at which
    the action begins and ends."""

    device: int
    lane: Lane
    action: Action
    start: float
    stop: float
    waiting_seconds: float = 0.0
    """Seconds of the action in which its device waits for all-reduces over shards."""


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes in use on a device from `time`, in seconds, until the next change."""

    time: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The result of a simulation: all events, and the memory in use on each device over time."""

    devices: int
    events: tuple[Event, ...]
    """All events in the order in which they end. Each lane of a device (such as compute or send) runs one
    action at a time."""
    memory: tuple[tuple[Level, ...], ...]
    """Bytes in use over time, for each device."""

    @property
    def makespan(self) -> float:
        return max((event.stop for event in self.events), default=0.0)

    @property
    def peaks(self) -> tuple[int, ...]:
        """Maximum bytes in use at any time, for each device."""
        return tuple(max((level.bytes for level in levels), default=0) for levels in self.memory)

    def events_of(self, device: int, lane: Lane = Lane.compute) -> Iterator[Event]:
        return (event for event in self.events if event.device == device and event.lane is lane)

    def busy_fractions(self, span: Span | None = None) -> tuple[float, ...]:
        """Return, for each device, the fraction of `span` in which it computes. The default is the whole
        timeline."""
        span = span or Span(0.0, self.makespan)
        return tuple(self.busy_fraction(device, span) for device in range(self.devices))

    def bubbles(self, span: Span | None = None) -> tuple[float, ...]:
        return tuple(1.0 - share for share in self.busy_fractions(span))

    def busy_fraction(self, device: int, span: Span) -> float:
        if span.seconds <= 0:
            return 1.0
        return sum(map(span.computing_seconds, self.events_of(device))) / span.seconds

    @property
    def sum_seconds(self) -> float:
        """Seconds in which devices wait for all-reduces over shards, summed over all devices of the
        Program."""
        return sum(event.waiting_seconds for event in self.events)

    def steady_span(self) -> Span:
        """Return the span of the steady state, from the time when every device has begun its first forward to
        the time when the first device has ended its last forward. The span is empty if the program is too
        short."""
        begun, feeding = 0.0, self.makespan
        for device in range(self.devices):
            forwards = [one for one in self.events_of(device) if isinstance(one.action, ForwardPass)]
            if forwards:
                begun = max(begun, forwards[0].start)
                feeding = min(feeding, forwards[-1].stop)
        return Span(begun, max(begun, feeding))

    def span_between_steps(self, device: int, job: str, first: int, last: int) -> Span:
        """Return the span of time from the end of a job's optimizer step `first` to the end of its step
        `last`."""
        ends = {
            event.action.step: event.stop
            for event in self.events_of(device)
            if isinstance(event.action, Step) and event.action.job == job
        }
        return Span(ends[first], ends[last])


def memory_levels(changes: Iterable[Level], initial_bytes: int) -> tuple[Level, ...]:
    """Return the bytes in use over time, computed from changes in bytes. At equal times, memory is released
    before memory is allocated."""
    ordered = sorted(changes, key=lambda change: (change.time, change.bytes))
    sums = initial_bytes + np.cumsum([change.bytes for change in ordered], dtype=np.int64)
    return (
        Level(0.0, initial_bytes),
        *(Level(one.time, int(total)) for one, total in zip(ordered, sums, strict=True)),
    )


def simulate(program: Program, prices: Prices, cluster: PricedCluster) -> Timeline:
    """Simulate a program, which must be valid (see `check`), and return its timeline."""
    assert cluster.devices >= len(program.devices), "the cluster has fewer devices than the program"
    run = _Simulation(program, prices, cluster)
    run.run()
    stuck = [lanes.compute[0][0] for lanes in run.lanes if lanes.compute]
    assert not stuck, f"the simulation ended before {stuck[0]}: was the program checked?"
    memory = tuple(
        memory_levels(lanes.memory_changes, run.initial_bytes(number))
        for number, lanes in enumerate(run.lanes)
    )
    return Timeline(len(program.devices), tuple(run.events), memory)


@dataclass(slots=True)
class _Lanes:
    """The state of one device in the simulation: the remaining actions of its lanes (compute, send, receive
    and load, which run in parallel), and what these lanes wait for."""

    compute: deque[tuple[Action, int]] = field(default_factory=deque)
    """Remaining compute actions, each with the number of Loads that must have ended before the action
    begins."""
    sends: deque[Send] = field(default_factory=deque)
    loads: deque[tuple[Load, int]] = field(default_factory=deque)
    """Remaining Load actions, each with the number of compute actions that must have begun before the
    Load."""
    begun_count: int = 0
    """Number of compute actions that have begun."""
    loaded_count: int = 0
    """Number of Loads that have ended."""
    is_computing: bool = False
    is_sending: bool = False
    is_receiving: bool = False
    is_loading: bool = False
    arrived_inputs: set[Arrival] = field(default_factory=set)
    unsent_results: set[Arrival] = field(default_factory=set)
    """Keys of results (activations or gradients) that this device has computed but not sent yet."""
    decisions: set[StepMessage] = field(default_factory=set)
    """Messages that this device has received about Reduces (sums over devices) and Steps (optimizer steps) of
    other devices."""
    summed_microbatches: set[int] = field(default_factory=set)
    """Indices of the microbatches whose all-reduce over shards is in progress or waits for an earlier
    all-reduce."""
    sums_end: float = 0.0
    """Time in seconds at which all started all-reduces over shards will have ended."""
    waiting_senders: deque[int] = field(default_factory=deque)
    """Indices of the devices with a Send that waits until this device's receive lane is free."""
    memory_changes: list[Level] = field(default_factory=list)


@dataclass(slots=True)
class _Flow:
    """A Load in progress. Its rate in bytes per second depends on the number of concurrent Loads under the
    same PCIe root complex."""

    device: int
    action: Load
    start: float
    remaining_bytes: float
    rate: float = 0.0
    updated_at: float = 0.0
    version: int = 0


class _Simulation:
    def __init__(self, program: Program, prices: Prices, cluster: PricedCluster) -> None:
        self.program, self.prices, self.cluster = program, prices, cluster
        self.lanes = [_split_lanes(actions) for actions in program.devices]
        self.homes = [
            program.stage_devices(program.replica(device)) for device in range(len(program.devices))
        ]
        self.messages = StepMessages(program)
        self.events: list[Event] = []
        self.flows: dict[int, list[_Flow]] = {}
        self.now = 0.0
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self.inherited_arrivals: list[set[Arrival]] = [set() for _ in program.devices]
        """For each device, the keys of the inputs of passes that arrived before the program started."""
        for number, one in enumerate(program.inherited):
            if (arrival := one.arrival(len(program.stages))) is not None:
                home = program.stage_devices(one.replica)[arrival[0]]
                self.inherited_arrivals[home].add((number, *arrival))
        for lanes, arrivals in zip(self.lanes, self.inherited_arrivals, strict=True):
            lanes.arrived_inputs |= arrivals

    def run(self) -> None:
        for device in range(len(self.lanes)):
            self._start_lanes(device)
        while self._ends:
            self.now, _, end = heapq.heappop(self._ends)
            end()

    def initial_bytes(self, device: int) -> int:
        """Return the bytes in use on a device at the start of the program: the weights of the stages on the
        device, and the kept activations and arrived inputs of microbatches that the previous program left
        unfinished."""
        weights = sum(map(self._weight_bytes, self.program.stages_at_start(device)))
        stages = range(len(self.program.stages))
        kept = sum(
            self.prices.passes[number][stage].kept_bytes
            for number, one in enumerate(self.program.inherited)
            for stage in stages
            if self.program.stage_devices(one.replica)[stage] == device
            and one.is_in_flight(stage, len(stages))
        )
        return weights + kept + sum(map(self._message_bytes, self.inherited_arrivals[device]))

    def _schedule_end(self, time: float, end: Callable[[], None]) -> None:
        heapq.heappush(self._ends, (time, next(self._number), end))

    def _start_lanes(self, device: int) -> None:
        self._start_compute(device)
        self._start_send(device)
        self._start_load(device)

    def _record_event(self, device: int, lane: Lane, action: Action, start: float) -> None:
        waited = self._sum_seconds(action, device) if lane is Lane.compute else 0.0
        self.events.append(Event(device, lane, action, start, self.now, waited))

    def _change_memory(self, device: int, size: int) -> None:
        if size:
            self.lanes[device].memory_changes.append(Level(self.now, size))

    # -- compute -----------------------------------------------------------------------------------------

    def _start_compute(self, device: int) -> None:
        lanes = self.lanes[device]
        if lanes.is_computing or not lanes.compute or not self._is_ready(lanes, *lanes.compute[0], device):
            return
        action, _ = lanes.compute.popleft()
        lanes.is_computing = True
        lanes.begun_count += 1
        start = self.now
        self._begin_action(device, action)
        seconds = self._action_seconds(action, device)
        self._schedule_end(start + seconds, lambda: self._end_compute(device, action, start))
        self._start_load(device)

    def _is_ready(self, lanes: _Lanes, action: Action, loads: int, device: int) -> bool:
        if lanes.loaded_count < loads:
            return False
        if isinstance(action, Reduce | Step):
            return lanes.decisions.issuperset(self.messages.required_messages(action, device))
        if isinstance(action, Compute | HalfPass) and action.microbatch in lanes.summed_microbatches:
            return False
        if not isinstance(action, Compute):
            return True
        arrival = self._awaited_input(action, device)
        return arrival is None or arrival in lanes.arrived_inputs

    def _awaited_input(self, action: Compute, device: int) -> Arrival | None:
        """Return the key of the activation or gradient that a pass needs from another device, or None."""
        back = isinstance(action, Backward)
        maker = action.stage + 1 if back else action.stage - 1
        if not 0 <= maker < len(self.program.stages) or self.homes[device][maker] == device:
            return None
        return action.microbatch, action.stage, "gradient" if back else "activation"

    def _send_messages(self, action: Reduce | Step, device: int) -> None:
        sends_gradient = isinstance(action, Reduce) and action.payload == "gradient"
        sizes = self.prices.adapter_bytes.get(action.job, ()) if sends_gradient else ()
        seconds = self.cluster.link.seconds(sizes[device % self.program.devices_per_replica] if sizes else 0)
        for receiver in self.messages.receivers(action, device):
            self._schedule_end(
                self.now + seconds, partial(self._receive_message, StepMessage(device, action), receiver)
            )

    def _receive_message(self, message: StepMessage, device: int) -> None:
        self.lanes[device].decisions.add(message)
        self._start_compute(device)

    def _action_seconds(self, action: Action, device: int) -> float:
        match action:
            case ForwardHalf() | BackwardHalf():
                half = self._half_price(action)
                return half.seconds(action.index) if half else 0.0
            case Forward(number, stage) | Evaluate(number, stage) | Score(number, stage):
                return max(0.0, self.prices.passes[number][stage].forward - self._seconds_of_halves(action))
            case Backward(number, stage):
                return max(0.0, self.prices.passes[number][stage].backward - self._seconds_of_halves(action))
            case Reduce():
                return self._sum_seconds(action, device)
            case Step():
                return self.prices.step + self._sum_seconds(action, device)
        return 0.0

    def _sum_seconds(self, action: Action, device: int) -> float:
        """Return the seconds of an action in which its device waits for all-reduces over shards."""
        match action:
            case Forward(number, stage) | Evaluate(number, stage) | Score(number, stage):
                return self.prices.passes[number][stage].forward_sum_seconds - self._sums_of_halves(action)
            case Backward(number, stage):
                return self.prices.passes[number][stage].backward_sum_seconds - self._sums_of_halves(action)
            case Reduce(job):
                is_first = action.payload == "gradient" or self.program.replicas == 1
                return self._gradient_seconds(job, device) if is_first else 0.0
            case Step(job) if len(self.program.devices) == 1:
                return self._gradient_seconds(job, device)
        return 0.0

    def _half_price(self, action: Compute | HalfPass) -> HalfPrice | None:
        """Return the cost of the half layers (attention and feed-forward) of an action's forward or backward,
        or None if the pass does not run in half layers."""
        if action.microbatch not in self.program.overlapped_microbatches:
            return None
        price = self.prices.passes[action.microbatch][action.stage]
        return price.backward_half if isinstance(action, Backward | BackwardHalf) else price.forward_half

    def _sums_of_halves(self, action: Compute) -> float:
        """Return the seconds of all all-reduces over shards that follow the half layers (attentions and
        feed-forwards) of a pass."""
        half = self._half_price(action)
        return half.sum_seconds * self.program.half_layer_count if half else 0.0

    def _seconds_of_halves(self, action: Compute) -> float:
        """Return the seconds of a pass's half layers (attentions and feed-forwards) and their all-reduces,
        which end before the rest of the pass begins."""
        half, count = self._half_price(action), self.program.half_layer_count
        return half.computed_seconds(count) + self._sums_of_halves(action) if half else 0.0

    def _gradient_seconds(self, job: str, device: int) -> float:
        """Return the seconds of the all-reduce over shards of a job's gradient on the stage of a device."""
        by_stage = self.prices.gradient_sum_seconds.get(job, ())
        return by_stage[device % self.program.devices_per_replica] if by_stage else 0.0

    def _begin_action(self, device: int, action: Action) -> None:
        if isinstance(action, Compute) and (result := self._sent_result(action, device)):
            self._change_memory(device, self._message_bytes(result))
        match action:
            case ForwardHalf(number, stage, 0):
                self._change_memory(device, self.prices.passes[number][stage].kept_bytes)
            case Forward(number) if number in self.program.overlapped_microbatches:
                pass  # counted at the first half layer
            case Forward(number, stage) | Evaluate(number, stage) | Score(number, stage):
                self._change_memory(device, self.prices.passes[number][stage].kept_bytes)
                if (wanted := self._awaited_input(action, device)) is not None:
                    self._change_memory(
                        device, -self._message_bytes(wanted)
                    )  # counted in kept_bytes from here on
            case Backward(number, stage):
                self._change_memory(device, self.prices.passes[number][stage].working_bytes)
            case Evict(stage):
                self._change_memory(device, -self._weight_bytes(stage))
            case Step():
                self._send_messages(action, device)  # the decision is sent before the step is executed

    def _end_compute(self, device: int, action: Action, start: float) -> None:
        self.lanes[device].is_computing = False
        self._record_event(device, Lane.compute, action, start)
        if isinstance(action, HalfPass):
            self._begin_sum(device, action)
        if isinstance(action, Reduce):
            self._send_messages(action, device)
        if isinstance(action, Backward | ForwardOnly):
            self._change_memory(device, -self.prices.passes[action.microbatch][action.stage].kept_bytes)
        if isinstance(action, Backward):
            self._change_memory(device, -self.prices.passes[action.microbatch][action.stage].working_bytes)
        if isinstance(action, Backward) and (wanted := self._awaited_input(action, device)) is not None:
            self._change_memory(device, -self._message_bytes(wanted))
        if isinstance(action, Compute) and (result := self._sent_result(action, device)):
            self.lanes[device].unsent_results.add(result)
        self._start_lanes(device)

    def _begin_sum(self, device: int, action: HalfPass) -> None:
        """Begin the all-reduce over shards that follows a half layer (attention or feed-forward), as soon as
        the previous all-reduce of the device has ended."""
        lanes, half = self.lanes[device], self._half_price(action)
        if half is None:
            return
        start = max(self.now, lanes.sums_end)
        lanes.sums_end = start + half.sum_seconds
        lanes.summed_microbatches.add(action.microbatch)
        self._schedule_end(lanes.sums_end, lambda: self._end_sum(device, action, start))

    def _end_sum(self, device: int, action: HalfPass, start: float) -> None:
        self.lanes[device].summed_microbatches.remove(action.microbatch)
        self._record_event(device, Lane.sum, action, start)
        self._start_lanes(device)

    def _sent_result(self, action: Compute, device: int) -> Arrival | None:
        """Return the key of the activation or gradient that a pass sends to another device, or None."""
        back = isinstance(action, Backward)
        taker = action.stage - 1 if back else action.stage + 1
        if not 0 <= taker < len(self.program.stages) or self.homes[device][taker] == device:
            return None
        return action.microbatch, taker, "gradient" if back else "activation"

    # -- transport ---------------------------------------------------------------------------------------

    def _start_send(self, device: int) -> None:
        lanes = self.lanes[device]
        if lanes.is_sending or not lanes.sends:
            return
        action = lanes.sends[0]
        sent: Arrival = (action.microbatch, action.stage, action.payload)
        if sent not in lanes.unsent_results:
            return
        taker = self.lanes[action.peer]
        if taker.is_receiving:
            if device not in taker.waiting_senders:
                taker.waiting_senders.append(device)
            return
        lanes.sends.popleft()
        lanes.is_sending = taker.is_receiving = True
        start = self.now
        self._change_memory(action.peer, self._message_bytes(sent))
        seconds = self.cluster.link.seconds(self._message_bytes(sent))
        self._schedule_end(start + seconds, lambda: self._end_send(device, action, start))

    def _end_send(self, device: int, action: Send, start: float) -> None:
        lanes, taker = self.lanes[device], self.lanes[action.peer]
        lanes.is_sending = taker.is_receiving = False
        sent: Arrival = (action.microbatch, action.stage, action.payload)
        lanes.unsent_results.remove(sent)
        taker.arrived_inputs.add(sent)
        self._change_memory(device, -self._message_bytes(sent))
        self._record_event(device, Lane.send, action, start)
        received = Recv(action.microbatch, action.stage, action.payload, device)
        self._record_event(action.peer, Lane.receive, received, start)
        waiting = [*taker.waiting_senders]
        taker.waiting_senders.clear()
        for sender in (*waiting, device):
            self._start_send(sender)
        self._start_compute(action.peer)

    def _message_bytes(self, arrival: Arrival) -> int:
        number, taker, what = arrival
        passes = self.prices.passes[number]
        return (
            passes[taker - 1].activation_bytes if what == "activation" else passes[taker + 1].gradient_bytes
        )

    def _weight_bytes(self, stage: int) -> int:
        return self.prices.weight_bytes[stage] if self.prices.weight_bytes else 0

    # -- loads -------------------------------------------------------------------------------------------

    def _start_load(self, device: int) -> None:
        lanes = self.lanes[device]
        if lanes.is_loading or not lanes.loads or lanes.begun_count < lanes.loads[0][1]:
            return
        action, _ = lanes.loads.popleft()
        lanes.is_loading = True
        size = self._weight_bytes(action.stage)
        self._change_memory(device, size)
        flow = _Flow(device, action, self.now, size)
        self._schedule_end(self.now + self.cluster.host_link.latency, lambda: self._begin_flow(flow))

    def _begin_flow(self, flow: _Flow) -> None:
        root = self.cluster.device_roots[flow.device] if self.cluster.device_roots else 0
        self.flows.setdefault(root, []).append(flow)
        self._divide_bandwidth(root)

    def _divide_bandwidth(self, root: int) -> None:
        """Update the progress of all Loads under a PCIe root complex, and divide its bandwidth among them."""
        flows = self.flows[root]
        moving = flows[:1] if self.cluster.serializes_loads else flows
        for flow in flows:
            if flow.remaining_bytes and self.now > flow.updated_at:
                flow.remaining_bytes -= flow.rate * (self.now - flow.updated_at)
            flow.updated_at = self.now
            flow.version += 1
            flow.rate = 0.0
        for flow in moving:
            flow.rate = min(
                self.cluster.host_link.bandwidth, self.cluster.root_bandwidths[root] / len(moving)
            )
            end = self.now + max(0.0, flow.remaining_bytes) / flow.rate
            self._schedule_end(end, partial(self._end_load, flow, root, flow.version))

    def _end_load(self, flow: _Flow, root: int, version: int) -> None:
        """End a simulated Load, unless its rate has changed since its end was predicted."""
        if flow.version != version:
            return
        self.flows[root].remove(flow)
        self._divide_bandwidth(root)
        lanes = self.lanes[flow.device]
        lanes.is_loading = False
        lanes.loaded_count += 1
        self._record_event(flow.device, Lane.load, flow.action, flow.start)
        self._start_lanes(flow.device)


def _split_lanes(actions: tuple[Action, ...]) -> _Lanes:
    lanes = _Lanes()
    brought: dict[int, int] = {}
    for action in actions:
        match action:
            case Send():
                lanes.sends.append(action)
            case Recv():
                pass  # handled with its Send
            case Load(stage):
                lanes.loads.append((action, len(lanes.compute)))
                brought[stage] = len(lanes.loads)
            case Forward() | Backward() | Evaluate() | Score() | ForwardHalf() | BackwardHalf() | Evict():
                lanes.compute.append((action, brought.get(action.stage, 0)))
            case Reduce() | Step() | Save():
                lanes.compute.append((action, 0))
    return lanes
