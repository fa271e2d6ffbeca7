"""A base with the adapters of everybody aboard woven in: what every executor has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weftune.adapters.banks import Banks
from weftune.base.model import Base
from weftune.ops.lora.routes import Route
from weftune.ops.triton.at_hand import kernels_run
from weftune.run.passes.graphs import Graphs
from weftune.run.passes.layers import Layers
from weftune.run.passes.plain import Passes
from weftune.run.passes.scorer import Scorer
from weftune.run.training.state import Training


class Woven:
    def __init__(self, base: Base, route: Route | None = None, graphs: bool = True) -> None:
        self.base = base
        self.route = route or best_route(base.device, base.dtype)
        self.aboard: dict[str, Training] = {}
        self.dead: set[str] = set()
        self._stream = torch.cuda.Stream(base.device) if base.device.type == "cuda" else None
        with self._on_stream():
            self.layers = Layers(base) if self.route is Route.tiled else None
            like = next(base.model.parameters())
            groups = self.layers.groups if self.layers else ()
            self.banks = Banks(base.sites(), base.shape.sites, like, groups)
            self.passes = Passes(base, self.banks, None)
            if self.layers is not None:
                self.layers.fuse(self.banks)
                if graphs and self.layers.capturable:
                    self.passes.graphs = Graphs(base, self.banks, self.layers)
        self.scorer = Scorer(base.head() if base.last else None)

    @property
    def home(self) -> torch.device:
        """Where the state of whoever comes aboard is kept."""
        return self.base.device

    @property
    def fused(self) -> bool:
        """Whether the base's layers run as fused ops."""
        return self.layers is not None and bool(self.layers.modules)

    @property
    def captures(self) -> int | None:
        """How many CUDA graphs were captured so far; None where passes are not captured."""
        return None if self.passes.graphs is None else self.passes.graphs.captures

    def unweave(self) -> None:
        """Leave the base as it was found."""
        if self.layers is not None:
            self.layers.unfuse()
        if self.passes.graphs is not None:
            self.passes.graphs.clear()
        self.banks.unweave()

    def attach(self, training: Training) -> None:
        with self._on_stream():
            state = training.state
            self.banks.attach(training.member, training.layout, state.weights, state.gradient)
        self.aboard[training.job] = training

    def detach(self, job: str) -> Training:
        with self._on_stream():
            self.banks.detach(job)
        self.dead.discard(job)
        return self.aboard.pop(job)

    def kill(self, job: str) -> None:
        """From here on the job's rows and actions are skipped; the Program stands for the others."""
        self.dead.add(job)
        with self._on_stream():
            self.banks.zero(job)
            self.aboard[job].forget_open_batch()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """A captured pass must not run on the default stream. Each waits for what the other has begun."""
        if self._stream is None:
            yield
            return
        before = torch.cuda.current_stream(self.base.device)
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            before.wait_stream(self._stream)


def best_route(device: torch.device, dtype: torch.dtype) -> Route:
    """Tiled where its kernels run, else one job after another: neither lets a NaN travel."""
    return Route.tiled if device.type == "cuda" and kernels_run(device, dtype) else Route.segmented
