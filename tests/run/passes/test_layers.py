"""Fused decoder layers and the tiled route, in Triton's interpreter, against the plain path."""

import gc
import math
from collections import Counter

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests import bench
from tests.adapters.attached_banks import together
from tests.base.packs import packed, random_samples
from tests.base.quant.bases import quantised_base
from tests.cases import slow_but
from tests.families import VOCABULARY, config, randomised, tiny
from tests.interpreter import interpret
from tests.ops.launches import Failing
from tests.run import executors
from weftune.adapters import banks
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.registry import get_kind
from weftune.base.attention import pack
from weftune.base.host.streamed import stream_model
from weftune.base.load import wrap_as_tower
from weftune.base.model import Base
from weftune.base.quant.linear import QuantWeight
from weftune.base.spec import BaseSpec
from weftune.core.batch import IGNORED, Microbatch
from weftune.ops import fallback
from weftune.ops.lora.routes import Route
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout
from weftune.plan.program.program import NOTHING, Recompute
from weftune.plan.window.window import plan_window
from weftune.run.assemble import streamed_executor
from weftune.run.events import Failed, Stepped
from weftune.run.passes import layers as fused_layers
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.passes.rows import build_membership, to_device_microbatch

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="Triton compiles here; test_gpu.py trains on the GPU"
    ),
    # Half of a masked block is at −∞, and numpy minds what a GPU does not.
    pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning"),
]

FUSED = ["llama", "mistral", "qwen2", "qwen3", "phi3", "phi4-mini", "gemma3", "mixtral", "qwen3_moe"]
STEPS = 2
LENGTH = 7
WINDOW = 3
"""So that most rows of a sample do not see its beginning."""
CAPACITY = 3 * LENGTH + 2
JOBS = {
    "dropping": dict(adapter={"rank": 7, "dropout": 0.1}, batch_size=2),
    "values-only": dict(adapter={"rank": 24, "targets": ["v_proj"]}, batch_size=1),
}


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    interpret(monkeypatch)
    # A program takes milliseconds here, even one without work: the tables need no room for 64 jobs.
    monkeypatch.setattr(banks, "SLOTS", len(JOBS))


def shallow(family):
    shape = config(family)
    shape.num_hidden_layers = 1
    if family == "mistral":
        shape.sliding_window = WINDOW
    if getattr(shape, "layer_types", None):
        shape.layer_types = shape.layer_types[:1]
    return randomised(shape, torch.float32)


def one_layer(family):
    spec = BaseSpec(model=f"tiny/{family}", dtype="float32")
    return Base.from_model(shallow(family), spec, bench.CPU)


def jobs_for(base):
    made = []
    for seed, (name, keys) in enumerate(JOBS.items(), start=1):
        data = bench.rows(bench.samples(6, seed, shortest=LENGTH, longest=LENGTH))
        made.append(executors.prepare(base, name, seed=seed, steps=STEPS, data=data, **keys))
    return made


def adapted_executor(base, jobs, route, monkeypatch):
    """An executor whose kernels are interpreted if it is to have any."""
    monkeypatch.setenv("TRITON_INTERPRET", str(int(route is Route.tiled)))
    executor = executors.executor_with(base, jobs, route)
    assert executor.is_fused == (route is Route.tiled)
    return executor


def trained(base, route, monkeypatch, steps=STEPS, recompute=NOTHING):
    """Losses and final weights of the jobs; every pass is padded."""
    jobs = jobs_for(base)
    executor = adapted_executor(base, jobs, route, monkeypatch)
    courses = [job.job_window(0, steps, False) for job in jobs]
    program = plan_window(courses, one_device_layout(), CAPACITY, pads_to_ladder=True, recompute=recompute)
    assert all(plan.rows > plan.tokens for plan in program.microbatches)
    events = list(executors.run_program(executor, program, jobs))
    executor.restore_base()
    losses = {(e.job, e.step): e.outcome.loss for e in events if isinstance(e, Stepped)}
    assert len(losses) == steps * len(jobs)
    return losses, {job.name: executor.attached[job.name].master for job in jobs}


