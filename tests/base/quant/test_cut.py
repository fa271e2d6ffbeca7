"""The part of a quantised linear that a shard holds dequantises to the bits of the whole linear's part."""

import pytest
import torch
from torch import nn

from weftune.base.quant.formats import Fp8, Int8, Nf4
from weftune.base.quant.linear import QuantLinear, cut_quantised
from weftune.core.shapes import SiteSlice
from weftune.core.shards import indices_in_whole

FORMS = [Int8(), Fp8(), Nf4(), Nf4(is_nested=False)]


def read_quantisation(form, outputs, inputs):
    torch.manual_seed(0)
    made = QuantLinear((outputs, inputs), form, False, torch.float32, torch.device("meta"))
    made.set_parts(form.quantise(torch.randn(outputs, inputs) * torch.rand(outputs, 1)))
    return made


def cut_of(linear, part):
    """The part, after checking its bits."""
    made, whole_NK = cut_quantised(linear, linear.parts, part), linear.frozen_weight().matrix()
    want = whole_NK.index_select(1 if part.cuts_inputs else 0, indices_in_whole(part))
    got = made.frozen_weight().matrix() if isinstance(made, QuantLinear) else made.weight
    assert torch.equal(got, want)
    if isinstance(linear.form, Fp8):
        assert torch.equal(made.turned.view(torch.uint8), made.weight.view(torch.uint8).T)
        assert made.turned.is_contiguous()
    assert (made.out_features, made.in_features) == want.shape
    return made


@pytest.mark.parametrize("ranges", [((0, 96),), ((96, 300),), ((8, 16), (200, 264))])
@pytest.mark.parametrize("form", FORMS)
def test_parts_of_the_outputs_stay_quantised(form, ranges):
    """300 rows of 192 values are 900 blocks, 3.5 nested ones; fused linears have several ranges."""
    made = cut_of(read_quantisation(form, 300, 192), SiteSlice(ranges, cuts_inputs=False))
    assert isinstance(made, QuantLinear)
    assert made.form.name == form.name


@pytest.mark.parametrize("ranges", [((0, 64),), ((64, 192),), ((0, 64), (128, 192))])
@pytest.mark.parametrize("form", FORMS)
def test_parts_of_the_inputs_stay_quantised_where_blocks_end(form, ranges):
    assert isinstance(
        cut_of(read_quantisation(form, 300, 192), SiteSlice(ranges, cuts_inputs=True)), QuantLinear
    )


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((20, 96), SiteSlice(((0, 48),), cuts_inputs=True)),
        ((20, 192), SiteSlice(((96, 192),), cuts_inputs=True)),
        ((20, 96), SiteSlice(((0, 5),), cuts_inputs=False)),
        ((5, 33), SiteSlice(((0, 3),), cuts_inputs=False)),
    ],
)
def test_a_part_with_half_a_block_of_nf4_is_plain(shape, part):
    assert type(cut_of(read_quantisation(Nf4(), *shape), part)) is nn.Linear
    assert isinstance(cut_of(read_quantisation(Int8(), *shape), part), QuantLinear)
