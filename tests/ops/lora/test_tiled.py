"""The tiled route in Triton's interpreter against plain torch, one job after another."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.cases import slow_but
from tests.ops.lora.site_cases import Case, Job, attached, close, healthy_after, run, truth, values
from weftune.ops import dropout
from weftune.ops.lora.tiled import forward
from weftune.ops.lora.tiling import ProductPlan, SiteCall, choose_tiling

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_tiled_gpu.py runs the kernels compiled"),
]


CASES = {
    "one row": Case([Job(1, rank=8)], gap=0),
    "rank 1 and odd rows": Case([Job(37, rank=1)]),
    "rank 7 over two tiles": Case([Job(83, rank=7)]),
    "ranks 8, 24 and 100": Case([Job(5, rank=8), Job(33, rank=24), Job(9, rank=100)]),
    "rank 256": Case([Job(19, rank=256)]),
    "rank 256 in three parts": Case([Job(9, rank=256), Job(4, rank=3)], widths=(24, 8, 8), residual=True),
    "several pieces": Case([Job(100, rank=4), Job(31, rank=5), Job(70, rank=16)], piece=32),
    "an empty segment and an empty slot": Case([Job(0, rank=8), Job(6, rank=8), None, Job(3, rank=2)]),
    "no gap, no padding": Case([Job(32, rank=4), Job(32, rank=6)], gap=0, padding=0),
    "no job attached": Case([], padding=40),
    "bias and residual": Case([Job(12, rank=4), Job(7, rank=3)], bias=True, residual=True),
    "two parts": Case([Job(20, rank=4), Job(9, rank=8)], widths=(40, 24)),
    "three parts, one job with but one of them": Case(
        [Job(20, rank=4), Job(9, rank=8, sites=(1,))], widths=(80, 16, 16), bias=True
    ),
    "a transposed weight": Case([Job(9, rank=4)], transposed=True),
    "widths of no alignment": Case([Job(9, rank=3), Job(11, rank=5)], features=37, widths=(21, 7)),
    "a sum over K in shares": Case([Job(30, rank=4), Job(9, rank=8)], widths=(16, 8), features=600),
}


@pytest.mark.parametrize(
    ("name", "drop"),
    slow_but(product(CASES, (0.0, 0.1)), [*((name, 0.1) for name in CASES), ("bias and residual", 0.0)]),
)
def test_values_and_gradients_equal_plain_autograd_over_one_job_after_another(name, drop):
    case = CASES[name].dropping(drop)
    close(run(case), truth(case))


@pytest.mark.parametrize("plan", slow_but(ProductPlan, [ProductPlan.wide, ProductPlan.fused]))
def test_masks_of_a_shard_are_those_of_its_inputs_in_the_whole_linear(plan):
    case = Case([Job(20, rank=4), Job(9, rank=70)], first_input=96).dropping(0.3)
    close(run(case, plan=plan), truth(case))


@pytest.mark.slow
def test_sixty_four_adapters_keep_apart():
    jobs = [Job(1 + index % 3, rank=1 + index % 9, dropout=0.1) for index in range(64)]
    case = Case(jobs, features=32, widths=(32,), gap=0)
    got, want = run(case), truth(case)
    # It hangs on a single sum, of terms that are 23 together and cancel to 0.2; how numpy adds them up
    # differs between processors.
    cancels = "da part0 slot27"
    close({cancels: got.pop(cancels)}, {cancels: want.pop(cancels)}, bound=1e-5)
    close(got, want)


@pytest.mark.parametrize(
    ("plan", "residual", "bias"),
    slow_but(
        product((ProductPlan.wide, ProductPlan.wide_beside), (False, True), (False, True)),
        [
            (ProductPlan.wide, True, False),
            (ProductPlan.wide_beside, False, True),
            (ProductPlan.wide_beside, True, True),
        ],
    ),
)
def test_the_order_of_the_frozen_product_does_not_matter(bias, residual, plan):
    case = Case([Job(20, rank=4), Job(9, rank=8)], widths=(24, 8), bias=bias, residual=residual)
    close(run(case, plan=plan), truth(case))


def test_gradients_beside_the_frozen_product_are_the_same_as_before_it():
    """Some slots have several pieces, the sums over inputs and outputs are split, ranks are many."""
    jobs = [Job(50, rank=70), Job(9, rank=8), Job(20, rank=3)]
    case = Case(jobs, features=264, widths=(256, 264), piece=32).dropping(0.1)
    _, group, rows = attached(case, values(case))
    chosen = choose_tiling(rows, group, case.features, case.dtype)
    assert chosen.down_splits > 1
    assert chosen.ds_splits > 1
    close(run(case, plan=ProductPlan.wide_beside), truth(case))


@pytest.mark.parametrize("large", ["residual", "bias"])
def test_beside_a_residual_or_a_bias_what_a_young_adapter_adds_is_not_rounded_away(large):
    """The last digit of 2²³ is 1, and the adapter adds a twentieth: most of its traces are in what rounding
    makes of the frozen product."""
    case = Case([Job(64, rank=8)], features=64, widths=(256,), gap=0)
    made = values(case)
    made.b = {place: b / 20 for place, b in made.b.items()}
    # Adapters are held until the end: the table has their addresses only.
    adapters, group, rows = attached(case, made)
    call = SiteCall(
        group, rows, True, choose_tiling(rows, group, case.features, case.dtype), ProductPlan.wide
    )
    plain, *_ = forward(made.x, made.weight, None, None, call)
    added = plain.double() - made.x.double() @ made.weight.double().T
    assert added.abs().max() < 0.5
    beside = torch.full_like(plain, 2.0**23)
    given = (None, beside) if large == "residual" else (beside[0], None)
    y, *_ = forward(made.x, made.weight, *given, call)
    seen = y.double() - beside - (plain.double() - added)
    assert (seen * added).sum() / (added * added).sum() == pytest.approx(1.0, abs=0.25)
    del adapters


@pytest.mark.parametrize("one_read", [False, True])
def test_ds_and_db_are_the_same_from_one_read_of_dy_and_from_two(one_read):
    case = Case([Job(80, rank=4), Job(9, rank=8)], widths=(300, 8), piece=64)
    close(run(case, one_read=one_read), truth(case))


def test_masks_are_those_of_the_reference_bit_for_bit():
    """With A the identity and B its twin, what comes back through y is the mask itself."""
    case = Case([Job(50, rank=32, dropout=0.3)], features=32, widths=(32,), gap=2, seed=5)
    case = case.reading_the_mask()
    kept = dropout.keep_mask_TK(case.site_key(0, 0), case.token_index[2:52], 32, 0.3)
    assert torch.equal(run(case)["y"][2:52] != 0, kept)


def test_evaluating_drops_nothing_and_scales_nothing_up():
    case = Case([Job(20, rank=4, dropout=0.5), Job(9, rank=8, dropout=0.1)])
    close(run(case, training=False), truth(case.dropping(0.0)))


def test_a_second_backward_adds_to_the_first():
    case = Case([Job(20, rank=4), Job(70, rank=8)], piece=32)
    once = truth(case)
    twice = {name: value * (2 if name.startswith(("da", "db")) else 1) for name, value in once.items()}
    close(run(case, times=2), twice)


def test_an_input_that_needs_no_gradient_gets_none_and_the_adapters_get_theirs():
    case = Case([Job(20, rank=4), Job(9, rank=8)], widths=(24, 8))
    got, want = run(case, wants_dx=False), truth(case)
    assert got.pop("dx") is None
    close(got, {name: value for name, value in want.items() if name != "dx"})


def test_two_runs_give_the_same_bits():
    case = Case([Job(20, rank=4), Job(70, rank=8)], widths=(24, 8), piece=32).dropping(0.1)
    first, second = run(case), run(case)
    assert all(torch.equal(first[name], second[name]) for name in first)


POISONS = ("x", "a", "b", "dy", "padding")
IN_PIECES, IN_ONE = (32, 0.1, ProductPlan.wide), (1024, 0.0, ProductPlan.wide)
BESIDE = (32, 0.1, ProductPlan.wide_beside)


@pytest.mark.parametrize(
    ("poison", "piece", "drop", "plan"),
    slow_but(
        ((poison, *how) for poison, how in product(POISONS, (IN_PIECES, IN_ONE, BESIDE))),
        [
            ("x", *IN_PIECES),
            ("b", *IN_PIECES),
            ("padding", *IN_ONE),
            ("dy", *BESIDE),
        ],
    ),
)
def test_a_nan_stays_with_its_owner(poison, piece, drop, plan):
    case = Case([Job(20, rank=4), Job(40, rank=8), Job(9, rank=2)], widths=(24, 8), piece=piece)
    healthy_after(case.dropping(drop), poison, plan)


@pytest.mark.parametrize("plans", slow_but(["few", "every"], []))
def test_kernels_compile_without_a_gpu_and_use_the_tensor_cores(plans, tmp_path):
    """In a process of its own, since Triton is either an interpreter or a compiler."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    asked = [sys.executable, "-m", "tests.ops.lora.tiled_compiled", plans]
    root = Path(__file__).parents[3]
    done = subprocess.run(asked, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    products = {"down", "up", "ds_db", "ds_alone", "da", "add_dx", "product", "product backward"}
    coded = {"product of codes", "product backward of codes"}
    products |= {"large_y", "large_dx"} | coded
    assert set(found) == products | {"sum_rows", "add_gradients"}
    for name, made in found.items():
        hopper = name.startswith(("product", "large"))
        assert made["shared"] <= (227 if hopper else 160) << 10, name
        assert made["spilled"] == 0, name
        assert not made["serialized"] or name in ("down", "da"), name
        assert any("mma" in word for word in made["ptx"]) == (name in products), name
        assert ("e4m3.e4m3" in made["ptx"]) == (name in coded), name
        assert "ld.global.b16" not in made["ptx"], name
