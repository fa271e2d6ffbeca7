"""Adapters that transfers, without passes: gradients come to be where their stages are, and Steps are
made."""

from dataclasses import fields

import torch

from tests.bench import CPU
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.vector import ParameterShape, VectorLayout
from weftune.ops.adamw import AdamState, update
from weftune.plan.cost.ring import ring_bytes
from weftune.plan.program.layout import Layout, StageLayers
from weftune.run.stream.adapter_steps import HostSteps
from weftune.run.stream.adapters import AdapterTransfers
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import OpenBatch, Training
from weftune.run.training.steps import StepRequest, begin_steps

WEIGHTS = {torch.float32: torch.bfloat16, torch.float64: torch.float64}
"""Dtype of masters → that of what passes read."""
SIZES = (301, 77, 1000, 64)
"""Of four stages, at odd borders."""


def layout_of(sizes, outside="nowhere"):
    """A site in each layer, and one outside all layers: before them, behind them or nowhere. Every other site
    has a learning rate of its own."""
    sites = [(f"model.layers.{layer}.proj", size) for layer, size in enumerate(sizes)]
    if outside == "before":
        sites.insert(0, ("model.embed", 45))
    elif outside == "behind":
        sites.append(("lm_head", 45))
    return VectorLayout(
        tuple(
            ParameterShape(site, "a", (size,), rate=8.0 if number % 2 else 1.0)
            for number, (site, size) in enumerate(sites)
        )
    )


def new(name, sizes=SIZES, outside="nowhere", seed=0, dtype=torch.float32, weights=None):
    layout = layout_of(sizes, outside)
    master = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    moments = (torch.zeros_like(master) for _ in range(3))
    recipe = Recipe(steps=9, learning_rate=1e-2, weight_decay=0.1, clip=0.5, betas=(0.8, 0.95), eps=1e-4)
    state = AdamState(master, *moments, master.to(weights or WEIGHTS[dtype]))
    return Training(JobAdapter(name, LoraSpec(), seed), recipe, layout, state)


def steps_for(stages=4, make=update, dtype=torch.bfloat16):
    """A stage a layer; every other one stays."""
    held = tuple(StageLayers(n, n + 1, is_resident=n % 2 == 0) for n in range(stages))
    transfers = AdapterTransfers(
        Layout(held, slot_counts=(1,), adapters_travel=True).for_worker(0), CPU, dtype
    )
    steps = HostSteps(CPU, make, transfers.device_weights)
    steps.transfers = transfers
    return steps


def attach_all(steps, *together):
    for training in together:
        steps.attach(training, steps.transfers.attach(training).parts)
    return [StepRequest(training, supervised_tokens=6) for training in together]


def hand_in(steps, training, gradient, loss=1.5):
    """The gradient comes to be where the stages are, and leaves as it does after a round."""
    transfers, traveller = steps.transfers, steps.transfers.adapters[training.job]
    for stage, part in traveller.parts.items():
        stays = transfers.is_loaded(stage)
        if not stays:
            transfers.load_weights(stage, steps.is_unfinished)
        traveller.gradient[stage].copy_(gradient[part.start : part.stop])
        transfers.record_backward(stage, [training.job])
        if not stays:
            transfers.sum_squares(stage)
            transfers.evict(stage)
    transfers.copy_all_gradients_out([training.job])
    open_batch(training, loss)


def open_batch(training, loss=1.5):
    training.open_batch = OpenBatch(torch.tensor(loss, dtype=torch.float64), torch.tensor(3), 20)


def drawn(training, seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(training.master.shape, generator=generator, dtype=training.master.dtype)


def begin(steps, together):
    norm_J = steps.transfers.gradient_norms([one.training.job for one in together])
    run = steps.begin(together, norm_J, tuple)
    assert all(one.training.open_batch is None for one in together)
    return run


def outcomes(steps, run):
    steps.read_outcomes(run)
    return run.outcomes()


def expected(training, gradient, loss=1.5):
    """What came of the same Step when it was made of the whole and waited for."""
    training.gradient.copy_(gradient)
    open_batch(training, loss)
    (outcome,) = begin_steps([StepRequest(training, supervised_tokens=6)]).outcomes()
    return outcome


def buffer_bytes(steps):
    states = [buffer.state for buffer in steps.ring.buffers]
    return sum(getattr(state, one.name).nbytes for state in states for one in fields(state))


class Short:
    """Makes updates, and fails once for want of memory when so many are made, with the next made or not."""

    def __init__(self, at, halfway):
        self.at, self.halfway, self.made, self.failed = at, halfway, 0, False

    def __call__(self, updates, factor_J=None):
        if self.made >= self.at and not self.failed:
            self.failed = True
            if self.halfway:
                update(updates, factor_J)
            raise torch.OutOfMemoryError("no more")
        self.made += len(updates)
        return update(updates, factor_J)


def promised_bytes(transfers, value):
    """What the plan counts for the buffers of whoever is attach_all."""
    together = [one.parts for one in transfers.adapters.values()]
    stages = {stage for by_stage in together for stage in by_stage}
    sizes = [[by_stage[stage].size for by_stage in together if stage in by_stage] for stage in stages]
    return max(ring_bytes(parts, value) for parts in sizes)
