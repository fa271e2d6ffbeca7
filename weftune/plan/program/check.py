"""Checks that a Program is valid: every device follows the rules of training, and no device deadlocks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from weftune.plan.program.handover import closed_batches, pass_counts
from weftune.plan.program.layout import WorkerLayout
from weftune.plan.program.program import (
    SCORE_PAYLOADS,
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
    IllegalProgram,
    Inherited,
    Load,
    Payload,
    PlacedSample,
    Program,
    Recv,
    Reduce,
    Reduced,
    Save,
    Score,
    SegmentPlan,
    Send,
    Step,
    batch_samples,
    join_chunks,
)


def check(program: Program, last_steps: dict[str, int] | None = None) -> None:
    """Raise IllegalProgram unless every rule of training holds. `last_steps` maps each job to the last
    optimizer step that it has executed before the program.

    Samples: every sample of a global batch is trained exactly once, at its own offset, either whole or in
    chunks that are alone in their microbatches. Samples of a group are in one microbatch. A sample is
    evaluated or scored (its log-probability is computed) at most once per step. A microbatch stays within the
    capacity and has one segment per job.

    Every device: a Forward follows the arrival of its input from the previous stage. A Backward follows its
    Forward and the arrival of its gradient from the next stage. A Step follows every Backward of its batch
    and, in a pipeline, its Reduce. The batches of a job run in order, each Forward after the previous Step.
    Evaluate, Score and Save follow the step that they name. A streamed stage is used between its Load and its
    Evict. The chunks of a sample run forward in order and backward in reverse.

    Overlap: all half layers (attentions and feed-forwards) of a microbatch run before its Forward, in order,
    and again before its Backward, in reverse. At most two microbatches that overlap are in flight. The layers
    are in one stage and one replica.

    Several devices: every Send has its Recv, in the same order on both devices. A Reduce (sum over devices)
    waits for the Reduce of the next device, and a Step for the Step of the previous device. At the end of the
    window, nothing is pending, unless the window hands over: then batches may be unfinished, but all devices
    agree on the progress of every microbatch and execute the same Steps, and no message is in transit.

    Replicas: every microbatch runs in one replica. Each replica sends the gradient of its part of a batch
    once, after its last Backward. The Reduce that adds the gradients waits for all replicas, and begins with
    an accumulator that the previous Step has cleared. Every device executes every Step. Every replica sends
    the sums of a job's scores once, after it has scored all of its samples, and adds the sums of the other
    replicas before it trains or evaluates the job.
    """
    _check_microbatches(program)
    _check_samples(program)
    _check_groups(program)
    _require(
        len(program.devices) == program.devices_per_replica * program.replicas,
        "replicas differ in their devices",
    )
    shares = [
        batch_samples(one for action, one in program.replica_passes(replica) if isinstance(action, Forward))
        for replica in range(program.replicas)
    ]
    scored = [
        batch_samples(one for action, one in program.replica_passes(replica) if isinstance(action, Score))
        for replica in range(program.replicas)
    ]
    for number in range(len(program.devices)):
        _DeviceCheck(program, number, shares[program.replica(number)], scored, last_steps or {}).run()
    _check_coverage(program)
    _check_forward_only(program)
    _check_replica_scores(program)
    _check_transport(program)
    if program.has_chunks:
        _check_chunks(program)


def _require(condition: bool, sentence: str, *named: object) -> None:
    """Raise IllegalProgram unless `condition` is true. The error message is `sentence` with the values in
    `named` inserted. The values are inserted only on failure, since formatting every action would be slow."""
    if not condition:
        raise IllegalProgram(sentence.format(*named))


def _check_microbatches(program: Program) -> None:
    capacity = program.capacity
    for index, microbatch in enumerate(program.microbatches):
        jobs, rows = microbatch.jobs, microbatch.rows
        _require(len(set(jobs)) == len(jobs), "microbatch {} holds two segments of one job: {}", index, jobs)
        _require(rows <= capacity, "microbatch {} has {} rows, more than {}", index, rows, capacity)


def _check_samples(program: Program) -> None:
    trained: dict[tuple[str, int], list[PlacedSample]] = {}
    plans = [plan for action, plan in program.forward_passes() if isinstance(action, Forward)]
    if program.hands_over:
        begun = program.pass_kinds()
        plans += [plan for number, plan in enumerate(program.microbatches) if number not in begun]
    for microbatch in plans:
        for segment in microbatch.segments:
            trained.setdefault((segment.job, segment.step), []).extend(segment.samples)
    planned = {(batch.job, batch.step): batch for batch in program.batches}
    _require(trained.keys() == planned.keys(), "the batches trained are not the batches planned")
    for key, batch in planned.items():
        by_offset = join_chunks(sorted(trained[key], key=lambda placed: placed.offset))
        _require(
            tuple(by_offset) == batch.samples, "the samples of {} are not trained exactly once each", key
        )
        offset = 0
        for placed in batch.samples:
            _require(placed.offset == offset, "sample {} of {} has the wrong offset", placed.sample, key)
            offset += placed.length


def _check_groups(program: Program) -> None:
    where: dict[tuple[type, str, int, int], int] = {}
    for action, microbatch in program.forward_passes():
        for segment in microbatch.segments:
            for placed in segment.samples:
                if placed.group_number is not None:
                    key = type(action), segment.job, segment.step, placed.group_number
                    found = where.setdefault(key, action.microbatch)
                    told = "group {} of {} is parted"
                    _require(found == action.microbatch, told, placed.group_number, segment.job)


def _check_forward_only(program: Program) -> None:
    seen: set[tuple[type, str, int, PlacedSample]] = set()
    for action, microbatch in program.forward_passes():
        if isinstance(action, ForwardOnly):
            done = "evaluated" if isinstance(action, Evaluate) else "scored"
            for segment in microbatch.segments:
                for placed in segment.samples:
                    key = type(action), segment.job, segment.step, placed
                    again = "sample {} of {} is {} twice at step {}"
                    _require(key not in seen, again, placed.sample, segment.job, done, segment.step)
                    seen.add(key)


def _check_replica_scores(program: Program) -> None:
    """Check that the last stages of all replicas exchange the same scores (log-probabilities of mismatched
    samples)."""
    exchanges = [
        {one for one in actions if isinstance(one, Reduce) and one.payload in SCORE_PAYLOADS}
        for actions in (program.devices[device] for device in program.same_stage_devices(program.stages[-1]))
    ]
    _require(all(one == exchanges[0] for one in exchanges), "replicas exchange different scores")


class _DeviceCheck:
    """A check of the actions of one device in order, which tracks the state of the device after each
    action."""

    def __init__(
        self,
        program: Program,
        device: int,
        trained_counts: Counter[tuple[str, int]],
        scored_counts: Sequence[Counter[tuple[str, int]]],
        last_steps: dict[str, int],
    ) -> None:
        """Prepare the check of a device. `trained_counts` maps each (job, step) to the number of samples that
        the device's replica trains, and `scored_counts` to the number of samples whose log-probabilities each
        replica computes."""
        self.program = program
        self.device = device
        self.replica = program.replica(device)
        self.homes = program.stage_devices(self.replica)
        self.own_stages = {stage for stage, where in enumerate(self.homes) if where == device}
        self.left = {
            (one.job, one.step): trained_counts[one.job, one.step] * len(self.own_stages)
            for one in program.batches
        }
        self.unscored = scored_counts[self.replica].copy()
        self.scored_by_replicas = set().union(*scored_counts) if program.replicas > 1 else set()
        """Pairs of a job and an optimizer step after which replicas score samples of the job (compute their
        log-probabilities)."""
        self.exchanged: set[Reduce] = set()
        """Reduce actions that exchange scores (log-probabilities) between replicas and that the device has
        executed."""
        self.stepped = dict(last_steps)
        self.open_rows: dict[tuple[str, int], int] = {}
        self.handed_out: set[tuple[str, int]] = set()
        self.reduced: set[tuple[str, int]] = set()
        self.made: set[tuple[str, int]] = set()
        self.half_counts: Counter[tuple[type[HalfPass], int]] = Counter()
        """Number of half layers (attentions and feed-forwards) that each microbatch has run in each
        direction, forward and backward."""
        self.in_flight: set[tuple[int, int]] = set()
        self.passed: set[tuple[int, int]] = set()
        self.returned: set[tuple[int, int]] = set()
        self.arrived: set[Recv] = set()
        self.sent: set[Send] = set()
        self.loaded = program.stages_at_start(device)
        self.found = set(self.loaded)
        for number, one in enumerate(program.inherited):
            self._inherit(number, one)

    def _inherit(self, number: int, progress: Inherited) -> None:
        """Add a microbatch that the previous window (a few global batches of every job) has begun, with the
        passes that this device has run for it."""
        stages = len(self.homes)
        if progress.replica != self.replica:
            return
        for stage in self.own_stages:
            if not progress.has_forward(stage):
                continue
            is_returned = progress.has_backward(stage, stages)
            self.passed.add((number, stage))
            (self.returned if is_returned else self.in_flight).add((number, stage))
            for segment in self.program.microbatches[number].segments:
                key = segment.job, segment.step
                self.open_rows[key] = self.open_rows.get(key, 0) + is_returned * len(segment.samples)
        self.arrived |= self._arrived_inputs(number, progress)

    def _arrived_inputs(self, number: int, progress: Inherited) -> set[Recv]:
        """Return the Recv with which this device received the input of a microbatch's next pass in the
        previous window, as a set, which is empty if there was no such Recv."""
        arrival = progress.arrival(len(self.homes))
        if arrival is None or arrival[0] not in self.own_stages:
            return set()
        stage, payload = arrival
        maker = self.homes[stage - 1 if payload == "activation" else stage + 1]
        return set() if maker == self.device else {Recv(number, stage, payload, maker)}

    def _check_handover(self) -> None:
        """Check that this device and all others agree on how many passes of every microbatch have run by the
        end of the program."""
        program, stages = self.program, len(self.homes)
        in_flight: set[tuple[int, int]] = set()
        arrived: set[Recv] = set()
        forwards, backwards = pass_counts(program)
        for action, _ in program.replica_passes(self.replica):
            number = action.microbatch
            if not isinstance(action, Forward):
                continue
            progress = Inherited(number, forwards[number], backwards[number], self.replica)
            own = (stage for stage in self.own_stages if progress.is_in_flight(stage, stages))
            in_flight |= {(number, stage) for stage in own}
            arrived |= self._arrived_inputs(number, progress)
        _require(self.in_flight == in_flight, "device {} leaves other passes in flight", self.device)
        _require(self.arrived == arrived, "device {} leaves a message in transit", self.device)
        _require(self.made == closed_batches(program), "device {} makes other Steps", self.device)

    def run(self) -> None:
        for action in self.program.devices[self.device]:
            match action:
                case Reduce():
                    self._check_reduce(action)
                case Step() | Save():
                    self._check_job_action(action)
                case Load() | Evict():
                    self._check_streaming(action)
                case Send():
                    self._check_send(action)
                case Recv():
                    self._check_receive(action)
                case ForwardHalf() | BackwardHalf():
                    self._check_half(action)
                case Forward() | Evaluate() | Score():
                    self._check_forward(action)
                case Backward():
                    self._check_backward(action)
        drained = all((number, 0) in self.returned for _, number in self.half_counts)
        _require(drained, "half layers are left over at the end of the window")
        if self.program.hands_over:
            self._check_handover()
        else:
            left_over = self.in_flight or self.open_rows
            _require(not left_over, "work is left over at the end of the window")
            _require(not self.arrived, "device {} received what it never used", self.device)
            _require(self.made == self.left.keys(), "device {} does not make every Step", self.device)
        _require(
            self.loaded == self.found, "device {} ends with other stages than it began with", self.device
        )

    def _check_half(self, action: HalfPass) -> None:
        number, stage = self._require_loaded(action)
        program, count = self.program, self.half_counts[type(action), number]
        single = len(self.homes) == program.replicas == 1
        _require(single, "{} needs all layers in one stage of one replica", action)
        _require(program.microbatches[number].chunk is None, "{} runs a part of a chunk", action)
        if isinstance(action, ForwardHalf):
            _require((number, stage) not in self.passed, "{} comes after its Forward", action)
            expected = count
        else:
            _require((number, stage) in self.in_flight, "{} has no Forward before it", action)
            _require(self._has_halves(ForwardHalf, number), "{} has no half layers before it", action)
            expected = program.half_layer_count - 1 - count
        is_next = action.index == expected and count < program.half_layer_count
        _require(is_next, "{} is out of order: {} half layers have run", action, count)
        if isinstance(action, ForwardHalf) and count == 0:
            for segment in program.microbatches[number].segments:
                self._check_step_before(action, segment)
        self.half_counts[type(action), number] += 1
        open_halves = {one for kind, one in self.half_counts if (one, stage) not in self.returned}
        _require(len(open_halves) <= 2, "{} makes three overlapping microbatches in flight", action)

    def _has_halves(self, kind: type[HalfPass], number: int) -> bool:
        return self.half_counts[kind, number] > 0

    def _check_all_halves(self, action: Compute, kind: type[HalfPass], is_overlapped: bool) -> None:
        """Check that a pass comes after all of its half layers (attentions and feed-forwards that run as
        actions of their own), or has none if it does not overlap with another pass."""
        count = self.half_counts[kind, action.microbatch]
        needed = self.program.half_layer_count if is_overlapped else 0
        _require(count == needed, "{} comes after {} of {} half layers", action, count, needed)

    def _check_step_before(self, action: Forward | ForwardHalf, segment: SegmentPlan) -> None:
        """Check that the last Step of a segment's job is the optimizer step right before the segment's global
        batch."""
        before = self.stepped.setdefault(segment.job, segment.step - 1)
        _require(segment.step == before + 1, "{}: {} is only at step {}", action, segment.job, before)

    def _check_forward(self, action: ForwardPass) -> None:
        number, stage = self._require_loaded(action)
        _require((number, stage) not in self.passed, "{} runs a microbatch a second time", action)
        is_overlapped = isinstance(action, Forward) and self._has_halves(ForwardHalf, number)
        self._check_all_halves(action, ForwardHalf, is_overlapped)
        if stage > 0:
            came = (number, stage - 1) in self.passed or self._take_message(
                number, stage, "activation", stage - 1
            )
            _require(came, "{} comes before its activation", action)
        self.passed.add((number, stage))
        for segment in self.program.microbatches[number].segments:
            if stage + 1 == len(self.homes):
                self._check_kl_scores(action, segment)
            if isinstance(action, ForwardOnly):
                now = self.stepped.setdefault(segment.job, segment.step)
                _require(segment.step == now, "{}: {} is at step {}", action, segment.job, now)
                continue
            self._check_step_before(action, segment)
            self.open_rows.setdefault((segment.job, segment.step), 0)
        if isinstance(action, Forward):
            self.in_flight.add((number, stage))

    def _check_kl_scores(self, action: ForwardPass, segment: SegmentPlan) -> None:
        """Check that replicas have exchanged the scores of a job (log-probabilities for its KL term) before a
        loss of the job needs them."""
        job, before = segment.job, segment.step - isinstance(action, Forward)
        if isinstance(action, Score):
            self.unscored[job, before] -= len(segment.samples)
        elif (job, before) in self.scored_by_replicas:
            known = Reduce(job, before, "kl") in self.exchanged
            _require(known, "{} comes before the scores of {} in all replicas are known", action, job)

    def _check_backward(self, action: Backward) -> None:
        number, stage = self._require_loaded(action)
        _require((number, stage) in self.in_flight, "{} has no Forward before it", action)
        if stage + 1 < len(self.program.stages):
            came = (number, stage + 1) in self.returned or self._take_message(
                number, stage, "gradient", stage + 1
            )
            _require(came, "{} comes before its gradient", action)
        self._check_all_halves(action, BackwardHalf, self._has_halves(ForwardHalf, number))
        self.in_flight.remove((number, stage))
        self.returned.add((number, stage))
        for segment in self.program.microbatches[number].segments:
            self.open_rows[segment.job, segment.step] += len(segment.samples)

    def _check_job_action(self, action: Step | Save) -> None:
        job, step = action.job, action.step
        if isinstance(action, Save):
            now = self.stepped.setdefault(job, step)
            _require(now == step, "{}: {} is at step {}", action, job, now)
            return
        rows = self.open_rows.pop((job, step), 0)
        _require(rows == self.left.get((job, step)), "{} comes before the last Backward of its batch", action)
        told = (job, step) in self.reduced or not self.program.is_pipelined
        _require(told, "{} comes before its Reduce", action)
        _require((job, step) not in self.made, "{} comes a second time", action)
        self.made.add((job, step))
        self.stepped[job] = step

    def _check_reduce(self, action: Reduce) -> None:
        key = action.job, action.step
        if action.payload in SCORE_PAYLOADS:
            self._check_score_exchange(action)
            return
        seen = self.handed_out if action.payload == "gradient" else self.reduced
        _require(key not in seen, "{} comes a second time", action)
        seen.add(key)
        rows = self.open_rows.get(key, 0)
        _require(rows == self.left.get(key), "{} comes before the last Backward of its batch", action)
        if action.payload == "gradient":
            _require(rows > 0, "{} hands out nothing", action)
            _require(self.program.replicas > 1, "{} has no replica to hand its gradient to", action)
            return
        if self.program.replicas > 1:
            told = not rows or key in self.handed_out
            _require(told, "{} comes before the other replicas were told of this one's share", action)
            before = self.stepped.setdefault(action.job, action.step - 1)
            _require(before == action.step - 1, "{}: {} is at step {}", action, action.job, before)

    def _check_score_exchange(self, action: Reduce) -> None:
        self._require_own_stage(action, len(self.homes) - 1)
        _require(self.program.replicas > 1, "{} has no replica to exchange scores with", action)
        _require(action not in self.exchanged, "{} comes a second time", action)
        self.exchanged.add(action)
        if action.payload == "scores":
            missing = self.unscored[action.job, action.step]
            _require(not missing, "{} comes before the last Score of this replica", action)
        else:
            handed_out = replace(action, payload="scores") in self.exchanged
            _require(
                handed_out, "{} comes before the other replicas were sent the scores of this one", action
            )

    def _check_streaming(self, action: Load | Evict) -> None:
        self._require_own_stage(action, action.stage)
        if isinstance(action, Load):
            _require(action.stage not in self.loaded, "{} brings a stage that is already there", action)
            self.loaded.add(action.stage)
        else:
            _require(action.stage in self.loaded, "{} gives up a stage that is not there", action)
            self.loaded.remove(action.stage)

    def _check_send(self, action: Send) -> None:
        forward = action.payload == "activation"
        maker = action.stage - 1 if forward else action.stage + 1
        made = self.passed if forward else self.returned
        _require((action.microbatch, maker) in made, "{} comes before what it sends is computed", action)
        _require(
            action.peer == self._stage_device(action.stage), "{} goes to a device without that stage", action
        )
        _require(action.peer != self.device, "{} goes to its own device", action)
        _require(action not in self.sent, "{} is sent a second time", action)
        self.sent.add(action)

    def _check_receive(self, action: Recv) -> None:
        self._require_own_stage(action, action.stage)
        maker = action.stage - 1 if action.payload == "activation" else action.stage + 1
        _require(
            action.peer == self._stage_device(maker),
            "{} comes from a device without the stage before it",
            action,
        )
        _require(action not in self.arrived, "{} is received a second time", action)
        self.arrived.add(action)

    def _take_message(self, number: int, stage: int, payload: Payload, source_stage: int) -> bool:
        wanted = Recv(number, stage, payload, self.homes[source_stage])
        here = wanted in self.arrived
        self.arrived.discard(wanted)
        return here

    def _require_loaded(self, action: Compute | HalfPass) -> tuple[int, int]:
        self._require_own_stage(action, action.stage)
        _require(action.stage in self.loaded, "{} uses a stage that is not loaded", action)
        return action.microbatch, action.stage

    def _require_own_stage(self, action: Action, stage: int) -> None:
        _require(
            stage in self.own_stages, "{} is of a stage that does not live on device {}", action, self.device
        )

    def _stage_device(self, stage: int) -> int | None:
        return self.homes[stage] if 0 <= stage < len(self.homes) else None


def _check_coverage(program: Program) -> None:
    """Check that each microbatch with rows runs on every stage of exactly one replica. For a microbatch
    inherited from the previous window, some stages ran there; if this window hands over unfinished batches,
    some stages may be left to the next window."""
    filled = {index for index, microbatch in enumerate(program.microbatches) if microbatch.segments}
    found: set[int] = set()
    for replica in range(program.replicas):
        own = {action.microbatch for action, _ in program.replica_passes(replica)}
        passed = [
            {
                number
                for number, one in enumerate(program.inherited)
                if one.replica == replica and one.has_forward(stage)
            }
            for stage in range(len(program.stages))
        ]
        for device in range(
            replica * program.devices_per_replica, (replica + 1) * program.devices_per_replica
        ):
            for action in program.devices[device]:
                if isinstance(action, ForwardPass):
                    passed[action.stage].add(action.microbatch)
        covered = program.hands_over or all(one == own for one in passed)
        _require(covered, "a microbatch is never run on one of the stages")
        _require(found.isdisjoint(own), "a microbatch runs in two replicas")
        found |= own
    _require(found <= filled if program.hands_over else found == filled, "a microbatch is never run")


def _check_chunks(program: Program) -> None:
    """Check that the chunks of a sample run in order: a forward reads the keys and values of earlier chunks,
    and a backward needs the gradients from later ones."""
    for forward_pass, plan in program.forward_passes():
        if plan.chunk is not None:
            alone = sum(len(segment.samples) for segment in plan.segments) == 1
            _require(alone, "{} runs a chunk together with other samples", forward_pass)
            trains = isinstance(forward_pass, Forward)
            _require(trains, "{} runs a chunk, as only training does", forward_pass)
    in_flight: dict[tuple[int, str, int, int], list[PlacedSample]] = {}
    """Maps each sample on each stage to its chunks that wait for their backward."""
    for action in chain.from_iterable(program.devices):
        if isinstance(action, Forward | Backward):
            plan = program.microbatches[action.microbatch]
            if (chunk := plan.chunk) is None:
                continue
            segment = plan.segments[0]
            key = action.stage, segment.job, segment.step, chunk.sample_offset
            waiting = in_flight.setdefault(key, [])
            if isinstance(action, Forward):
                in_order = chunk.follows(waiting[-1] if waiting else None)
                waiting.append(chunk)
            else:
                in_order = bool(waiting) and waiting.pop() == chunk
            _require(in_order, "{} runs a chunk of sample {} out of order", action, chunk.sample)


def _check_transport(program: Program) -> None:
    """Check that every device can finish and that no message remains in transit."""
    walk = _TransportCheck(program)
    while walk.advance():
        pass
    waiting = [
        device for device, actions in enumerate(program.devices) if walk.reached[device] < len(actions)
    ]
    if waiting:
        raise IllegalProgram(walk.describe_deadlock(waiting[0]))
    _require(not any(walk.under_way.values()), "something is sent and never received")


class _TransportCheck:
    """A walk through the actions of all devices that finds deadlocks.

    The rules are those of the transport (`run/workers/mailbox.py`), with gloo as with NCCL: messages from one
    device to another arrive in the order in which they were sent, a Send lets its device continue, and a Recv
    waits until its Send has been reached. Therefore, a Program deadlocks in a run if and only if it deadlocks
    in this check. All shards of a device run the same actions. Every action starts its all-reduces over
    shards in a fixed order, and waits only for all-reduces that it or an earlier action has started.
    Therefore all shards start the same all-reduces in the same order, even if those of two microbatches are
    in progress at once.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.reached = [0] * len(program.devices)
        self.under_way: dict[tuple[int, int], deque[Send]] = {}
        self.sent: set[StepMessage] = set()
        self.messages = StepMessages(program)

    def advance(self) -> bool:
        """Advance every device to the first action that must wait for another device. Return whether any
        device advanced."""
        before = list(self.reached)
        for device, actions in enumerate(self.program.devices):
            while self.reached[device] < len(actions) and self._record_action(
                device, actions[self.reached[device]]
            ):
                self.reached[device] += 1
        return self.reached != before

    def describe_deadlock(self, device: int) -> str:
        """Return a sentence that describes a deadlock: the devices that wait for one another, beginning with
        `device`, each with the action at which it waits."""
        told, seen = f"device {device} waits forever", {device}
        while True:
            peer = self._awaited_device(device)
            actions = self.program.devices[peer]
            told += f" at {self.program.devices[device][self.reached[device]]} for device {peer}"
            if self.reached[peer] == len(actions):
                return f"{told}, which has reached the end of its list"
            told += ", which waits"
            if peer in seen:
                return f"{told} at {actions[self.reached[peer]]}"
            seen.add(peer)
            device = peer

    def _awaited_device(self, device: int) -> int:
        """Return the device that `device` waits for, or the first of several such devices."""
        match self.program.devices[device][self.reached[device]]:
            case Recv() as action:
                return action.peer
            case Reduce() | Step() as action:
                needed = self.messages.required_messages(action, device)
                return next(message.device for message in needed if message not in self.sent)
            case action:
                raise AssertionError(f"{action} waits for no device")

    def _record_action(self, device: int, action: Action) -> bool:
        """Run an action in the check and record the message that it sends. Return False, without recording
        anything, if the action still waits for another device."""
        match action:
            case Send():
                self.under_way.setdefault((device, action.peer), deque()).append(action)
            case Recv():
                return self._receive_input(device, action)
            case Reduce() | Step():
                if not self.sent.issuperset(self.messages.required_messages(action, device)):
                    return False
                self.sent.add(StepMessage(device, action))
        return True

    def _receive_input(self, device: int, action: Recv) -> bool:
        coming = self.under_way.get((action.peer, device))
        if not coming:
            return False
        sent = coming.popleft()
        same = (sent.microbatch, sent.stage, sent.payload) == (
            action.microbatch,
            action.stage,
            action.payload,
        )
        differ = "{} meets {}: devices {} and {} differ in their order"
        _require(same, differ, action, sent, action.peer, device)
        return True


