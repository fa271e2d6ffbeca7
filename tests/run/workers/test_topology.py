"""Workers that stream together take GPUs under different root complexes in turn."""

from itertools import pairwise

import pytest

from weftune.plan.layout.mapping import Topology, contention
from weftune.run.workers.topology import find_root_complex, order_gpus


def test_the_root_complex_is_read_from_the_kernels_tree(tmp_path):
    found = tmp_path / "devices" / "pci0000:16" / "0000:16:01.0" / "0000:17:00.0"
    found.mkdir(parents=True)
    listed = tmp_path / "bus"
    listed.mkdir()
    (listed / "0000:17:00.0").symlink_to(found)
    assert find_root_complex("0000:17:00.0", listed) == "pci0000:16"
    assert find_root_complex("0000:99:00.0", listed) is None


@pytest.mark.parametrize(
    ("roots", "order"),
    [
        (["a", "a", "b", "b"], (0, 2, 1, 3)),
        (["a", "b", "a", "b"], (0, 1, 2, 3)),
        (["a", "a", "a", "a"], (0, 1, 2, 3)),
        (["a", "b"], (0, 1)),
        (["a", "a", None, "b"], (0, 1, 2, 3)),
    ],
)
def test_neighbours_share_no_root_where_roots_are_known_and_several(roots, order):
    assert order_gpus(roots) == order


def test_eight_gpus_under_two_roots_contend_less_than_in_their_own_order():
    order = order_gpus(["a"] * 4 + ["b"] * 4)
    assert sorted(order) == list(range(8))
    topology = Topology((4, 4))
    assert contention(order, topology, 16) < contention(tuple(range(8)), topology, 16)
    assert all((one < 4) != (other < 4) for one, other in pairwise(order))
