"""The same kernels compiled, in bfloat16, against float64 on the CPU: run with `pytest -m gpu`."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from tests.adapters.kinds.tiled import SPECS, differences, passed
from weftune.adapters.bottleneck.spec import BottleneckSpec
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.bench.sizes import Size, build
from weftune.bench.timing import Hardware
from weftune.ops.lora.routes import Route

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SIZE = Size(
    name="small", hidden=256, layers=2, heads=4, kv_heads=2, intermediate=512, vocabulary=128, context=1024,
    rope_theta=10000.0,
)  # fmt: skip
LENGTHS = (150, 70, 333, 129, 64, 200)
CLOSE = 2e-2
"""Of bfloat16, whose last digit is 0.4 %."""


@pytest.mark.parametrize(
    "kinds", [[*SPECS], ["dora"], ["ia3"], ["vera"], [*SPECS, "bottleneck"]], ids="-".join
)
def test_compiled_kernels_compute_and_learn_what_the_parts_do_in_float64(kinds: list[str]) -> None:
    specs = {kind: {**SPECS, "bottleneck": BottleneckSpec(size=16)}[kind] for kind in kinds}
    model = build(SIZE, Hardware(torch.device("cpu"), torch.bfloat16))
    exact = Base.from_model(
        deepcopy(model).double(), BaseSpec(model="exact", dtype="float64"), torch.device("cpu")
    )
    want = passed(exact, specs, kinds, Route.segmented, lengths=LENGTHS)
    hardware = torch.device("cuda", 0)
    base = Base.from_model(model.to(hardware), BaseSpec(model="half", dtype="bfloat16"), hardware)
    found = differences(passed(base, specs, kinds, Route.tiled, lengths=LENGTHS), want)
    assert max(found.values()) <= CLOSE, found
