"""Agreement of devices on steps: messages that a device needs before it executes a Reduce or a Step."""

from __future__ import annotations

from dataclasses import dataclass

from weftune.plan.program.program import Program, Reduce, Step


@dataclass(frozen=True, slots=True)
class Told:
    """A message that a device has reached a Reduce or a Step."""

    device: int
    action: Reduce | Step


class Tellers:
    """Senders and receivers of messages in a Program whose devices hold one stage each, in one or more
    replicas.

    Gradients go from each replica's device to the devices of the same stage. Sums go up the first replica,
    stage by stage. The first device's decision goes to the first device of every replica, and down from
    there.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._handed_out = [
            {one for one in actions if isinstance(one, Reduce) and one.what == "gradient"}
            for actions in program.devices
        ]

    def of(self, action: Reduce | Step, device: int) -> tuple[Told, ...]:
        """Return the messages that `device` must have received before it can begin `action`."""
        program = self._program
        if not program.pipelined:
            return ()
        stage = device % program.width
        if isinstance(action, Step):
            before = 0 if stage == 0 else device - 1
            return () if device == 0 else (Told(before, action),)
        if action.what == "gradient":
            return ()
        share = Reduce(action.job, action.step, "gradient")
        others = (one for one in program.group(device) if one != device and share in self._handed_out[one])
        gradients = tuple(Told(one, share) for one in others)
        ends = program.replica(device) > 0 or stage + 1 == program.width
        return gradients if ends else (*gradients, Told(device + 1, action))

    def hear(self, action: Reduce | Step, device: int) -> tuple[int, ...]:
        """Return the devices that wait for this message from `device`."""
        told = Told(device, action)
        wanted: Reduce | Step = Reduce(action.job, action.step) if isinstance(action, Reduce) else action
        return tuple(one for one in self._near(device) if told in self.of(wanted, one))

    def _near(self, device: int) -> list[int]:
        program = self._program
        firsts = range(0, len(program.devices), program.width) if device == 0 else ()
        around = (one for one in (device - 1, device + 1) if 0 <= one < len(program.devices))
        return sorted({*program.group(device), *firsts, *around} - {device})
