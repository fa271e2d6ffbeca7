import pytest
import torch

from weftune.adapters.kind import JobAdapter, NewAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.registry import get_kind
from weftune.adapters.vector import ParameterShape, VectorLayout
from weftune.ops.adamw import RateRun

LAYOUT = VectorLayout(
    (ParameterShape("x", "a", (2, 3)), ParameterShape("x", "b", (2, 4)), ParameterShape("y", "a", (1, 5)))
)


def test_views_cover_the_vector_in_order_and_share_its_memory():
    flat = torch.arange(LAYOUT.size, dtype=torch.float64)
    views = LAYOUT.parameter_views(flat)
    assert LAYOUT.size == 6 + 8 + 5
    assert torch.equal(torch.cat([view.flatten() for view in views.values()]), flat)
    views["x", "b"].fill_(-1)
    assert flat.tolist() == [*range(6), *[-1] * 8, *range(14, 19)]
    flat[-1] = 7
    assert views["y", "a"][0, -1] == 7


def test_views_are_the_same_however_parameters_of_one_shape_lie():
    shapes = [
        ("q", "a", (2, 3)),
        ("q", "b", (2, 3)),
        ("k", "a", (2, 3)),
        ("k", "b", (3, 2, 1)),
        ("n", "a", (4,)),
    ]
    parameters = [ParameterShape(f"layers.{at}.{site}", *rest) for at in range(4) for site, *rest in shapes]
    # Without one of them, and with one more, the rest lie no longer equally far apart.
    parameters = [*parameters[:7], *parameters[8:], ParameterShape("layers.9.q", "a", (2, 3))]
    layout = VectorLayout(tuple(parameters))
    whole = torch.arange(layout.size + 5, dtype=torch.float32)
    flat = whole[5:]
    views = layout.parameter_views(flat)
    assert list(views) == [(one.site, one.name) for one in parameters]
    assert [tuple(view.shape) for view in views.values()] == [one.shape for one in parameters]
    assert all(view.is_contiguous() for view in views.values())
    assert torch.equal(torch.cat([view.flatten() for view in views.values()]), flat)


def test_the_views_of_one_module_in_all_layers_are_made_by_one_call(monkeypatch):
    shapes = [("q", "a", (2, 8)), ("q", "b", (2, 8)), ("v", "a", (2, 8)), ("v", "b", (2, 4))]
    layout = VectorLayout(
        tuple(ParameterShape(f"layers.{at}.{site}", *rest) for at in range(50) for site, *rest in shapes)
    )
    assert len(layout._contiguous_runs) == len(shapes)


def test_a_vector_of_another_size_is_a_bug():
    with pytest.raises(AssertionError):
        LAYOUT.parameter_views(torch.zeros(LAYOUT.size + 1))


def test_neighbours_that_learn_at_one_rate_are_one_run():
    assert LAYOUT.rates == ()
    a, b, c = LAYOUT.parameters
    faster = [ParameterShape(one.site, one.name, one.shape, rate=4.0) for one in (b, c)]
    assert VectorLayout((a, *faster)).rates == (RateRun(0, 6, 1.0), RateRun(6, 19, 4.0))
    # What was stored when all learned alike fits.
    assert VectorLayout((a, *faster)) == LAYOUT


def test_an_adapter_without_a_site_here_has_nothing_to_draw():
    """A stage may have none of the layers that a job adapts."""
    lora = get_kind("lora")
    empty = VectorLayout(())
    lora.initialise(
        NewAdapter(JobAdapter("a", LoraSpec(), seed=1), empty.parameter_views(torch.empty(0))), ()
    )
    assert empty.parameter_views(torch.empty(0)) == {}
