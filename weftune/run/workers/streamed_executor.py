"""Runs one rank's list of a Program whose stages take turns on several ranks: its own come to its device and
go, what came in is kept there, and each stage's forward is made again when its turn to go back comes.

Only the last stage of all keeps what its forward made: its backward follows at once.

Shapes: T rows of a microbatch, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.base.host.streamed import StreamedBase, stage_view
from weftune.core.batch import Microbatch
from weftune.ops.lora.routes import Route
from weftune.plan.program.program import Action, Backward, Evaluate, Evict, Forward, Load, Program
from weftune.run.passes.plain import Plain
from weftune.run.passes.rows import LaidMicrobatch, Membership, deal, lay
from weftune.run.stream.weights import Streamer
from weftune.run.workers.stage_executor import RankEvent, StageExecutor
from weftune.run.workers.transport import Transport


@dataclass(frozen=True, slots=True)
class _Rows:
    """A microbatch as the passes of all stages here read it."""

    laid: LaidMicrobatch
    dealt: Membership


class RankExecutor(StageExecutor):
    def __init__(
        self, base: StreamedBase, transport: Transport, rank: int, route: Route | None = None
    ) -> None:
        super().__init__(base.whole, transport, rank, route)
        assert not base.part.layout.travels, "adapters of a rank stay on its device"
        base.refuse_copies()
        self.part = base.part
        self.streamer = Streamer(base, lambda stage: None, lambda stage: None)
        self._views = {stage: stage_view(base.whole, base.part.held(stage)) for stage in base.part.own}
        self._rows: dict[int, _Rows] = {}

    def _refuse(self, program: Program) -> None:
        stages, ranks = len(self.part.stages), self.part.layout.workers
        assert program.stages == tuple(stage % ranks for stage in range(stages)), "stage j is rank j mod N's"
        assert len(program.devices) == ranks, f"the plan is for {len(program.devices)} ranks, not {ranks}"

    def _act(self, action: Action) -> Iterator[RankEvent]:
        match action:
            case Load(stage):
                self.streamer.load(stage)
                return
            case Evict(stage):
                self.streamer.evict(stage)
                return
            case Forward(_, stage) | Backward(_, stage) | Evaluate(_, stage):
                self.streamer.use(stage)
                self._began = self._clock.mark()
        yield from super()._act(action)
        match action:
            case Backward(number, stage) if stage == self.part.own[0]:
                del self._rows[number]
            case Evaluate(number, stage) if stage == self.part.own[-1]:
                del self._rows[number]

    def _begin(self) -> None:
        self.streamer.settle()

    def run(self, program: Program, microbatches: Mapping[int, Microbatch]) -> Iterator[RankEvent]:
        yield from super().run(program, microbatches)
        assert not self._rows, "a microbatch is still laid out at the window's end"
        waited = self.streamer.waited
        self.report.copied_bytes, self.report.waited = waited.copied_bytes, waited.total()

    # -- passes ------------------------------------------------------------------------------------------

    def _pass(self, number: int, stage: int) -> Plain:
        view, rows = self._views[stage], self._laid(number)
        given_TD = None if view.first else self._arrived.pop((number, stage, "activation"))
        return Plain(view, self.banks, rows.laid, self.route, given_TD, rows.dealt)

    def _laid(self, number: int) -> _Rows:
        if number not in self._rows:
            microbatch = self._microbatches[number]
            laid = lay(microbatch, microbatch.rows, self.base.device)
            self._rows[number] = _Rows(laid, deal(self.base, self.banks, laid, self.route))
        return self._rows[number]

    @torch.no_grad()
    def _hand_on(self, passed: Plain) -> Tensor:
        """By another pass over the same input: the one that waits for its way back holds nothing else."""
        return passed.anew().forward()

    def _go_back(self, passed: Plain, dh_TD: Tensor) -> None:
        if not passed.base.last:
            passed.forward()
        passed.backward(dh_TD)

    @property
    def _counting(self) -> int:
        return self.part.own[-1]
