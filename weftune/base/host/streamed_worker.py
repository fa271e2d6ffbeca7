"""One worker's part of a base that several workers stream together: its own stages, resident or in host
memory, and the embedding or head that belongs to them."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from weftune.base.families import refuse_modules
from weftune.base.host.streamed import Fill, StreamedBase, placed
from weftune.base.load import load_plain
from weftune.base.model import Base
from weftune.base.place import explained
from weftune.base.shape import model_shape
from weftune.base.spec import BaseSpec
from weftune.base.stages import keep, outlined, refuse_uncut, shape_here
from weftune.base.weights import file_reader
from weftune.core.shapes import LayerRange, ModelShape
from weftune.plan.program.layout import OnWorker


def load_on_worker(spec: BaseSpec, device: torch.device, part: OnWorker) -> StreamedBase:
    """Load only the tensors of the worker's own stages, each straight to its place."""
    model, files = outlined(spec, device)
    whole = model_shape(model, model.dtype)
    with explained(spec):
        keep(model, [part.held(stage) for stage in part.own])
        fill = None if files is None else file_reader(model, files)
        if fill is None:
            # The files name their weights in another way than the model does; transformers knows how.
            return stream_on_worker(load_plain(spec, torch.device("cpu")), spec, device, part)
        return _placed(model, spec, device, part, whole, fill)


def stream_on_worker(
    model: PreTrainedModel, spec: BaseSpec, device: torch.device, part: OnWorker
) -> StreamedBase:
    """Stream the worker's part of a model that is in memory, which is taken over."""
    refuse_uncut(model.config, spec.model)
    whole = model_shape(model, model.dtype)
    keep(model, [part.held(stage) for stage in part.own])
    values = dict(model.named_parameters())

    def fill(name: str, out: torch.Tensor) -> None:
        out.copy_(values.pop(name))

    return _placed(model, spec, device, part, whole, fill)


def _placed(
    model: PreTrainedModel,
    spec: BaseSpec,
    device: torch.device,
    part: OnWorker,
    whole: ModelShape,
    fill: Fill,
) -> StreamedBase:
    assert whole.layers == part.layout.layers, f"the base has {whole.layers} layers, not {part.layout.layers}"
    refuse_modules(model, spec.model)
    own = [part.held(stage) for stage in part.own]
    shape = shape_here(model, whole, sum(one.stop - one.start for one in own))
    held = LayerRange(own[0].start, own[-1].stop, part.layout.layers)
    return placed(Base(model, spec, shape, device, model.dtype, held, whole.sites), part, fill)
