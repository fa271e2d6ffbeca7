"""Ops whose kernels fail to compile or launch are computed by plain torch, with one warning."""

from __future__ import annotations

import subprocess
import warnings

import pytest
import torch

from tests.ops.launches import Failing
from tests.ops.lora.site_cases import Case, Job, attached, values
from weftune.core.weights import Head
from weftune.ops import fallback
from weftune.ops import triton as kernels
from weftune.ops.adamw import AdamState, Update, gradient_norms, update
from weftune.ops.fallback import (
    KernelsFailed,
    KernelWarning,
    has_failed,
    is_kernel_failure,
    rehearse_kernels,
    run_with_fallback,
)
from weftune.ops.logprobs import target_logprobs
from weftune.ops.lora.tiled import lora_linear
from weftune.ops.norm import rms_norm, rms_norm_onto, skip_rms_norm
from weftune.ops.rotary import HeadNorms, rotary_split
from weftune.ops.swiglu import geglu, swiglu

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Nothing has failed before, and nothing has after the test."""
    pytest.importorskip("triton")
    monkeypatch.setattr(fallback, "_failed_ops", set())
    monkeypatch.setattr(fallback, "_rehearsal_results", {})


def refuse(*arguments):
    Failing().launch()


def test_a_kernel_that_fails_is_tried_once_and_warned_of_once():
    with pytest.warns(KernelWarning, match="AdamW is computed by plain torch.*`make smoke-gpu`") as found:
        assert run_with_fallback("AdamW", CPU, refuse, lambda: "plain") == "plain"
    assert len(found) == 1
    assert "does not run on CPU" in str(found[0].message)
    assert "out of resource: shared memory" in str(found[0].message)
    assert has_failed("AdamW")
    assert not has_failed("LoRA")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_with_fallback("AdamW", CPU, lambda: "kernel", lambda: "plain") == "plain"
        assert run_with_fallback("LoRA", CPU, lambda: "kernel", lambda: "plain") == "kernel"


REFUSED = [
    RuntimeError("Triton Error [CUDA]: no kernel image is available for execution on the device"),
    RuntimeError("PassManager::run failed"),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
    subprocess.CalledProcessError(1, ["gcc"]),
]
OTHERS = [
    torch.OutOfMemoryError("no kernel image, since memory is full"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    ValueError("no kernel image"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", REFUSED, ids=str)
def test_errors_of_compilers_and_drivers_that_launch_nothing_are_failures(error):
    assert is_kernel_failure(error)


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_lack_of_memory_and_errors_of_kernels_that_ran_are_raised(error):
    def raising():
        raise error

    for use in (
        lambda: run_with_fallback("op", CPU, raising, lambda: "plain"),
        lambda: rehearse_kernels("op", "key", torch.device("cpu"), raising),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fallback, "REHEARSING", ("cpu",))
            with pytest.raises(type(error)):
                use()
    assert not has_failed("op")


def test_a_rehearsal_runs_once_for_each_key_and_fails_again_without_running(monkeypatch):
    monkeypatch.setattr(fallback, "REHEARSING", ("cpu",))
    ran = []
    for _ in range(2):
        rehearse_kernels("LoRA", "few ranks", CPU, lambda: ran.append("few"))
    assert ran == ["few"]
    with pytest.warns(KernelWarning), pytest.raises(KernelsFailed):
        rehearse_kernels("LoRA", "many ranks", CPU, refuse)
    with pytest.raises(KernelsFailed):
        rehearse_kernels("LoRA", "many ranks", CPU, lambda: ran.append("many"))
    rehearse_kernels("LoRA", "few ranks", CPU, lambda: ran.append("again"))
    assert ran == ["few"]


def draw(device, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def gradients(function, *inputs):
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum((y.float() * draw(y.device, *y.shape)).sum() for y in outputs if y.is_floating_point())
    return [*outputs, *torch.autograd.grad(total, leaves)]


def of_norm(device):
    weight_D = draw(device, 48)
    return (
        gradients(lambda x: rms_norm(x, weight_D, 1e-5, 1.0), draw(device, 7, 48))
        + gradients(lambda h: skip_rms_norm(h, weight_D, 1e-5), draw(device, 7, 48))
        + gradients(
            lambda h, x: rms_norm_onto(h, x, weight_D, 1e-5), draw(device, 7, 48), draw(device, 7, 48)
        )
    )


def of_activation(device):
    return gradients(swiglu, draw(device, 5, 64)) + gradients(geglu, draw(device, 5, 64))


def of_rotary(device):
    angles = draw(device, 5, 8), draw(device, 5, 8)
    norms = HeadNorms(draw(device, 16), draw(device, 16) + 1, 1e-5)
    qkv_TN = draw(device, 5, 4 * 16)

    def keys_only(x):
        return rotary_split(x, *angles, 2, 1)[1]

    return (
        gradients(lambda x: rotary_split(x, *angles, 2, 1), qkv_TN)
        + gradients(lambda x: rotary_split(x, *angles, 2, 1, norms), qkv_TN)
        + gradients(keys_only, qkv_TN)
    )


def of_logprobs(device):
    head = Head(draw(device, 50, 16), softcap=3.0)
    targets_S = torch.arange(9, device=device)
    return gradients(lambda h: target_logprobs(h, targets_S, head), draw(device, 9, 16))


def of_adamw(device):
    def state(size):
        master, gradient = draw(device, size), draw(device, size) + 1
        return AdamState(master, master * 0.1, master**2, gradient, master.clone())

    states = [state(64), state(80), state(48)]
    norms_J = gradient_norms(states)
    updates = [Update(one, 3, 1e-2, 0.1, 1.0) for one in states]
    finite_J = update(updates, torch.tensor([1.0, -1.0, 0.5], device=device))
    assert finite_J.tolist() == [True, True, True]
    return [norms_J, *(vector for one in states for vector in one.vectors)]


OPS = {
    "norm.norm_forward": of_norm,
    "norm.norm_backward": of_norm,
    "swiglu.swiglu_forward": of_activation,
    "swiglu.swiglu_backward": of_activation,
    "rotary.rotary_forward": of_rotary,
    "rotary.rotary_backward": of_rotary,
    "logprobs.target_logprobs": of_logprobs,
    "adamw.squares": of_adamw,
    "adamw.update": of_adamw,
}


@pytest.mark.parametrize("kernel", OPS)
def test_an_op_whose_kernel_fails_returns_what_its_kernels_return(kernel, device, monkeypatch):
    wanted = OPS[kernel](device)
    module, name = kernel.split(".")
    monkeypatch.setattr(getattr(kernels, module), name, Failing())
    with pytest.warns(KernelWarning, match=f"The kernel {kernel} does not run") as found:
        got = OPS[kernel](device)
    assert len(found) == 1
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kernel", ["site.down", "site.up", "site_gradients.ds_db", "site_gradients.da"])
def test_lora_whose_kernel_fails_in_either_pass_raises_and_writes_nothing(kernel, device, monkeypatch):
    monkeypatch.setattr(fallback, "REHEARSING", (device.type,))
    case = Case([Job(20, rank=4, dropout=0.1)], features=32, widths=(32,), device=device.type)
    made = values(case)
    by_slot, group, rows = attached(case, made)
    anchor = torch.zeros((), device=device, requires_grad=True)
    module, name = kernel.split(".")
    monkeypatch.setattr(getattr(kernels, module), name, Failing())
    with pytest.warns(KernelWarning, match=f"The kernel {kernel} does not run"), pytest.raises(KernelsFailed):
        lora_linear(made.x, made.weight, None, None, anchor, group, rows, True)
    (entry,) = by_slot[0]
    assert not entry.da_RK.any()
    assert not entry.db_RN.any()


def test_a_rehearsal_adds_nothing_to_the_gradients(device, monkeypatch):
    monkeypatch.setattr(fallback, "REHEARSING", (device.type,))
    case = Case([Job(20, rank=4)], features=32, widths=(32,), device=device.type)
    made = values(case)
    by_slot, group, rows = attached(case, made)
    anchor = torch.zeros((), device=device, requires_grad=True)
    lora_linear(made.x, made.weight, None, None, anchor, group, rows, True)
    (entry,) = by_slot[0]
    assert not entry.da_RK.any()
    assert not entry.db_RN.any()
    assert len(fallback._rehearsal_results) == 1
