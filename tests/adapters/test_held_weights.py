"""A base whose weights are no matrices: bytes with a scale a row, made into matrices for a product."""

from __future__ import annotations

import weakref
from itertools import product

import pytest
import torch
from torch import nn

from tests.adapters.attached_banks import attach, empty_banks, together
from tests.adapters.test_kinds import drawn, gradients
from tests.adapters.toys import GateSpec, toys  # noqa: F401 (a fixture)
from tests.base.packs import base_of, random_samples
from tests.base.quant.bases import quantised_base
from tests.cases import slow_but
from tests.families import tiny
from tests.interpreter import interpret
from weftune.adapters.banks import Banks
from weftune.adapters.lora.spec import LoraSpec
from weftune.base.shape import linears
from weftune.ops.lora.routes import Route
from weftune.plan.cost.estimate import base_layers
from weftune.plan.cost.memory import MemoryModel

EXACT = 1e-12


class Bytes:
    """W = codes · scale, and which matrices of it are alive."""

    def __init__(self, codes_NK, scale_N):
        self.codes_NK, self.scale_N, self.alive = codes_NK, scale_N, weakref.WeakSet()

    @property
    def stored_bytes(self):
        return self.codes_NK.nbytes + self.scale_N.nbytes

    @property
    def empty_rows(self):
        return self.scale_N.new_empty(0, self.codes_NK.shape[1])

    def write(self, out_NK):
        out_NK.copy_(self.matrix())

    def matrix(self):
        made = self.codes_NK.to(self.scale_N.dtype) * self.scale_N[:, None]
        self.alive.add(made)
        return made

    def slice_outputs(self, low, high):
        return Bytes(self.codes_NK[low:high], self.scale_N[low:high])


class ByteLinear(nn.Linear):
    """A linear of a base; by itself it multiplies as any other."""

    def __init__(self, plain):
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None, device="meta")
        weight = plain.weight.detach()
        scale_N = weight.abs().amax(dim=1) / 127
        self.bias = plain.bias
        self.weight = nn.Parameter((weight / scale_N[:, None]).round().to(torch.int8), requires_grad=False)
        self.scale_N = nn.Parameter(scale_N, requires_grad=False)
        self.held = Bytes(self.weight.data, self.scale_N.data)

    def frozen_weight(self):
        return self.held

    def forward(self, x):
        return nn.functional.linear(x, self.held.matrix(), self.bias)


def in_bytes(family, dtype=torch.float64):
    """A base with all sites in bytes, and one that has the matrices which those stand for."""
    held, plain = tiny(family, dtype), tiny(family, dtype)
    for name, module in linears(held).items():
        made = ByteLinear(module)
        held.set_submodule(name, made)
        plain.get_submodule(name).weight.data.copy_(made.held.matrix())
    return base_of(held), base_of(plain)


