"""How a base lies on devices: whose stages are whose, where they take turns, and what cannot be."""

import pytest

from weftune.core.shapes import LayerRange
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout, pipeline_layout

FIVE = tuple(StageLayers(number, number + 1, number in (1, 2)) for number in range(5))


def test_stages_go_round_the_workers_and_streamed_ones_take_turns_in_their_workers_slots():
    layout = Layout(FIVE, (2, 1))
    assert layout.stage_workers == (0, 1, 0, 1, 0)
    first, second = layout.for_worker(0), layout.for_worker(1)
    assert (first.own_stages, first.streamed_stages, first.initial_stages) == ((0, 2, 4), (0, 4), (0, 4))
    assert (second.own_stages, second.streamed_stages, second.initial_stages) == ((1, 3), (3,), (3,))
    assert [first.slot_of_stage(stage) for stage in first.streamed_stages] == [0, 1]
    assert first.stage_range(4) == LayerRange(4, 5, 5)


def test_one_device_holds_all_as_one_stage_that_stays():
    layout = one_device_layout(7)
    assert (layout.workers, layout.layers, layout.for_worker(0).streamed_stages) == (1, 7, ())


def test_a_pipeline_keeps_its_forwards_and_stages_that_take_turns_do_not_even_if_all_stay():
    """The search may find that all stages can stay as long as forwards are recomputed."""
    layers = (LayerRange(0, 2, 4), LayerRange(2, 4, 4))
    pipeline = pipeline_layout(layers, replicas=2)
    turns = Layout(pipeline.stages, (0, 0))
    assert pipeline.is_pipeline
    assert pipeline.replicas == 2
    assert not turns.is_pipeline


@pytest.mark.parametrize(
    ("layout", "complaint"),
    [
        (lambda: Layout(FIVE, (1,) * 6), "every worker has a stage"),
        (lambda: Layout(FIVE, (0, 1)), "needs a place to come to"),
        (lambda: Layout(FIVE, (1, 1), is_pipeline=True), "one stage, which stays"),
    ],
)
def test_what_cannot_be_is_refused(layout, complaint):
    with pytest.raises(AssertionError, match=complaint):
        layout()
