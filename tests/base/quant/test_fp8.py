"""Weights of 8-bit floats with a scale a row, in both orders."""

from __future__ import annotations

import pytest
import torch

from tests.base.folders import word_tokenizer
from tests.base.quant.bases import plain_folder, quantised_base, quantised_model
from tests.base.quant.test_nf4 import dequantised, matrix
from tests.families import tiny
from weftune import JobSpec, Trainer
from weftune.base.architecture import spec_shape
from weftune.base.config import read_config
from weftune.base.load import inspect, load_plain
from weftune.base.quant.formats import Fp8, refuse_without_fp8, supports_fp8
from weftune.base.quant.linear import QuantLinear, unrounded_activations
from weftune.base.quant.stored import stored_bytes
from weftune.base.spec import BaseSpec
from weftune.core.device_class import class_for_capability, pretend_device_class
from weftune.core.weights import multiply_codes, multiply_unrounded
from weftune.errors import BaseModelError
from weftune.plan.cost.memory import MemoryModel

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_value_is_off_by_more_than_half_of_its_last_digit(dtype):
    weight_NK, form = matrix((300, 96), dtype), Fp8()
    parts = form.quantise(weight_NK)
    announced = form.parts(300, 96)
    assert {name: (tuple(value.shape), value.dtype) for name, value in parts.items()} == {
        name: (part.shape, part.dtype) for name, part in announced.items()
    }
    assert sum(value.nbytes for value in parts.values()) == stored_bytes("fp8", 300, 96)
    weight_NK = weight_NK.float()
    off_NK = (dequantised(form, parts, (300, 96)) - weight_NK).abs()
    # Three digits after the first, and below 2⁻⁶ a fixed step of 2⁻⁹.
    assert (off_NK <= weight_NK.abs() / 16 * 1.001 + parts["scale"][:, None] * 2.0**-10 * 1.001).all()
    assert torch.equal(parts["turned"].view(torch.uint8), parts["weight"].view(torch.uint8).T)
    assert all(value.is_contiguous() for value in parts.values())


def test_rows_of_zeros_stay_zeros_and_a_nan_is_not_hidden():
    weight_NK, form = matrix((3, 8)), Fp8()
    weight_NK[1] = 0
    weight_NK[2, 3] = torch.nan
    found_NK = dequantised(form, form.quantise(weight_NK), (3, 8))
    assert torch.equal(found_NK[1], torch.zeros(8))
    assert found_NK[2].isnan().any()
    assert found_NK[0].isfinite().all()


def test_a_matrix_that_is_quantised_in_pieces_has_the_bits_of_one(monkeypatch):
    weight_NK, form = matrix((300, 128)), Fp8()
    whole = form.quantise(weight_NK)
    monkeypatch.setattr("weftune.base.quant.formats.READ_VALUES", 1000)
    pieces = form.quantise(weight_NK)
    assert all(torch.equal(pieces[part].view(torch.uint8), whole[part].view(torch.uint8)) for part in whole)


def test_no_matrix_is_counted_for_a_product_but_the_codes_of_its_rows_are(tmp_path):
    spec = BaseSpec(model=str(plain_folder(tmp_path, tiny("llama", torch.bfloat16))), quantize="fp8")
    for shape in (inspect(spec, CPU), spec_shape(spec, read_config(spec), 4)):
        assert shape.multiplies_stored_format
        assert (shape.matrix_bytes, shape.code_bytes) == (0, 2 * 48)
        plain = inspect(BaseSpec(model=spec.model), CPU)
        more = [
            MemoryModel(one, budget_bytes=1 << 30).predict_need([], 100).activation_bytes
            for one in (shape, plain)
        ]
        assert more[0] - more[1] == 100 * shape.code_bytes


def test_packing_is_checked_by_the_matrices_and_passes_are_made_of_codes_afterwards(monkeypatch):
    used = []

    def watched(base, plain):
        used.extend(module.multiply for module in base.model.modules() if isinstance(module, QuantLinear))

    monkeypatch.setattr("weftune.base.model.check_packing", watched)
    base = quantised_base(tiny("llama", torch.float32), "fp8")
    assert set(used) == {multiply_unrounded}
    linears = [module for module in base.model.modules() if isinstance(module, QuantLinear)]
    assert {module.multiply for module in linears} == {multiply_codes}
    module, x_TK = linears[0], torch.randn(5, linears[0].in_features)
    exact_TN = x_TK @ module.frozen_weight().matrix().T
    with unrounded_activations(base.model):
        torch.testing.assert_close(module(x_TK), exact_TN, rtol=1e-5, atol=1e-5)
    assert (module(x_TK) - exact_TN).abs().max() > 1e-3


# -- without the hardware --------------------------------------------------------------------------------

SENTENCE = "fp8 needs a GPU with fp8 tensor cores .* which the CPU does not have: write nf4 or int8"


def test_training_in_fp8_without_the_hardware_is_one_sentence_before_anything_is_read(tmp_path):
    folder = plain_folder(tmp_path / "model", tiny("llama", torch.float32))
    spec = BaseSpec(model=str(folder), quantize="fp8")
    trainer = Trainer(spec, output=tmp_path / "out", tokenizer=word_tokenizer())
    trainer.add(JobSpec(name="a", data=[{"text": "w4 w5 w6"}], steps=1))
    with pytest.raises(BaseModelError, match=SENTENCE):
        trainer.run()


def test_an_older_gpu_is_called_by_its_name_and_a_newer_one_is_not_refused(monkeypatch):
    spec, cuda = BaseSpec(model="x", quantize="fp8"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    for capability, served in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        with pretend_device_class(class_for_capability(capability)):
            assert supports_fp8(cuda) is served
            if served:
                refuse_without_fp8(spec, cuda)
            else:
                with pytest.raises(BaseModelError, match="which NVIDIA A100 does not have"):
                    refuse_without_fp8(spec, cuda)
    refuse_without_fp8(BaseSpec(model="x", quantize="nf4"), CPU)


def test_an_adapter_can_be_merged_or_tried_without_the_hardware(tmp_path):
    folder = plain_folder(tmp_path, tiny("llama", torch.float32))
    found = load_plain(BaseSpec(model=str(folder), dtype="float32", quantize="fp8"), CPU)
    wanted = quantised_model(tiny("llama", torch.float32), "fp8")
    ids = torch.tensor([[4, 5, 6, 7]])
    assert torch.equal(found(ids).logits, wanted(ids).logits)