@pytest.mark.parametrize("family", slow_but(["mistral", "gemma3"], ["gemma3"]))
def test_the_fused_layers_of_a_text_tower_compute_what_the_plain_ones_do(family, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = BaseSpec(model=f"tiny/{family}", dtype="float32")
    base = Base.from_model(wrap_as_tower(tiny(family, torch.float32)), spec, bench.CPU)
    microbatch = packed(random_samples((9, 1)))
    plain_TD = base.hidden(microbatch)
    adapted = AdaptedBase(base, Route.tiled)
    assert adapted.is_fused
    torch.testing.assert_close(base.hidden(microbatch), plain_TD, rtol=1e-5, atol=1e-5)
    adapted.restore_base()
    assert torch.equal(base.hidden(microbatch), plain_TD)


@pytest.mark.parametrize("family", slow_but(FUSED, ["qwen2"]))
def test_fused_layers_train_as_the_plain_ones_do(family, monkeypatch):
    """Two jobs: one that drops, and one with an adapter at one site of the q,k,v group only."""
    base = one_layer(family)
    plain_losses, plain = trained(base, Route.segmented, monkeypatch)
    losses, weights = trained(base, Route.tiled, monkeypatch)
    assert losses == pytest.approx(plain_losses, abs=1e-5)
    for name in JOBS:
        assert (weights[name] - plain[name]).norm() <= 1e-4 * plain[name].norm(), name


@pytest.mark.parametrize(
    ("kernel", "captures"),
    slow_but(
        [
            ("site_gradients.da", False),
            ("site.down", False),
            ("norm.norm_backward", True),
            ("adamw.update", True),
        ],
        [("site.down", False)],
    ),
)
def test_a_run_in_which_a_kernel_fails_trains_on_by_plain_torch(kernel, captures, monkeypatch):
    from weftune.ops import triton as kernels

    base = one_layer("qwen2")
    plain_losses, plain = trained(base, Route.segmented, monkeypatch)
    # A module of kernels that is imported for the first time here must be one of interpreted kernels.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(fallback, "REHEARSING", ("cpu",))
    monkeypatch.setattr(fallback, "_failed_ops", set())
    monkeypatch.setattr(fallback, "_rehearsal_results", {})
    module, name = kernel.split(".")
    monkeypatch.setattr(getattr(kernels, module), name, Failing())
    with pytest.warns(fallback.KernelWarning, match=f"The kernel {kernel} does not run on CPU") as found:
        losses, weights = trained(base, Route.tiled, monkeypatch)
    assert len(found) == 1
    assert fallback.has_failed("LoRA") is not captures
    assert losses == pytest.approx(plain_losses, abs=1e-5)
    for name in JOBS:
        assert (weights[name] - plain[name]).norm() <= 1e-4 * plain[name].norm(), name


@pytest.mark.slow
def test_on_a_quantised_base_too_and_each_matrix_is_computed_once_a_pass_for_all_jobs(monkeypatch):
    base = quantised_base(shallow("qwen2"), "nf4")
    plain_losses, plain = trained(base, Route.segmented, monkeypatch)
    written, write = [], QuantWeight.write

    def counted(self, out_NK):
        written.append(id(self.module))
        write(self, out_NK)

    monkeypatch.setattr(QuantWeight, "write", counted)
    losses, weights = trained(base, Route.tiled, monkeypatch)
    assert losses == pytest.approx(plain_losses, abs=1e-5)
    for name in JOBS:
        assert (weights[name] - plain[name]).norm() <= 1e-4 * plain[name].norm(), name
    # Two jobs share each of the passes, forward and backward.
    assert set(Counter(written).values()) == {2 * STEPS}


@pytest.mark.parametrize(
    "recompute",
    slow_but(
        [NOTHING, Recompute(recomputes_outputs=True, recomputed_layers=1), Recompute(True, 1, tile_rows=16)],
        [Recompute(True, 1, tile_rows=16)],
    ),
)
def test_virtual_tokens_train_in_fused_layers_as_in_the_plain_ones(recompute, monkeypatch):
    """Rows before samples, and keys and values before them, beside a job that has neither."""
    base, found = one_layer("llama"), []
    adapters = {
        "lora": {"rank": 7, "targets": ["v_proj"]},
        "prompt": {"kind": "prompt", "num_virtual_tokens": 2},
        "prefix": {"kind": "prefix", "num_virtual_tokens": 3},
    }
    data = bench.rows(bench.samples(4, 1, shortest=4, longest=LENGTH))
    for route in (Route.segmented, Route.tiled):
        jobs = [
            executors.prepare(base, name, steps=1, batch_size=2, data=data, adapter=adapter)
            for name, adapter in adapters.items()
        ]
        executor = adapted_executor(base, jobs, route, monkeypatch)
        courses = [job.job_window(0, 1, False) for job in jobs]
        made = NOTHING if route is Route.segmented else recompute
        program = plan_window(courses, one_device_layout(), 64, pads_to_ladder=True, recompute=made)
        assert {len(plan.jobs) for plan in program.microbatches} == {len(jobs)}
        events = list(executors.run_program(executor, program, jobs))
        assert sum(isinstance(event, Stepped) for event in events) == len(jobs)
        executor.restore_base()
        found.append({job.name: executor.attached[job.name] for job in jobs})
    for name in adapters:
        plain, fused = (one[name].state.exp_avg for one in found)
        assert plain.norm() > 0
        assert (fused - plain).norm() <= 1e-4 * plain.norm(), name


@pytest.mark.slow
def test_what_is_made_again_in_the_backward_has_the_bits_it_had(monkeypatch):
    base = one_layer("llama")
    kept = trained(base, Route.tiled, monkeypatch, steps=1)
    again = trained(
        base,
        Route.tiled,
        monkeypatch,
        steps=1,
        recompute=Recompute(recomputes_outputs=True, recomputed_layers=1),
    )
    assert again[0] == kept[0]
    for name in JOBS:
        assert torch.equal(again[1][name], kept[1][name]), name


@pytest.mark.parametrize(
    ("recompute", "kept"),
    [
        (NOTHING, ["gate_up", "act"]),
        (Recompute(recomputes_outputs=True), ["gate_up"]),
        (Recompute(True, 1), []),
    ],
)
def test_the_forward_does_not_keep_what_is_recomputed(recompute, kept, monkeypatch):
    found, gate = {}, fused_layers.ACTIVATIONS["silu"]

    def watched(gate_up_TN):
        act_TI = gate(gate_up_TN)
        made = {"gate_up": gate_up_TN, "act": act_TI}
        found.update({name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in made.items()})
        return act_TI

    monkeypatch.setitem(fused_layers.ACTIVATIONS, "silu", watched)
    base, spec = one_layer("llama"), LoraSpec(rank=2)
    adapted = AdaptedBase(base, Route.tiled)
    adapted.layers.recompute = recompute
    layout = get_kind(spec.kind).layout(spec, base.shape.sites)
    adapted.banks.attach(
        JobAdapter("job", spec, 0), layout, torch.ones(layout.size), torch.zeros(layout.size)
    )
    laid = to_device_microbatch(together(["job"], random_samples((LENGTH,))), LENGTH, bench.CPU)
    membership = build_membership(base, adapted.banks, laid, adapted.route)
    with adapted.banks.bind(laid.microbatch, Route.tiled, True, membership.rows):
        h_TD = base.hidden(laid.microbatch, membership.pack)
    # The interpreter's own objects refer to one another, and to what kernels were called with.
    gc.collect()
    assert [name for name, storage in found.items() if not storage.expired()] == kept
    assert h_TD.requires_grad
    adapted.restore_base()


def test_a_nan_leaves_the_bits_of_the_others_as_they_are(monkeypatch):
    """The sick weights turn NaN before the first pass; the healthy job trains as if it were not there."""
    base = one_layer("llama")
    jobs = jobs_for(base)
    masters = []
    for sick in (False, True):
        executor = adapted_executor(base, jobs, Route.tiled, monkeypatch)
        if sick:
            executor.banks.attached["dropping"].weights.fill_(math.nan)
        program = plan_window(
            [job.job_window(0, 1, False) for job in jobs], one_device_layout(), CAPACITY, pads_to_ladder=True
        )
        assert program.shared_count() > 0
        events = list(executors.run_program(executor, program, jobs))
        executor.restore_base()
        assert [event.job for event in events if isinstance(event, Failed)] == ["dropping"] * sick
        masters.append(executor.attached["values-only"].master)
    assert torch.equal(*masters)


@pytest.mark.parametrize("family", slow_but(FUSED, ["gemma3", "phi3", "qwen3_moe"]))
def test_restoring_leaves_the_base_as_it_was(family, monkeypatch):
    base = bench.base(family, torch.float32)
    generator = torch.Generator().manual_seed(0)
    tokens_T = torch.randint(4, VOCABULARY, (17,), generator=generator)
    positions_T = torch.cat([torch.arange(9), torch.arange(8)])
    microbatch = Microbatch(
        tokens_T,
        positions_T,
        torch.full((17,), IGNORED),
        torch.arange(17),
        sample_lengths=(9, 8),
        segments=(),
    )

    def logits():
        with torch.no_grad():
            return base.model.lm_head(base.hidden(microbatch))

    def replaced():
        return [name for name, module in base.model.named_modules() if "forward" in vars(module)]

    before = logits()
    executor = adapted_executor(base, jobs_for(base), Route.tiled, monkeypatch)
    assert {"model.norm", "model.layers.0", "model.layers.1"} <= set(replaced())
    executor.restore_base()
    assert replaced() == []
    assert torch.equal(logits(), before)


def decoded(model, x_TD, pack, dh_TD):
    """The last hidden states of these embeddings, and the gradient of the embeddings."""
    x_TD = x_TD.detach().requires_grad_()
    positions_T = torch.cat([torch.arange(length) for length in pack.lengths])
    h_1TD = model.base_model(
        inputs_embeds=x_TD[None], position_ids=positions_T[None], use_cache=False, weftune_pack=pack
    ).last_hidden_state
    h_1TD.backward(dh_TD[None].to(h_1TD.dtype))
    return h_1TD[0].detach(), x_TD.grad


@pytest.mark.parametrize("family", slow_but(FUSED, ["phi4-mini", "gemma3", "qwen3_moe"]))
def test_fused_layers_are_as_exact_as_those_of_transformers(family, monkeypatch):
    """Without adapters, so that only the layers' own kernels are interpreted. Samples are longer than
    windows are. What is recomputed changes no bit."""
    spec = BaseSpec(model=f"tiny/{family}", dtype="float32")
    exact, base = bench.base(family), Base.from_model(tiny(family, torch.float32), spec, bench.CPU)
    samples = pack([8, 1], bench.CPU)
    generator = torch.Generator().manual_seed(0)
    x_TD, dh_TD = (torch.randn(9, base.shape.hidden, generator=generator) for _ in range(2))
    truths = decoded(exact.model, x_TD.double(), samples, dh_TD)
    plains = decoded(base.model, x_TD, samples, dh_TD)
    adapted = AdaptedBase(base, Route.tiled)
    assert adapted.is_fused
    fused = decoded(base.model, x_TD, samples, dh_TD)
    for got, plain, truth in zip(fused, plains, truths, strict=True):
        rounding = torch.finfo(torch.float32).eps * truth.norm()
        assert (got.double() - truth).norm() <= 2 * (plain.double() - truth).norm() + rounding
    adapted.layers.recompute = Recompute(recomputes_outputs=True, recomputed_layers=1)
    for again, first in zip(decoded(base.model, x_TD, samples, dh_TD), fused, strict=True):
        assert torch.equal(again, first)
    adapted.restore_base()


def two_layers(family):
    shape = config(family)
    shape.num_hidden_layers = 2
    if getattr(shape, "layer_types", None):
        shape.layer_types = shape.layer_types[:2]
    return randomised(shape, torch.float32), BaseSpec(model=f"tiny/{family}", dtype="float32")


@pytest.mark.parametrize(
    ("family", "travels"),
    slow_but(
        [("qwen2", False), ("qwen2", True), ("qwen3", True), ("phi4-mini", True), ("gemma3", True)],
        [],
    ),
)
def test_streamed_they_have_the_bits_of_the_resident_ones(family, travels, monkeypatch):
    """Weights that share their input lie side by side in the arena, biases too: nothing is stacked anew."""
    model, spec = two_layers(family)
    cut = Layout((StageLayers(0, 1), StageLayers(1, 2)), slot_counts=(1,), adapters_travel=travels)
    base = stream_model(model, spec, bench.CPU, cut)
    before = [parameter.data_ptr() for parameter in base.whole.model.parameters()]
    jobs = jobs_for(base.whole)
    executor = streamed_executor(base, Route.tiled)
    assert executor.is_fused
    assert [parameter.data_ptr() for parameter in base.whole.model.parameters()] == before
    for job in jobs:
        executor.attach(executors.job_training(base.whole, job))
    courses = [job.job_window(0, 1, False) for job in jobs]
    list(executors.run_program(executor, plan_window(courses, cut, CAPACITY), jobs))

    resident = Base.from_model(two_layers(family)[0], spec, bench.CPU)
    wanted = adapted_executor(resident, jobs, Route.tiled, monkeypatch)
    list(executors.run_program(wanted, plan_window(courses, one_device_layout(), CAPACITY), jobs))
    for job in jobs:
        assert executor.attached[job.name].progress.step == 1
        assert torch.equal(executor.attached[job.name].master, wanted.attached[job.name].master), job.name
