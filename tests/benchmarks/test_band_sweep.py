"""The sweep of launches at large ranks, as far as Triton's interpreter can run it."""

import pytest
import torch

from benchmarks import band_sweep
from tests.interpreter import interpret

pytest.importorskip("triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the sweep itself runs the kernels compiled")
def test_every_kernel_of_a_sweep_runs_with_the_launch_of_training(monkeypatch):
    interpret(monkeypatch)
    monkeypatch.setattr(band_sweep, "ROWS", 8)
    site = band_sweep.site_of(40, (128, 24), (9, 100), torch.device("cpu"), torch.float32)
    assert site.group.table.rank_PS.tolist() == [[9, 100]] * 2
    for kernel in band_sweep.KERNELS.values():
        own, *others = band_sweep.steps_of(kernel, site)
        assert own[0].startswith("*")
        assert not any(name.startswith("*") for name, _ in others)
        own[1]()()


def test_what_a_sweep_comes_to_is_told_for_a_whole_model():
    found = {"down": {"o": {"*(64, 4, 4)": 100.0, "(128, 4, 4)": 80.0}, "qkv": {"*(64, 8, 3)": 50.0}}}
    assert band_sweep.whole(found) == "down        4.80 ms   best    4.16 ms"