HANDED_OUT: dict[Reduced, Reduced] = {"norm": "gradient", "kl": "scores"}
"""Maps the payload of each Reduce that adds the sums of other replicas to the payload of the Reduce that
sends these sums."""


@dataclass(frozen=True, slots=True)
class StepMessage:
    """The message that a device has reached a Reduce (sum over devices) or a Step (optimizer step). Other
    devices may wait for this message."""

    device: int
    action: Reduce | Step


class StepMessages:
    """The messages between devices that Reduces (sums over devices) and Steps (optimizer steps) need. Each
    device holds one stage of one replica.

    Gradients and scores go from each replica's device to the devices of the same stage. In the first replica,
    sums of losses and gradient norms go from each stage to the previous stage. The first device decides
    whether the Step is made; its decision goes to the first device of every replica, and from there to the
    next stages.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._handed_out = [
            {one for one in actions if isinstance(one, Reduce) and one.payload in HANDED_OUT.values()}
            for actions in program.devices
        ]

    def required_messages(self, action: Reduce | Step, device: int) -> tuple[StepMessage, ...]:
        """Return the messages that `device` must have received before it can begin `action`."""
        program = self._program
        if not program.is_pipelined:
            return ()
        stage = device % program.devices_per_replica
        if isinstance(action, Step):
            before = 0 if stage == 0 else device - 1
            return () if device == 0 else (StepMessage(before, action),)
        if action.payload not in HANDED_OUT:
            return ()
        share = replace(action, payload=HANDED_OUT[action.payload])
        others = (
            one
            for one in program.same_stage_devices(device)
            if one != device and share in self._handed_out[one]
        )
        shares = tuple(StepMessage(one, share) for one in others)
        ends = program.replica(device) > 0 or stage + 1 == program.devices_per_replica
        return shares if ends or action.payload == "kl" else (*shares, StepMessage(device + 1, action))

    def receivers(self, action: Reduce | Step, device: int) -> tuple[int, ...]:
        """Return the devices that wait for the message that `device` sends with this action."""
        message, program = StepMessage(device, action), self._program
        waiting = action
        if isinstance(action, Reduce):
            scores = action.payload in SCORE_PAYLOADS
            waiting = replace(action, payload="kl" if scores else "norm")
        firsts = range(0, len(program.devices), program.devices_per_replica) if device == 0 else ()
        around = (one for one in (device - 1, device + 1) if 0 <= one < len(program.devices))
        near = sorted({*program.same_stage_devices(device), *firsts, *around} - {device})
        return tuple(one for one in near if message in self.required_messages(waiting, one))


def check_slots(program: Program, part: WorkerLayout) -> None:
    """Raise IllegalProgram if two streamed stages of a worker would be in the same slot (place in device
    memory) at the same time.

    The program is assumed to pass `check`. Resident stages must not be loaded or evicted. A Load needs an
    empty slot; a pass and an Evict need their stage in its slot. At the beginning and the end of the window,
    the slots contain `part.initial_stages`.
    """
    if len(program.stages) != len(part.stages):
        raise IllegalProgram(
            f"{len(program.stages)} stages are planned, but the layout has {len(part.stages)}"
        )
    slot_of = {stage: part.slot_of_stage(stage) for stage in part.streamed_stages}
    waiting = {slot_of[stage]: stage for stage in part.initial_stages}
    stage_in_slot = dict(waiting)
    for action in program.devices[part.worker]:
        match action:
            case Load(stage) | Evict(stage) if stage not in slot_of:
                raise IllegalProgram(f"{action} moves a resident stage")
            case Load(stage):
                if slot_of[stage] in stage_in_slot:
                    raise IllegalProgram(f"{action} finds stage {stage_in_slot[slot_of[stage]]} in its slot")
                stage_in_slot[slot_of[stage]] = stage
            case Evict(stage):
                if stage_in_slot.get(slot_of[stage]) != stage:
                    raise IllegalProgram(f"{action} gives up a stage that is not in its slot")
                del stage_in_slot[slot_of[stage]]
            case Forward(_, stage) | Backward(_, stage) | Evaluate(_, stage) | Score(_, stage):
                if stage in slot_of and stage_in_slot.get(slot_of[stage]) != stage:
                    raise IllegalProgram(f"{action} uses a stage that is not in its slot")
    if stage_in_slot != waiting:
        raise IllegalProgram("the slots end with other stages than those that wait for the next window")
