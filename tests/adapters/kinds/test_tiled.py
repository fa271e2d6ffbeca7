"""Kinds that the tiled kernels compute, in Triton's interpreter, against what their parts compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.adapters.kinds.tiled import LENGTHS, SPECS, differences, drawn, passed
from tests.bench import base as tiny_base
from tests.cases import slow_but
from tests.interpreter import interpret
from weftune.adapters import banks as all_banks
from weftune.adapters.bottleneck.spec import BottleneckSpec
from weftune.adapters.kinds import AdapterSpec
from weftune.adapters.tiled import TiledBank
from weftune.base.model import Base
from weftune.ops.lora.routes import Route

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here")
CLOSE = 2e-5


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    # A program takes milliseconds here, even one without work.
    monkeypatch.setattr(all_banks, "SLOTS", 8)


def rows_of(job: str) -> slice:
    at = [*SPECS].index(job)
    return slice(sum(LENGTHS[:at]), sum(LENGTHS[: at + 1]))


@pytest.mark.parametrize("family", slow_but(["llama", "qwen2"], ["qwen2"]))
def test_kinds_beside_one_another_compute_and_learn_what_their_parts_do(family: str) -> None:
    base = tiny_base(family, torch.float32)
    want = passed(base, SPECS, [*SPECS], Route.segmented)
    found = differences(passed(base, SPECS, [*SPECS], Route.tiled), want)
    assert max(found.values()) <= CLOSE, found
    assert min(gradient.norm() for gradient in want.gradients.values()) > 1e-2


@pytest.mark.parametrize("job", slow_but(SPECS, ["dora"]))
def test_alone_each_computes_to_the_bit_what_it_does_among_others(job: str) -> None:
    base, own = tiny_base("qwen2", torch.float32), rows_of(job)
    among = passed(base, SPECS, [*SPECS], Route.tiled)
    alone = passed(base, SPECS, [name if name == job else "nobody" for name in SPECS], Route.tiled)
    assert torch.equal(alone.y_TN[own], among.y_TN[own])
    assert torch.equal(alone.dx_TK[own], among.dx_TK[own])
    assert torch.equal(alone.gradients[job], among.gradients[job])


@pytest.mark.parametrize("sick", slow_but(SPECS, ["dora"]))
def test_a_nan_in_the_weights_of_one_stays_with_it(sick: str) -> None:
    def poisoned(base: Base, spec: AdapterSpec, number: int) -> Tensor:
        return drawn(base, spec, number) * (torch.nan if [*SPECS][number] == sick else 1.0)

    base = tiny_base("qwen2", torch.float32)
    well, ill = (passed(base, SPECS, [*SPECS], Route.tiled, draw) for draw in (drawn, poisoned))
    for job in SPECS:
        if job == sick:
            assert not ill.y_TN[rows_of(job)].isfinite().all()
        else:
            assert torch.equal(ill.y_TN[rows_of(job)], well.y_TN[rows_of(job)])
            assert torch.equal(ill.gradients[job], well.gradients[job])


def test_a_bottleneck_takes_what_the_kernels_have_written(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {"lora": SPECS["lora"], "bottleneck": BottleneckSpec(size=4), "dora": SPECS["dora"]}
    base, linear = tiny_base("qwen2", torch.float32), TiledBank.linear
    want, kernels = passed(base, specs, [*specs], Route.segmented), list[object]()
    monkeypatch.setattr(TiledBank, "linear", lambda *given: kernels.append(given) or linear(*given))
    found = differences(passed(base, specs, [*specs], Route.tiled), want)
    assert len(kernels) == 3
    assert max(found.values()) <= CLOSE, found


def test_vectors_that_matrices_are_computed_from_learn_what_they_do_in_plain_torch() -> None:
    """Nothing of one site's gradients may be counted at the next, whose matrices lie in the same place."""
    base, specs = tiny_base("llama", torch.float32), {"vera": SPECS["vera"]}
    found = differences(
        *(passed(base, specs, ["vera"], route, lengths=(11,)) for route in (Route.tiled, Route.segmented))
    )
    assert max(found.values()) <= CLOSE, found
