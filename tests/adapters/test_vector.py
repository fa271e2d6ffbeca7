import pytest
import torch

from weftune.adapters.vector import ParameterShape, VectorLayout
from weftune.ops.adamw import RateRun

LAYOUT = VectorLayout(
    (ParameterShape("x", "a", (2, 3)), ParameterShape("x", "b", (2, 4)), ParameterShape("y", "a", (1, 5)))
)


def test_views_cover_the_vector_in_order_and_share_its_memory():
    flat = torch.arange(LAYOUT.size, dtype=torch.float64)
    views = LAYOUT.views(flat)
    assert LAYOUT.size == 6 + 8 + 5
    assert torch.equal(torch.cat([view.flatten() for view in views.values()]), flat)
    views["x", "b"].fill_(-1)
    assert flat.tolist() == [*range(6), *[-1] * 8, *range(14, 19)]
    flat[-1] = 7
    assert views["y", "a"][0, -1] == 7


def test_a_vector_of_another_size_is_a_bug():
    with pytest.raises(AssertionError):
        LAYOUT.views(torch.zeros(LAYOUT.size + 1))


def test_neighbours_that_learn_at_one_rate_are_one_run():
    assert LAYOUT.rates == ()
    a, b, c = LAYOUT.parameters
    faster = [ParameterShape(one.site, one.name, one.shape, rate=4.0) for one in (b, c)]
    assert VectorLayout((a, *faster)).rates == (RateRun(0, 6, 1.0), RateRun(6, 19, 4.0))
    # What was stored when all learned alike fits.
    assert VectorLayout((a, *faster)) == LAYOUT
