"""A base model with the adapters of all attached jobs. It is shared by all parts of an executor, such as its
passes and its adapter state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from weftune.adapters.banks import Banks
from weftune.base.model import Base
from weftune.base.quant.formats import WeightFormat
from weftune.base.quant.linear import set_weight_functions
from weftune.core.shards import ShardTeam
from weftune.ops.dequantise import KERNELS
from weftune.ops.fallback import run_with_fallback
from weftune.ops.fp8 import multiply
from weftune.ops.lora.routes import Route
from weftune.ops.triton import count_compilation, kernels_available, kernels_available_on
from weftune.run.passes.layers import Layers


class AdaptedBase:
    """One worker's part of a base, together with the adapters of all attached jobs."""

    def __init__(
        self,
        base: Base,
        route: Route | None = None,
        fuses_layers: bool | None = None,
        team: ShardTeam | None = None,
    ) -> None:
        """Add banks (the parameters of all adapters at a linear layer) to the base, and fuse its layers if
        requested. `fuses_layers` says whether the layers of known model families run as fused ops; None fuses
        them if the tiled kernels are used, with which fused layers are faster. `team` describes the workers
        among which every layer is divided into shards; None if layers are not divided."""
        self.base, self.team = base, team
        self.route = route or best_route(base.device, base.dtype)
        self.stream = torch.cuda.Stream(base.device) if base.device.type == "cuda" else None
        if self.route is Route.tiled:
            count_compilation()
            set_weight_functions(base.model, _write_by_kernel, multiply)
        with self.on_stream():
            fuses_layers = self.route is Route.tiled if fuses_layers is None else fuses_layers
            self.layers = Layers(base, team) if fuses_layers else None
            like = torch.empty(0, dtype=base.dtype, device=base.device)
            groups = self.layers.groups if self.layers else ()
            embedding = base.model.get_input_embeddings()
            self.banks = Banks(
                base.sites(),
                base.shape.sites,
                like,
                groups,
                base.whole_sites,
                embedding,
                base.is_tied,
                tiled=self.route is Route.tiled,
                sum_over_shards=None if team is None else team.sum_over_shards,
            )
            if self.layers is not None:
                self.layers.fuse(self.banks)

    @property
    def is_fused(self) -> bool:
        """Whether the base's layers run as fused ops instead of transformers' own forward."""
        return self.layers is not None and bool(self.layers.modules)

    @property
    def can_capture(self) -> bool:
        """Whether passes can be captured as CUDA graphs."""
        return self.layers is not None and self.layers.can_capture

    def restore_base(self) -> None:
        """Remove all adapters and fused layers from the base."""
        if self.layers is not None:
            self.layers.unfuse()
            set_weight_functions(self.base.model)
        self.banks.restore_base()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Return a context in which work is launched on a separate CUDA stream, as captured passes require.
        The stream waits for the current stream on entry, and the current stream waits for it on exit."""
        if self.stream is None:
            yield
            return
        before = torch.cuda.current_stream(self.base.device)
        self.stream.wait_stream(before)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            before.wait_stream(self.stream)


def _write_by_kernel(weight_format: WeightFormat, parts: Mapping[str, Tensor], out_NK: Tensor) -> None:
    write = KERNELS.get(weight_format.name)
    if write is None or not kernels_available(out_NK):
        weight_format.write(parts, out_NK)
    else:
        run_with_fallback(
            f"a base in {weight_format.name}", out_NK.device, write, weight_format.write, parts, out_NK
        )


def best_route(device: torch.device, dtype: torch.dtype) -> Route:
    """Return the route (implementation of adapters) for the device: the tiled kernels if they run there,
    otherwise the route in plain torch that computes each job's rows separately. With both, a NaN in one job
    does not reach other jobs."""
    return Route.tiled if device.type == "cuda" and kernels_available_on(device, dtype) else Route.segmented
