"""What a pass over quantised weights is expected to take."""

from __future__ import annotations

import pytest

from tests.plan.outlooks import CONFIG, SHAPE
from weftune.base.architecture import spec_shape
from weftune.base.spec import BaseSpec
from weftune.core.shapes import ModelShape
from weftune.plan.cost.cluster import parse_cluster
from weftune.plan.cost.estimate import CODED_SPEED, base_layers, base_pass_time, data_sheet_speed

TOKENS = 8192
SPEED = data_sheet_speed(parse_cluster("1xH200").devices[0])


def layers_take(shape: ModelShape) -> float:
    layers = [layer for layer in base_layers(shape, 0, has_separate_ends=False) if layer.kind == "layer"]
    return base_pass_time(layers, SPEED)(TOKENS)


def test_layers_whose_codes_are_multiplied_take_the_time_of_their_products() -> None:
    plain, fp8 = layers_take(SHAPE), layers_take(spec_shape(BaseSpec(model="8b", quantize="fp8"), CONFIG, 2))
    assert plain / fp8 == pytest.approx(CODED_SPEED, rel=0.05)


def test_layers_that_are_dequantised_take_a_little_more_than_plain_ones() -> None:
    nf4 = layers_take(spec_shape(BaseSpec(model="8b", quantize="nf4"), CONFIG, 2))
    assert 1.0 < nf4 / layers_take(SHAPE) < 1.1
