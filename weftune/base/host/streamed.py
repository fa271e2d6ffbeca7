"""A streamed base: its layers are in host memory or in files, and are copied in turn to slots, a few fixed
ranges of device memory.

Every streamed stage (consecutive layers) is a contiguous range of bytes on the host and is always copied to
the same slot. The parameters of its layers are views of the slot, so no address ever changes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weftune.base.check import refuse_modules
from weftune.base.host.pinned import allocate_host_bytes
from weftune.base.host.source import (
    HostStage,
    MappedFile,
    MappedStage,
    MappedTensor,
    SourcePart,
    StageSource,
    Staging,
    map_weights,
)
from weftune.base.load import load_plain, wrap_load_errors
from weftune.base.model import Base, copy_config, isolate_samples
from weftune.base.quant.linear import matrix_dtype
from weftune.base.quant.read import weights_by_part
from weftune.base.shape import model_shape, parameter_count, site_modules
from weftune.base.shards import (
    ModelShard,
    StoredWeights,
    cut_model,
    refuse_sharding,
    shard_base,
)
from weftune.base.spec import BaseSpec
from weftune.base.stages import (
    ENDS,
    find_decoder,
    keep_stages,
    local_shape,
    outline_model,
    refuse_unknown_family,
)
from weftune.base.weights import Fill, create_buffers, file_reader, stored_names
from weftune.core.shapes import LayerRange, ModelShape
from weftune.core.shards import ShardTeam
from weftune.plan.program.layout import Layout, WorkerLayout

ALIGNMENT = 16
"""Alignment of parameters in bytes, which is the width of a kernel's loads. The sizes of matrices are
multiples of it, so matrices that share their input remain contiguous."""

MappedWeights = Mapping[str, tuple[MappedTensor, ...]]
"""Maps each parameter of a model to the tensors in memory-mapped files that it consists of."""


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """The name, shape and dtype of a parameter, and the offset `start` of its bytes within those of its
    stage."""

    name: str
    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True, eq=False)
class StreamedBase:
    whole: Base
    """All stages (runs of consecutive layers) of this worker as one base. Parameters of streamed layers are
    views of ranges of `arena`."""
    part: WorkerLayout
    sources: Mapping[int, StageSource]
    """Maps each streamed stage to the source in host memory or files from which its bytes are copied. Stages
    that stay on the device are absent."""
    arena: Tensor
    """Device memory of all slots, uint8 [slots, bytes]. A slot holds one streamed stage (consecutive layers)
    at a time."""

    @cached_property
    def stages(self) -> tuple[Base, ...]:
        """Stages (runs of consecutive layers) of the base, each a separate `Base` over the same modules."""
        return tuple(
            make_stage_view(self.whole, self.part.stage_range(n)) for n in range(len(self.part.stages))
        )

    def slot(self, stage: int) -> Tensor:
        """Return the device memory that holds the parameters of a streamed stage while it is loaded."""
        return self.arena[self.part.slot_of_stage(stage), : self.sources[stage].size]

    def refuse_copies(self) -> None:
        """Assert that the parameters of streamed layers are still views of their slots (ranges of `arena`),
        not copies."""
        arena = self.arena.untyped_storage().data_ptr()
        for stage in self.part.streamed_stages:
            for piece in _weight_pieces(self.whole.model, self.part.stage_range(stage)):
                parameter = self.whole.model.get_parameter(piece.name)
                assert parameter.untyped_storage().data_ptr() == arena, f"{piece.name} has left its slot"


def load_streamed(
    spec: BaseSpec,
    device: torch.device,
    layout: Layout,
    keeps_files_mapped: bool = False,
    worker: int = 0,
    team: ShardTeam | None = None,
) -> StreamedBase:
    """Load a worker's stages (runs of consecutive layers) from the base's files. If `team`, the workers that
    divide every layer, is given, only this worker's shard of the stages is loaded. Each tensor is read
    directly to its final location: the device, or host memory if streamed. With `keeps_files_mapped`,
    streamed tensors stay in the files."""
    if team is not None:
        refuse_sharding(spec, team.shards)
    model, files = outline_model(spec, device)
    with wrap_load_errors(spec):
        if team is not None and files is not None and stored_names(model, files) is not None:
            assert not keeps_files_mapped, "the parts of a shard are not contiguous in files"
            stored, part = StoredWeights(model, files, device), layout.for_worker(worker)
            shard = cut_model(model, spec, team, _layers_per_stage(part), stored.read_whole)
            read = stored.part_reader(model, shard)
            return streamed_base(model, shard.whole, spec, device, part, read, shard=shard)
        whole = _drop_other_stages(model, layout.for_worker(worker))
        weights = map_weights(model, files, spec.model) if keeps_files_mapped else None
        fill = None if files is None else file_reader(model, files, device)
        if fill is None:
            # The names in the files differ from the model's; transformers can map them.
            return stream_model(load_plain(spec, torch.device("cpu")), spec, device, layout, worker, team)
        return streamed_base(model, whole, spec, device, layout.for_worker(worker), fill, weights)


def weights_in_files(spec: BaseSpec, device: torch.device) -> dict[MappedFile, set[str]]:
    """Return a dict from each file of a base to the parameters in it. A run on `device` whose weights stay in
    files would read these files in every optimizer step. Raise BaseModelError with the reason if such a run
    is not possible."""
    model, files = outline_model(spec, device)
    names_by_file: dict[MappedFile, set[str]] = {}
    with wrap_load_errors(spec):
        for name, parts in map_weights(model, files, spec.model).items():
            for part in parts:
                names_by_file.setdefault(part.file, set()).add(name)
    return names_by_file


def stream_model(
    model: PreTrainedModel,
    spec: BaseSpec,
    device: torch.device,
    layout: Layout,
    worker: int = 0,
    team: ShardTeam | None = None,
) -> StreamedBase:
    """Build a streamed base from a worker's stages (runs of consecutive layers) of a model in memory, which
    is consumed. If `team`, the workers that divide every layer, is given, the base has only this worker's
    shard of the stages."""
    refuse_unknown_family(model.config, spec.model)
    part = layout.for_worker(worker)
    shard = None if team is None else cut_model(model, spec, team, _layers_per_stage(part))
    whole = _drop_other_stages(model, part) if shard is None else shard.whole
    parameters = dict(model.named_parameters())

    def fill(name: str, out: Tensor) -> None:
        out.copy_(parameters.pop(name))

    return streamed_base(model, whole, spec, device, part, fill, shard=shard)


def _layers_per_stage(part: WorkerLayout) -> list[LayerRange]:
    """Return the range of layers of each of a worker's stages."""
    return [part.stage_range(stage) for stage in part.own_stages]


