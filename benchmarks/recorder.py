"""A trainer whose Programs can be inspected when the run has ended."""

from __future__ import annotations

from typing import Any

from weftune.plan.program.program import Program
from weftune.trainer.loop import Loop
from weftune.trainer.trainer import Trainer


class Recorder(Trainer):
    """A trainer that keeps every Program that it has run."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.programs: list[Program] = []

    def _create_loop(self, *args: Any) -> Loop:
        loop = super()._create_loop(*args)
        loop.programs_run = self.programs
        return loop
