"""Schedules (orders of passes) for a pipeline with one stage per device: GPipe, 1F1B, multi-job and template.

GPipe and 1F1B depend only on the list of microbatches. In the multi-job order of mLoRA, every device runs
what is ready, as predicted from the costs, so that microbatches of independent jobs fill each other's idle
time. The template of MuxTune (section 3.4.1) runs buckets, which are groups of microbatches, one after
another, the slowest first, and runs forwards as early as possible. Under its premises, the last stage never
waits between its first forward and its last backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from weftune.plan.program.prices import PassPrice, PricedCluster, Prices
from weftune.plan.program.program import (
    Action,
    Backward,
    Compute,
    Evaluate,
    Forward,
    GlobalBatch,
    Inherited,
    MicrobatchPlan,
    Program,
    Recv,
    Reduce,
    Score,
    Send,
    Step,
    batch_samples,
    cut_sample,
)
from weftune.plan.program.simulate import Arrival, simulate
from weftune.plan.window.dispatch import Dispatch, DispatchRules

Passes = list[list[Action]]
"""Lists of the forwards and backwards of each device in order, without optimizer steps (Steps) and transfers
(Sends and Recvs)."""
EVEN = 1e-9
"""Relative difference below which two durations count as equal."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a window: a few global batches of every job, and their microbatches in the preferred
    order."""

    capacity: int
    microbatches: tuple[MicrobatchPlan, ...]
    batches: tuple[GlobalBatch, ...]
    by_replica: tuple[tuple[int, ...], ...] = ()
    """For each replica of the pipeline, the indices of its new microbatches in their preferred order."""
    inherited: tuple[Inherited, ...] = ()
    """Progress through the stages of the first microbatches, which the previous window (a few global batches
    of every job) left unfinished."""

    @property
    def filled_microbatches(self) -> list[int]:
        """Indices of the microbatches that have rows. All others are no-ops (empty microbatches)."""
        return [number for number, one in enumerate(self.microbatches) if one.segments]

    def replica_microbatches(self, replica: int) -> list[int]:
        """Return the indices of all microbatches of a replica, first those inherited from the previous
        window."""
        inherited = [number for number, one in enumerate(self.inherited) if one.replica == replica]
        return [*inherited, *self.by_replica[replica]]

    @property
    def launches(self) -> list[int]:
        """Indices of the microbatches that have not yet started on the first stage."""
        begun = {number for number, one in enumerate(self.inherited) if one.forwards}
        return [number for number in self.filled_microbatches if number not in begun]


def gpipe(work: Work, stages: int) -> Program:
    return assemble(work, gpipe_passes(work, stages))


def one_forward_one_backward(work: Work, stages: int) -> Program:
    return assemble(work, alternating_passes(work, stages))


def multi_job(work: Work, stages: int, prices: Prices, spare_microbatches: int = 0) -> Program:
    return assemble(work, multi_job_passes(work, stages, prices, spare_microbatches))


def chunked_multi_job(work: Work, stages: int, prices: Prices, max_rows: int) -> Program:
    """Return a program in which every device runs whichever pass is ready (the multi-job order), for
    microbatches some of which are chunks of samples.

    All chunks of a sample are in flight on the last stage together. The limit on microbatches in flight is
    therefore replaced by a limit in bytes: the bytes that each stage keeps in 1F1B with microbatches of
    `max_rows` rows."""
    rules, numbers = multi_job_rules(stages), work.filled_microbatches
    max_bytes = tuple(
        count
        * max(_kept_bytes(max_rows, work.microbatches[one], prices.passes[one][stage]) for one in numbers)
        for stage, count in enumerate(rules.max_in_flight)
    )
    limited = replace(rules, max_in_flight=(len(numbers),) * stages, max_bytes=max_bytes)
    return assemble(work, Dispatch(work.microbatches, [numbers], prices, limited).run())


def _kept_bytes(rows: int, microbatch: MicrobatchPlan, price: PassPrice) -> int:
    """Return the activation bytes that a stage keeps for `rows` rows, in proportion to the bytes that it
    keeps for `microbatch`."""
    return -(-rows * price.kept_bytes // microbatch.rows)


def cut_long_samples(work: Work, rows: int, square_cost: float = 0.0) -> Work:
    """Cut samples of more than `rows` rows, each of which is a microbatch by itself, into chunks whose passes
    take about equally long. `square_cost` is the time per unit of a sample's squared length (attention)
    relative to the time per row."""
    microbatches: list[MicrobatchPlan] = []
    for one in work.microbatches:
        if one.rows <= rows:
            microbatches.append(one)
            continue
        (segment,) = one.segments
        (sample,) = segment.samples
        chunks = cut_sample(sample, rows, square_cost)
        microbatches += [MicrobatchPlan((replace(segment, samples=(chunk,)),)) for chunk in chunks]
    return Work(work.capacity, tuple(microbatches), work.batches)


def gpipe_passes(work: Work, stages: int) -> Passes:
    """Return the GPipe order: all forwards of a round (at most one global batch of each job), then all
    backwards of the round."""
    lists: Passes = [[] for _ in range(stages)]
    for number in rounds(work):
        for stage, actions in enumerate(lists):
            actions += [Forward(one, stage) for one in number]
            actions += [Backward(one, stage) for one in number]
    return lists


def alternating_passes(work: Work, stages: int) -> Passes:
    """Return the 1F1B order: stage s of `stages` runs forwards until `stages` − s microbatches are in flight,
    and then alternates between backward and forward.

    If a microbatch needs an optimizer step that has not run yet, the backwards before that step go first.
    With one job, the pipeline therefore drains after every global batch, unless the job's batches are far
    enough apart (see `merge.earliest_microbatch`).
    """
    return [_alternating_order(work, stage, stages) for stage in range(stages)]


def multi_job_passes(work: Work, stages: int, prices: Prices, spare_microbatches: int = 0) -> Passes:
    """Return the passes in the multi-job order of mLoRA. The first device prefers forwards and all others
    prefer backwards, with as many microbatches in flight as in 1F1B.

    While a job waits for its optimizer step, the next ready microbatch of any other job runs. On all stages
    but the last, `spare_microbatches` additional microbatches may be in flight. With `stages` − 1 of them,
    transfers that take no longer than a pass cause no waits.
    """
    rules = multi_job_rules(stages, spare_microbatches)
    launches = [work.launches]
    return Dispatch(work.microbatches, launches, prices, rules, work.inherited).run()


def multi_job_rules(stages: int, spare_microbatches: int = 0) -> DispatchRules:
    last = stages - 1
    return DispatchRules(
        max_in_flight=tuple(
            stages - stage + (spare_microbatches if stage < last else 0) for stage in range(stages)
        ),
        forward_first=tuple(stage == 0 and stages > 1 for stage in range(stages)),
    )


def rounds(work: Work) -> list[list[int]]:
    """Return the microbatches split into rounds. A round consists of consecutive microbatches in which no job
    has samples of two global batches."""
    found: list[list[int]] = []
    steps: dict[str, int] = {}
    for number in work.filled_microbatches:
        segments = work.microbatches[number].segments
        if not found or any(steps.get(segment.job, segment.step) != segment.step for segment in segments):
            found.append([])
            steps = {}
        found[-1].append(number)
        steps |= {segment.job: segment.step for segment in segments}
    return found


def assemble(
    work: Work, device_passes: Sequence[Iterable[Action]], stage_devices: Sequence[int] = ()
) -> Program:
    """Return a Program from the passes of every device, with optimizer steps (Steps) and transfers (Sends and
    Recvs) inserted.

    `stage_devices` contains the device of each stage; by default, stage s is on device s.
    """
    stages = tuple(stage_devices) or tuple(range(len(device_passes)))
    lists = [device_actions(work, passes, device, stages) for device, passes in enumerate(device_passes)]
    return Program(
        capacity=work.capacity,
        microbatches=work.microbatches,
        batches=work.batches,
        devices=tuple(map(tuple, lists)),
        stages=stages,
        inherited=work.inherited,
    )


def cut_program(program: Program, prices: Prices) -> Program:
    """Return the program without the passes that begin after the first stages of all replicas have run their
    last forward. The next window runs these passes, which then overlap with the forwards of its own global
    batches.

    The Reduces (sums over devices) and the Step (optimizer step) of a global batch remain if all passes of
    the batch do.
    """
    events = simulate(program, prices, PricedCluster(len(program.devices))).events
    starts = {one.action: one.start for one in events if isinstance(one.action, Compute)}
    end = max(one.stop for one in events if isinstance(one.action, Forward) and one.action.stage == 0)
    kept = {action for action, start in starts.items() if start < end}
    unfinished = {
        (segment.job, segment.step)
        for action in starts.keys() - kept
        if action.stage == 0
        for segment in program.microbatches[action.microbatch].segments
    }

    def is_kept(action: Action) -> bool:
        match action:
            case Reduce(job, step) | Step(job, step):
                return (job, step) not in unfinished
            case Send(number, stage, payload):
                maker = Forward(number, stage - 1) if payload == "activation" else Backward(number, stage + 1)
                return maker in kept
            case Recv(number, stage, payload):
                reader = Forward(number, stage) if payload == "activation" else Backward(number, stage)
                return reader in kept
            case _:
                return action in kept

    lists = [[action for action in actions if is_kept(action)] for actions in program.devices]
    _add_final_receives(lists)
    return replace(program, devices=tuple(map(tuple, lists)), hands_over=True)


def _add_final_receives(lists: Sequence[list[Action]]) -> None:
    """Add Recvs at the ends of the devices' lists of actions for everything that is sent but not received in
    the window, so that no message is in transit between two windows."""
    received = {
        (one.microbatch, one.stage, one.payload) for own in lists for one in own if isinstance(one, Recv)
    }
    sends = [(device, one) for device, own in enumerate(lists) for one in own if isinstance(one, Send)]
    for device, sent in sends:
        if (sent.microbatch, sent.stage, sent.payload) not in received:
            lists[sent.peer].append(Recv(sent.microbatch, sent.stage, sent.payload, device))


def _remaining_samples(work: Work, device: int, stages: Sequence[int]) -> Counter[tuple[str, int]]:
    """Return the number of samples of each global batch that still need a backward on a device at the start
    of the window. A sample counts once for each stage of the device."""
    own = [stage for stage, home in enumerate(stages) if home == device]
    remaining = batch_samples(work.microbatches)
    for key in remaining:
        remaining[key] *= len(own)
    for plan, progress in zip(work.microbatches, work.inherited, strict=False):
        returned = sum(progress.has_backward(stage, len(stages)) for stage in own)
        for segment in plan.segments:
            remaining[segment.job, segment.step] -= returned * len(segment.samples)
    return remaining


def device_actions(
    work: Work, passes: Iterable[Action], device: int, stage_devices: Sequence[int]
) -> list[Action]:
    """Return the actions of one device: its passes with the optimizer steps (Steps), the sums over devices
    (Reduces) and the transfers (Sends and Recvs) that belong to them. `stage_devices` contains the device of
    each stage."""
    stepped = _insert_steps(work, passes, device, stage_devices)
    return list(insert_transfers(stepped, stage_devices, arrived_inputs(work, len(stage_devices))))


def arrived_inputs(work: Work, stages: int) -> set[Arrival]:
    """Return the keys of the inputs that devices received in the previous window, for the next passes of the
    microbatches that this window left unfinished."""
    arrivals = ((number, one.arrival(stages)) for number, one in enumerate(work.inherited))
    return {(number, *arrival) for number, arrival in arrivals if arrival is not None}


def _alternating_order(work: Work, stage: int, stages: int) -> list[Action]:
    """Return the passes of one stage in the 1F1B order (one forward, one backward)."""
    remaining = batch_samples(work.microbatches)
    waiting = work.filled_microbatches
    flying: list[int] = []
    for number, progress in enumerate(work.inherited):
        if progress.has_forward(stage):
            waiting.remove(number)
        if progress.is_in_flight(stage, stages):
            flying.append(number)
        elif progress.has_backward(stage, stages):
            for segment in work.microbatches[number].segments:
                remaining[segment.job, segment.step] -= len(segment.samples)
    waiting.reverse()
    actions: list[Action] = []
    back = 0

    def must_wait(number: int) -> bool:
        segments = work.microbatches[number].segments
        return any(remaining[segment.job, segment.step - 1] > 0 for segment in segments)

    while waiting or back < len(flying):
        if waiting and len(flying) - back < stages - stage and not must_wait(waiting[-1]):
            flying.append(waiting.pop())
            actions.append(Forward(flying[-1], stage))
            continue
        assert back < len(flying), "a microbatch waits for a batch that comes after it"
        actions.append(Backward(flying[back], stage))
        for segment in work.microbatches[flying[back]].segments:
            remaining[segment.job, segment.step] -= len(segment.samples)
        back += 1
    return actions


def _insert_steps(
    work: Work, actions: Iterable[Action], device: int, stages: Sequence[int]
) -> Iterable[Action]:
    """Yield the actions of a device together with the optimizer steps (Steps) of all global batches. A Step
    follows the last Backward of its batch, or is at the start if the previous window ran that Backward.

    With several devices, a Reduce (a sum over devices) comes between that Backward and the Step. On all
    devices but the first, the Step is as late as possible, before the job's next Forward or at the end, so
    that devices rarely wait for the decision of the first device.
    """
    remaining, several = _remaining_samples(work, device, stages), len(set(stages)) > 1
    pending: dict[str, Step] = {}
    for key in [key for key, count in remaining.items() if not count]:
        yield Reduce(*key)
        pending[key[0]] = Step(*key)
    for action in actions:
        if isinstance(action, Forward):
            for job in work.microbatches[action.microbatch].jobs:
                if job in pending:
                    yield pending.pop(job)
        yield action
        if isinstance(action, Backward):
            for segment in work.microbatches[action.microbatch].segments:
                key = segment.job, segment.step
                remaining[key] -= len(segment.samples)
                if not remaining[key]:
                    if several:
                        yield Reduce(*key)
                    pending[segment.job] = Step(*key)
            if device == 0 or not several:
                yield from pending.values()
                pending.clear()
    yield from pending.values()


def insert_transfers(
    actions: Iterable[Action],
    stage_devices: Sequence[int],
    received_inputs: Collection[Arrival] = (),
) -> Iterable[Action]:
    """Yield the actions with a Recv before each pass whose input comes from another device, and a Send after
    each pass whose output goes to another device. Inputs in `received_inputs` get no Recv, since they were
    received in the previous window."""
    for action in actions:
        match action:
            case Forward(number, stage) | Evaluate(number, stage) | Score(number, stage):
                is_here = (number, stage, "activation") in received_inputs
                if stage > 0 and stage_devices[stage - 1] != stage_devices[stage] and not is_here:
                    yield Recv(number, stage, "activation", stage_devices[stage - 1])
                yield action
                if stage + 1 < len(stage_devices) and stage_devices[stage + 1] != stage_devices[stage]:
                    yield Send(number, stage + 1, "activation", stage_devices[stage + 1])
            case Backward(number, stage):
                is_here = (number, stage, "gradient") in received_inputs
                if (
                    stage + 1 < len(stage_devices)
                    and stage_devices[stage + 1] != stage_devices[stage]
                    and not is_here
                ):
                    yield Recv(number, stage, "gradient", stage_devices[stage + 1])
                yield action
                if stage > 0 and stage_devices[stage - 1] != stage_devices[stage]:
                    yield Send(number, stage - 1, "gradient", stage_devices[stage - 1])
            case _:
                yield action


@dataclass(frozen=True, slots=True)
class Queue:
    """A bucket of MuxTune's template: microbatches of equal cost, with the cost of each such microbatch on
    every stage."""

    microbatches: tuple[int, ...]
    passes: tuple[PassPrice, ...]

    @property
    def latency(self) -> float:
        """Seconds of the forward and backward of one microbatch on the first stage. Buckets (microbatches of
        equal cost) are sorted by this latency."""
        return self.passes[0].forward + self.passes[0].backward


@dataclass(frozen=True, slots=True)
class PipelineTemplate:
    """A program in the template order of MuxTune, which runs buckets (groups of microbatches) one after
    another, the slowest first."""

    program: Program
    order: tuple[int, ...]
    """Indices of the queues (buckets of microbatches of equal cost) in the order in which they run."""
    violations: tuple[str, ...]
    """Sentences about the premises of MuxTune's template order that do not hold. If all premises hold, the
    last stage never waits between its first forward and its last backward."""


def template_order(work: Work, queues: Sequence[Queue], max_bytes: Sequence[int] = ()) -> PipelineTemplate:
    """Return a program in the template order of MuxTune, which runs buckets of microbatches (`queues`) one
    after another, the slowest first. The queues together contain all microbatches of `work`.

    `max_bytes` limits the bytes that microbatches in flight keep on each stage. Empty means no limit.
    """
    assert queues, "there is a bucket to run"
    order = sorted(range(len(queues)), key=lambda index: -queues[index].latency)
    sorted_queues = [queues[index] for index in order]
    launches = [number for queue in sorted_queues for number in queue.microbatches]
    assert sorted(launches) == work.filled_microbatches, "the queues do not hold every microbatch once"
    dispatch = _dispatch(work, launches, queue_prices(work, queues), max_bytes)
    program = assemble(work, dispatch.run())
    scarce = [f"stage {stage} has no memory for an earlier launch" for stage in sorted(dispatch.delayed)]
    return PipelineTemplate(program, tuple(order), (*_violated_premises(work, sorted_queues), *scarce))


def eager_passes(work: Work, prices: Prices, max_bytes: Sequence[int]) -> Passes:
    """Return the passes in the template order of MuxTune, which runs every forward as early as memory allows,
    for microbatches of unequal cost that are already sorted by bucket, the slowest bucket first."""
    return _dispatch(work, work.filled_microbatches, prices, max_bytes).run()


def _dispatch(work: Work, launches: Sequence[int], prices: Prices, max_bytes: Sequence[int]) -> Dispatch:
    stages = len(prices.passes[0])
    rules = DispatchRules(
        max_in_flight=(len(launches),) * stages, forward_first=(False,) * stages, max_bytes=tuple(max_bytes)
    )
    return Dispatch(work.microbatches, [launches], prices, rules)


def queue_prices(work: Work, queues: Sequence[Queue]) -> Prices:
    by_number = {number: queue.passes for queue in queues for number in queue.microbatches}
    idle = (PassPrice(0.0, 0.0),) * len(queues[0].passes)
    return Prices(tuple(by_number.get(number, idle) for number in range(len(work.microbatches))))


def _violated_premises(work: Work, queues: Sequence[Queue]) -> list[str]:
    """Return a sentence for each premise of MuxTune's template order that `queues` (buckets of microbatches)
    violate. The queues are in the order in which they run."""
    broken: list[str] = []
    for number, queue in enumerate(queues, 1):
        if any(abs(one.forward - one.backward) > EVEN * one.forward for one in queue.passes):
            broken.append(f"the forward and the backward of bucket {number} take different times")
        paces = [one.forward for one in queue.passes]
        if max(paces) - min(paces) > EVEN * max(paces):
            broken.append(f"bucket {number} takes different times on different stages")
    steps = Counter(batch.job for batch in work.batches)
    again = [job for job, count in steps.items() if count > 1]
    if again:
        broken.append(f"{again[0]} has several global batches, and each waits for the Step before it")
    return broken
