"""Weftune's streamed row in a benchmark: a base whose random weights are made straight where they stay.

Shapes: K inputs, N outputs of a linear.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from weftune.adapters.lora.spec import LoraSpec
from weftune.base.host.streamed import StreamedBase, streamed_base
from weftune.base.model import Base
from weftune.base.quant.linear import QuantLinear, quant_paths, replace_linears
from weftune.base.quant.read import QuantReader
from weftune.base.quant.stored import Quantised
from weftune.base.shape import model_shape
from weftune.base.spec import BaseSpec, Quantize
from weftune.base.weights import Fill, quantised_formats
from weftune.bench.baselines import BaselineWork
from weftune.bench.sizes import Size, build_frozen
from weftune.bench.timing import Hardware
from weftune.bench.weftune_side import AttachedJobs
from weftune.core.shapes import JobShape, ModelShape
from weftune.errors import PlanError
from weftune.plan.cost.ring import step_bytes
from weftune.plan.layout.choose import LayoutChoice, Machine
from weftune.plan.layout.choose import choose_layout as choose_layout
from weftune.plan.layout.need import StreamCase, StreamDevice, emulated_device, gpu_device
from weftune.plan.layout.search import largest_drafts, smallest_drafts
from weftune.plan.layout.stream_choice import HOST_STATES, HostState, StreamChoice, choose_stream
from weftune.plan.program.layout import Layout, StageLayers
from weftune.plan.program.program import Program
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import plan_window
from weftune.run.assemble import streamed_executor
from weftune.run.executor import Executor
from weftune.run.measure.link import HostLink
from weftune.run.measure.memory import CPU_FRACTION, budget_bytes
from weftune.run.measure.timers import WaitTime

SPREAD = 0.02


class StreamedJobs(AttachedJobs):
    def __init__(self, executor: Executor, choice: StreamChoice) -> None:
        super().__init__(executor)
        self.choice = choice

    def _window(self, courses: Sequence[JobWindow], capacity: int) -> Program:
        return plan_window(courses, self.choice.layout, capacity, self.executor.captures is not None)


@dataclass(frozen=True, slots=True)
class Streamed:
    together: StreamedJobs
    choice: StreamChoice
    executor: Executor
    streamed: StreamedBase

    @property
    def waited(self) -> WaitTime:
        return self.executor.weights.wait_time

    def forget_waits(self) -> None:
        self.waited.total_seconds()
        self.waited.seconds, self.waited.copied_bytes = 0.0, 0

    @property
    def loaded_bytes(self) -> int:
        """What comes of the base in a round: stages in the slots are still there where it turns and ends."""
        sizes = [source.size for _, source in sorted(self.streamed.sources.items())]
        (slots,) = self.choice.layout.slot_counts
        return 2 * sum(sizes) - sum(sizes[:slots]) - sum(sizes[len(sizes) - slots :])

    @property
    def stepped_bytes(self) -> int:
        """What comes of adapters that travel in a round: for their Steps, and weights for the backward."""
        if not self.choice.layout.adapters_travel:
            return 0
        each = step_bytes(self.executor.base.dtype.itemsize) + self.executor.base.dtype.itemsize
        return each * sum(training.layout.size for training in self.executor.attached.values())

    @property
    def described(self) -> str:
        cut = self.choice.layout
        stays = sum(stage.is_resident for stage in cut.stages)
        travels = ", adapters travel" if cut.adapters_travel else ""
        offloads = ", inputs offloaded" if cut.offloads_inputs else ""
        return (
            f"{len(cut.stages)} stages, {stays} stay, {cut.slot_counts[0]} slots, "
            f"{self.choice.capacity} tokens a microbatch{travels}{offloads}"
        )


def streamed_jobs_aboard(
    size: Size,
    hardware: Hardware,
    work: BaselineWork,
    cap: int | None,
    most: int,
    link: HostLink,
    how: str,
    quantize: Quantize | None = None,
) -> Streamed:
    shape = model_shape(_outline(size, hardware, quantize), hardware.dtype)
    choice = choose(shape, work, stream_device(hardware, cap, link), most, how)
    base = _random_base(size, hardware, choice.layout, quantize)
    executor = streamed_executor(base)
    return Streamed(StreamedJobs(executor, choice), choice, executor, base)


def choose(
    shape: ModelShape,
    work: BaselineWork,
    device: StreamDevice,
    most: int,
    how: str,
    ways: Sequence[HostState] = HOST_STATES,
) -> StreamChoice:
    jobs = job_shapes(shape, work)
    chosen = choose_stream(shape, jobs, device, most, work.tokens, ways)
    if how == "chosen":
        return chosen
    cut = chosen.layout
    case = StreamCase(
        shape, tuple(jobs), device, work.tokens, chosen.capacity, cut.adapters_travel, cut.offloads_inputs
    )
    drafts = largest_drafts(case) if how == "largest" else smallest_drafts(case)
    draft = min(drafts, key=case.round_seconds, default=None)
    if draft is None:
        raise PlanError(f"there is no cut into the {how} stages here")
    return replace(
        chosen,
        layout=draft.make_layout(cut.adapters_travel, cut.offloaded_rows),
        round_seconds=case.round_seconds(draft),
        waiting_fraction=case.waiting_fraction(draft) if case.fits(draft) else 1.0,
    )


def job_shapes(shape: ModelShape, work: BaselineWork) -> list[JobShape]:
    """As the planner wants to know them."""
    adapter = LoraSpec(rank=work.rank, alpha=2.0 * work.rank)
    trainable = sum(
        (site.in_features + site.out_features) * adapter.rank_at(site.name) for site in shape.sites
    )
    tokens = work.batch * work.length
    return [JobShape(f"job{at}", 0, at, trainable, work.length, tokens) for at in range(work.jobs)]


def stream_device(hardware: Hardware, cap: int | None, link: HostLink) -> StreamDevice:
    host = int(psutil.virtual_memory().available * CPU_FRACTION)
    if hardware.device.type != "cuda":
        return emulated_device(cap or 1 << 30, host)
    budget = cap or budget_bytes(hardware.device)
    return gpu_device(budget, host, link.bandwidth, link.flops, link.memory_bandwidth, link.duplex_bandwidth)


def resident_choice(
    size: Size, hardware: Hardware, quantize: Quantize | None, work: BaselineWork, most: int, link: HostLink
) -> LayoutChoice:
    """How a run would hold these jobs with all of the base on the device, and no cap."""
    shape = model_shape(_outline(size, hardware, quantize), hardware.dtype)
    device = stream_device(hardware, None, link)
    machine = Machine(
        on_gpu=hardware.device.type == "cuda",
        budget_bytes=device.budget_bytes,
        host_budget_bytes=device.host_budget_bytes,
        capacity=max(most, work.length),
        measure_gpu=lambda budget, host, workers: replace(
            device, budget_bytes=budget, host_budget_bytes=host
        ),
    )
    return choose_layout(shape, job_shapes(shape, work), machine)


def random_base(size: Size, hardware: Hardware, quantize: Quantize | None = None) -> Base:
    """The base that `streamed_jobs_aboard` makes, all of it on the device."""
    resident = Layout((StageLayers(0, size.layers, is_resident=True),))
    return _random_base(size, hardware, resident, quantize).whole


def _outline(size: Size, hardware: Hardware, quantize: Quantize | None) -> PreTrainedModel:
    model = build_frozen(size, torch.device("meta"), hardware.dtype)
    if quantize is not None:
        replace_linears(model, quantised_formats(model, Quantised(quantize), None))
    return model


def _random_base(size: Size, hardware: Hardware, cut: Layout, quantize: Quantize | None) -> StreamedBase:
    model = _outline(size, hardware, quantize)
    return streamed_base(
        model,
        model_shape(model, hardware.dtype),
        BaseSpec(model="random weights"),
        hardware.device,
        cut.for_worker(0),
        random_filler(model, hardware),
    )


def random_filler(model: PreTrainedModel, hardware: Hardware) -> Fill:
    """Writes random values, and of quantised weights what a matrix of such values is quantised to."""

    def matrix(name: str) -> Tensor:
        linear = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(linear, QuantLinear)
        shape = linear.out_features, linear.in_features
        out_NK = torch.empty(shape, dtype=linear.matrix_dtype, device=hardware.device)
        fill_random(name, out_NK, hardware)
        return out_NK

    quantised = QuantReader(
        model, {path: f"{path}.weight" for path in quant_paths(model)}, (), matrix, hardware.device
    )

    def fill(name: str, out: Tensor) -> None:
        if quantised.has_parameter(name):
            quantised(name, out)
        else:
            fill_random(name, out, hardware)

    return fill


def fill_random(name: str, out: Tensor, hardware: Hardware) -> None:
    """By name, so that they are the same wherever they go; drawn on the device: a host takes minutes."""
    if out.ndim == 1 and not name.endswith("bias"):
        out.fill_(1.0)
        return
    generator = torch.Generator(hardware.device).manual_seed(zlib.crc32(name.encode()))
    drawn = torch.empty(out.shape, dtype=out.dtype, device=hardware.device)
    out.copy_(drawn.normal_(0.0, SPREAD, generator=generator))