def _drop_other_stages(model: PreTrainedModel, part: WorkerLayout) -> ModelShape:
    """Remove the stages (layers) of other workers from a model, and return the shape (sizes) of the whole
    model as it was before."""
    whole = model_shape(model, matrix_dtype(model))
    keep_stages(model, *_layers_per_stage(part))
    return whole


def streamed_base(
    model: PreTrainedModel,
    whole: ModelShape,
    spec: BaseSpec,
    device: torch.device,
    part: WorkerLayout,
    fill: Fill,
    mapped_weights: MappedWeights | None = None,
    shard: ModelShard | None = None,
) -> StreamedBase:
    """Build a streamed base. `model` has the names and shapes of the worker's parameters, `whole` is the
    shape of the whole base, and `fill` writes the values. Streamed weights in `mapped_weights` stay in their
    files. `shard` is given if `model` has been cut to one tensor-parallel shard."""
    layers = part.layout.layers
    assert whole.layers == layers, f"the base has {whole.layers} layers, not {layers}"
    refuse_modules(model, spec.model)
    own = _layers_per_stage(part)
    shape = local_shape(model, whole, sum(one.stop - one.start for one in own))
    local_layers = LayerRange(own[0].start, own[-1].stop, layers)
    _use_expandable_segments(device)
    pieces = {stage: _weight_pieces(model, part.stage_range(stage)) for stage in part.streamed_stages}
    sizes = {stage: found[-1].stop for stage, found in pieces.items()}
    width = -(-max(sizes.values(), default=0) // ALIGNMENT) * ALIGNMENT
    arena = torch.zeros(part.slot_count if sizes else 0, width, dtype=torch.uint8, device=device)
    for stage, found in pieces.items():
        for piece in found:
            _set_parameter(model, piece.name, piece.view(arena[part.slot_of_stage(stage)]))
    sources = (
        _stages_in_memory(pieces, device, fill)
        if mapped_weights is None
        else _stages_in_files(pieces, device, mapped_weights)
    )
    _load_resident(model, device, {piece.name for found in pieces.values() for piece in found}, fill)
    if shard is not None:
        return StreamedBase(shard_base(model, spec, device, shard, local_layers), part, sources, arena)
    model.eval().requires_grad_(False)
    copy_config(model)
    isolate_samples(model)
    kept = {piece.name: (piece, sources[stage]) for stage, found in pieces.items() for piece in found}

    def stored(name: str) -> Tensor | None:
        if name not in kept:
            return None
        piece, source = kept[name]
        return source.read(piece.start, piece.stop).view(piece.dtype).view(piece.shape)

    base = Base(model, spec, shape, device, matrix_dtype(model), local_layers, whole.sites, stored)
    return StreamedBase(base, part, sources, arena)


def _use_expandable_segments(device: torch.device) -> None:
    """Make torch allocate GPU memory in expandable segments, unless the user has configured the allocator:
    fragmented free memory can then hold one large tensor, and a run can use all memory that was planned."""
    chosen = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if device.type == "cuda" and not chosen:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _stages_in_memory(
    pieces: Mapping[int, Sequence[WeightPiece]], device: torch.device, fill: Fill
) -> dict[int, StageSource]:
    """Load the streamed stages (runs of consecutive layers) into one buffer of host memory, each into a
    contiguous range. Return these ranges by stage number."""
    starts, total = {}, 0
    for stage, found in pieces.items():
        starts[stage] = total
        total += -(-found[-1].stop // ALIGNMENT) * ALIGNMENT
    buffer = allocate_host_bytes(total, device)
    sources: dict[int, StageSource] = {}
    for stage, found in pieces.items():
        stage_buffer = buffer[starts[stage] : starts[stage] + found[-1].stop]
        for piece in found:
            fill(piece.name, piece.view(stage_buffer))
        sources[stage] = HostStage(stage_buffer)
    return sources


def _stages_in_files(
    pieces: Mapping[int, Sequence[WeightPiece]], device: torch.device, mapped_weights: MappedWeights
) -> dict[int, StageSource]:
    staging = Staging(device) if device.type == "cuda" else None
    sources: dict[int, StageSource] = {}
    for stage, found in pieces.items():
        parts: list[SourcePart] = []
        for piece in found:
            start = piece.start
            for mapped in mapped_weights[piece.name]:
                parts.append(SourcePart(start, mapped))
                start = parts[-1].stop
        sources[stage] = MappedStage(tuple(parts), staging)
    return sources


def _weight_pieces(model: PreTrainedModel, layer_range: LayerRange) -> list[WeightPiece]:
    """Return the name, shape and position of each parameter in the bytes of a stage, the layers of
    `layer_range`. The order in each layer is: quantised weights, each with its tensors together; matrices,
    with those that share their input adjacent; biases; norms."""
    pieces: list[WeightPiece] = []
    start = 0
    beside = weights_by_part(model)
    quantised = {*beside, *beside.values()}
    for index in range(layer_range.start, layer_range.stop):
        prefix = f"{_layers_path(model)}.{index}."
        own = [(name, value) for name, value in model.named_parameters() if name.startswith(prefix)]
        for name, value in sorted(own, key=lambda pair: _sort_key(pair[0], pair[1], quantised)):
            pieces.append(WeightPiece(name, start, value.shape, value.dtype))
            start = -(-pieces[-1].stop // ALIGNMENT) * ALIGNMENT
    return pieces


def _sort_key(name: str, value: Tensor, quantised_names: Collection[str]) -> tuple[bool, int, bool]:
    if name in quantised_names:
        return False, 0, False
    return True, -value.ndim, not name.endswith("bias")


def _layers_path(model: PreTrainedModel) -> str:
    layers = getattr(find_decoder(model), ENDS[model.config.model_type].layers)
    return next(name for name, module in model.named_modules() if module is layers)


def _load_resident(
    model: PreTrainedModel, device: torch.device, streamed_names: set[str], fill: Fill
) -> None:
    """Copy all parameters that are not streamed to the device. A head that is tied to the embedding stays
    tied."""
    device_parameters: dict[int, nn.Parameter] = {}
    for name, value in list(model.named_parameters(remove_duplicate=False)):
        if name in streamed_names:
            continue
        if id(value) not in device_parameters:
            here = torch.empty_like(value, device=device)
            fill(name, here)
            device_parameters[id(value)] = _set_parameter(model, name, here)
        else:
            _set_parameter(model, name, device_parameters[id(value)])
    if any(buffer.is_meta for buffer in model.buffers()):
        create_buffers(model, device)
    nn.Module.to(model, device)


def _set_parameter(model: PreTrainedModel, name: str, value: Tensor) -> nn.Parameter:
    path, _, last = name.rpartition(".")
    parameter = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
    # Transformers' own mark: `_init_weights` does not change such a parameter.
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    setattr(model.get_submodule(path), last, parameter)
    return parameter


def make_stage_view(base: Base, layer_range: LayerRange) -> Base:
    """Return a base that has only the layers of one stage, `layer_range`, of `base`. Both share the modules
    of these layers."""
    model = cast(PreTrainedModel, _shallow_copy(base.model))
    parent: nn.Module = model
    for name in _layers_path(base.model).split("."):
        child = _shallow_copy(getattr(parent, name))
        setattr(parent, name, child)
        parent = child
    keep_stages(model, layer_range)
    own = site_modules(model)
    sites = tuple(site for site in base.shape.sites if site.name in own)
    layers = layer_range.stop - layer_range.start
    shape = replace(base.shape, layers=layers, parameters=parameter_count(model), sites=sites)
    return replace(base, model=model, shape=shape, local_layers=layer_range, all_sites=base.whole_sites)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module, whose children can be replaced without changing the original."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
