"""`--pipeline auto`: shares if the base fits each device, else as few stages as fit; always a sentence."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftune.core.shapes import ModelShape, SiteShape
from weftune.errors import PlanError
from weftune.plan.cost.layers import stage_shape
from weftune.plan.cost.memory import SLACK_BYTES, MemoryModel
from weftune.plan.layout.choose import Machine
from weftune.plan.layout.cut import PartCosts, cut_layers
from weftune.plan.layout.stage_count import choose_stages

HIDDEN, LAYERS, VOCABULARY = 1024, 12, 1000
SITES = tuple(
    SiteShape(f"model.layers.{layer}.{name}", HIDDEN, HIDDEN) for layer in range(LAYERS) for name in "qkvo"
)
PARAMETERS = LAYERS * 4 * HIDDEN**2 + 2 * HIDDEN * VOCABULARY
SHAPE = ModelShape(LAYERS, HIDDEN, VOCABULARY, PARAMETERS, 2, SITES, context=2048)


def chosen(count, budget, spare, jobs=1, costs=None):
    return choose_stages(MemoryModel(SHAPE, budget, spare=spare), count, "GPU", jobs, costs)


def test_a_base_that_fits_one_device_is_not_cut():
    choice = chosen(4, 8 << 30, spare=1)
    assert choice.stages == 1
    assert choice.why.startswith("--pipeline auto: one process, since the base and its passes need 0.")
    assert choice.why.endswith("each of 4 GPUs has 8.00 GiB for a run")


def test_where_the_base_fits_each_device_they_share_the_jobs():
    choice = chosen(4, 8 << 30, spare=1, jobs=10)
    assert (choice.stages, choice.shares) == (1, 4)
    assert choice.why.startswith(
        "--pipeline auto: not cut, 4 shares of the 10 jobs, since the base and its passes need 0."
    )
    assert choice.why.endswith("each of 4 GPUs has 8.00 GiB for a run")
    assert chosen(4, 8 << 30, spare=1, jobs=3).shares == 3
    assert chosen(1, 8 << 30, spare=1, jobs=3).shares == 1
    cut = chosen(4, 600 << 20, spare=0, jobs=10)
    assert (cut.stages, cut.shares) == (2, 1)


def test_a_base_that_fits_nowhere_gets_a_sentence():
    with pytest.raises(PlanError, match=r"even in 4 stages the largest needs .* each of 4 GPUs has 0.25 GiB"):
        chosen(4, SLACK_BYTES, spare=1)
    with pytest.raises(
        PlanError, match=r"the base and its passes need .* the GPU has 0.25 GiB for a run; use more or larger"
    ):
        chosen(1, SLACK_BYTES, spare=1)


def test_otherwise_it_is_cut_into_as_few_stages_as_fit():
    whole = chosen(1, 8 << 30, spare=0)
    assert "the base and its passes need 0.63 GiB" in whole.why
    choice = chosen(4, 600 << 20, spare=0)
    assert choice.stages == 2
    assert "2 stages, since the base and its passes need 0.63 GiB, its largest stage 0.58 GiB" in choice.why
    assert chosen(4, 580 << 20, spare=0).stages == 3


def test_no_more_stages_than_layers_are_tried():
    with pytest.raises(PlanError, match=f"even in {LAYERS} stages"):
        chosen(64, 1, spare=1)


def test_stages_are_counted_as_the_run_will_cut_them():
    """A dear head leaves its stage few layers, so that another holds more."""
    cheap, dear = PartCosts(0.0, 1.0, 0.1), PartCosts(0.0, 1.0, 6.0)
    assert chosen(4, 600 << 20, spare=0, costs=cheap).stages == 2
    with pytest.raises(PlanError, match=r"even in 4 stages the largest needs 0.66 GiB"):
        chosen(4, 600 << 20, spare=0, costs=dear)


@given(st.integers(1, 8), st.integers(2 * SLACK_BYTES, 3 * SLACK_BYTES))
def test_what_is_chosen_fits_and_one_stage_fewer_does_not(count, budget):
    try:
        stages = chosen(count, budget, spare=0).stages
    except PlanError:
        assert not any(fits(one, budget) for one in range(1, count + 1))
        return
    assert fits(stages, budget)
    assert not any(fits(fewer, budget) for fewer in range(1, stages))


def fits(stages, budget):
    """Counted by hand: weights, a thousand tokens of every microbatch in flight, and slack."""
    cut = [SHAPE] if stages == 1 else [stage_shape(SHAPE, one) for one in cut_layers(SHAPE, stages)]
    return all(
        2 * one.parameters + 1024 * int(1.5 * 2 * HIDDEN * len(one.sites) * 2) * stages + SLACK_BYTES
        <= budget
        for one in cut
    )


def test_replicas_divide_the_devices_or_what_the_only_one_has():
    gpus, cpu = Machine(on_gpu=True, devices=8, budget=100), Machine(on_gpu=False, budget=100)
    assert gpus.shared_by(2) == replace(gpus, devices=4)
    assert cpu.shared_by(2) == replace(cpu, budget=50)
