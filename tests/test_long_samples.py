"""Samples that train in tiles of rows, with layers recomputed or offloaded: the same adapters as untiled."""

from __future__ import annotations

import pytest
import torch

from tests import bench
from tests.adapters.kinds.cases import job
from tests.adapters.kinds.test_battery import KINDS, equal
from tests.base.quant.bases import quantised_base
from tests.cases import slow_but
from tests.families import EVERY, tiny
from weftune import JobSpec
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.program.program import NOTHING, Recompute
from weftune.run import assemble
from weftune.run.passes import adapted, layers, row_tiles

LAYERS = 2
TILE = 5
"""Rows per tile: it divides neither samples nor microbatches."""
MODES = {
    "kept": Recompute(recomputes_outputs=True, tile_rows=TILE),
    "recomputed": Recompute(recomputes_outputs=True, recomputed_layers=LAYERS, tile_rows=TILE),
    "attention kept": Recompute(
        recomputes_outputs=True, recomputed_layers=LAYERS, tile_rows=TILE, keeps_attention=True
    ),
    "first layer recomputed": Recompute(
        recomputes_outputs=True, recomputed_layers=1, tile_rows=TILE, keeps_attention=True
    ),
    "offloaded": Recompute(True, LAYERS, TILE, keeps_attention=True, offloaded_layers=LAYERS),
    "inputs offloaded": Recompute(True, LAYERS, TILE, keeps_attention=False, offloaded_layers=1),
}
FUSED = [family for family in EVERY if family not in ("opt", "gpt2")]


def fused(base, route, *_):
    return adapted.AdaptedBase(base, route, fuses_layers=True)


def train(output, recompute, base, jobs):
    """Train jobs with fused layers and this recomputation, on the CPU, and return the output."""
    calls = []

    def counted(h_TD, anchor, parts, tiles, keep):
        calls.append((len(tiles), keep))
        return row_tiles.tiled_layer(h_TD, anchor, parts, tiles, keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "tiled_layer", counted)
        patch.setattr(MemoryModel, "choose_recompute", lambda *_: recompute)
        patch.setattr(assemble, "AdaptedBase", fused)
        bench.train(base, output, jobs, capacity=64)
    assert any(tiles > 2 for tiles, _ in calls) == (recompute.tile_rows > 0)
    assert any(keep.host for _, keep in calls) == (recompute.offloaded_layers > 0)
    return output


@pytest.fixture
def train_with(tmp_path):
    return lambda recompute, base, jobs, name: train(tmp_path / name, recompute, base, jobs)


@pytest.fixture(scope="module")
def untiled(tmp_path_factory):
    return train(tmp_path_factory.mktemp("untiled") / "out", NOTHING, bench.base("llama"), family_jobs())


def family_jobs():
    data = bench.rows(bench.samples(12, seed=3, shortest=9, longest=18))
    common = dict(steps=3, batch_size=3, learning_rate=1e-2, data=data, eval={"fraction": 0.25, "every": 2})
    return [
        JobSpec(name="a", seed=1, adapter={"rank": 4, "dropout": 0.5}, **common),
        JobSpec(name="b", seed=2, adapter={"rank": 2, "targets": ["o_proj"]}, **common),
    ]


@pytest.mark.parametrize("mode", slow_but(MODES, ["kept", "recomputed", "inputs offloaded"]))
def test_whatever_is_kept_and_wherever_jobs_learn_the_same(mode, train_with, untiled):
    tiled = train_with(MODES[mode], bench.base("llama"), family_jobs(), "tiled")
    for name in ("a", "b"):
        equal(tiled, untiled, name)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_learns_in_tiles_what_it_learns_untiled(mode, train_with):
    jobs = [job(kind, "llama") for kind in KINDS]
    untiled = train_with(NOTHING, bench.base("llama"), jobs, "untiled")
    tiled = train_with(MODES[mode], bench.base("llama"), jobs, "tiled")
    for kind in KINDS:
        equal(tiled, untiled, kind)


@pytest.mark.parametrize("family", slow_but(FUSED, ["gemma3", "qwen3_moe"]))
def test_every_family_learns_in_tiles_what_it_learns_untiled(family, train_with):
    """Windows of attention, norms of heads, norms behind branches, and experts."""
    untiled = train_with(NOTHING, bench.base(family), family_jobs(), "untiled")
    tiled = train_with(MODES["offloaded"], bench.base(family), family_jobs(), "tiled")
    for name in ("a", "b"):
        equal(tiled, untiled, name)


@pytest.mark.slow
def test_a_quantised_base_is_trained_in_tiles_as_untiled(train_with):
    bases = (quantised_base(tiny("llama", torch.float64), "nf4") for _ in range(2))
    untiled = train_with(NOTHING, next(bases), family_jobs(), "untiled")
    tiled = train_with(MODES["attention kept"], next(bases), family_jobs(), "tiled")
    for name in ("a", "b"):
        equal(tiled, untiled, name)


def test_tiles_are_of_about_equal_size_and_cover_every_row():
    assert row_tiles.row_tiles(11, 5) == [slice(0, 4), slice(4, 8), slice(8, 11)]
    assert row_tiles.row_tiles(30_011, 8192)[0] == slice(0, 7552)
    assert row_tiles.row_tiles(30_011, 8192)[-1].stop == 30_011
    assert max(one.stop - one.start for one in row_tiles.row_tiles(8193, 8192)) <= 8192