SPECS = {"lora": LoraSpec(rank=3, alpha=6.0), "gate": GateSpec(("q_proj", "down_proj"))}


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("jobs", [("lora", "x"), ("lora", "gate")])
@pytest.mark.parametrize("route", [Route.reference, Route.segmented])
def test_adapters_learn_on_bytes_what_they_learn_on_the_matrices_that_those_stand_for(route, jobs):
    microbatch = together(jobs, random_samples((6, 9)))
    found = []
    for base in in_bytes("qwen2"):
        banks = empty_banks(base)
        for job in jobs[: 1 + (jobs[1] in SPECS)]:
            attach(banks, base, job, SPECS[job], drawn(base, SPECS[job], 0))
        found.append(gradients(base, banks, microbatch, route))
    (logits, of_bytes), (wanted, of_matrices) = found
    torch.testing.assert_close(logits, wanted, rtol=EXACT, atol=EXACT)
    for job, gradient in of_matrices.items():
        torch.testing.assert_close(of_bytes[job], gradient, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(("route", "ends"), [(Route.segmented, "qkv"), (Route.tiled, "k")])
def test_no_matrix_lives_between_a_products_forward_and_its_backward(route, ends, monkeypatch):
    """Nor of a group of sites, whose weights are stacked, nor by the kernels."""
    interpret(monkeypatch)
    base, plain = in_bytes("qwen2", torch.float32)
    names = tuple(f"model.layers.0.self_attn.{end}_proj" for end in ends)
    microbatch = together(["lora"], random_samples((9,)))
    found = []
    for one in (base, plain):
        banks = Banks(one.sites(), one.shape.sites, next(one.model.parameters()), [names])
        attach(banks, one, "lora", SPECS["lora"], drawn(one, SPECS["lora"], 0))
        x_TK = torch.randn(9, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with banks.bind(microbatch, route if one is base else Route.segmented, training=True):
            y_TN = banks.linear(names[0])(x_TK, None)
            if one is base:
                assert not any(module.held.alive for module in base.sites().values())
            y_TN.pow(2).sum().backward()
        found.append((y_TN.detach(), x_TK.grad, banks.attached["lora"].gradient))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "lying"),
    slow_but(product(("llama", "qwen2"), ("together", "apart")), [("llama", "apart"), ("qwen2", "together")]),
)
def test_on_codes_adapters_learn_by_the_kernels_what_they_learn_in_plain_torch(family, lying, monkeypatch):
    """Codes of sites that share their input are laid together; streamed ones stay where they are."""
    interpret(monkeypatch)
    if lying == "apart":
        monkeypatch.setattr("weftune.adapters.sites._stack_codes", lambda *given: None)
    names = tuple(f"model.layers.0.self_attn.{end}_proj" for end in "qkv")
    microbatch = together(["lora"], random_samples((14,)))
    found = []
    for route in (Route.tiled, Route.segmented):
        base = quantised_base(tiny(family, torch.float32), "fp8")
        banks = Banks(base.sites(), base.shape.sites, torch.empty(0), [names])
        assert (banks._groups[names[0]].frozen.weight.codes().data_ptr() == codes_at(base, names[0])) == (
            lying == "together"
        )
        attach(banks, base, "lora", SPECS["lora"], drawn(base, SPECS["lora"], 0))
        x_TK = torch.randn(14, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with banks.bind(microbatch, route, training=True):
            y_TN = banks.linear(names[0])(x_TK, None)
            y_TN.pow(2).sum().backward()
        found.append((y_TN.detach(), x_TK.grad, banks.attached["lora"].gradient))
    (y_TN, dx_TK, learned), (y_want, dx_want, learned_want) = found
    torch.testing.assert_close(y_TN, y_want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(learned, learned_want, rtol=1e-4, atol=1e-4)
    # All sites have one scale a row of their gradients here, and each has its own there.
    assert 0 < (dx_TK - dx_want).norm() < 0.05 * dx_want.norm()


def codes_at(base, site):
    return base.model.get_submodule(site).weight.data_ptr()


def test_memory_counts_the_bytes_of_the_base_and_those_of_adapters_apart():
    base, plain = in_bytes("llama", torch.bfloat16)
    values = sum(site.in_features * site.out_features for site in plain.shape.sites)
    scales = sum(site.out_features for site in plain.shape.sites)
    assert base.shape.parameters == plain.shape.parameters
    assert base.shape.base_bytes == plain.shape.base_bytes - values + 2 * scales
    layers = [
        [
            layer.weight_bytes
            for layer in base_layers(one.shape, 0, has_separate_ends=False)
            if layer.kind == "layer"
        ]
        for one in (base, plain)
    ]
    assert [2 * (held - matrices) for held, matrices in zip(*layers, strict=True)] == [
        2 * scales - values for _ in layers[0]
    ]
    of_bytes, of_matrices = (MemoryModel(one.shape, budget_bytes=1 << 30) for one in (base, plain))
    assert of_bytes.bytes_per_parameter == of_matrices.bytes_per_parameter
