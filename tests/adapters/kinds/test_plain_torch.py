"""Kinds that PEFT lacks: trained beside the others they equal a plain torch model with the same formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests import bench, oracle
from tests.adapters.kinds.cases import STEPS, WITHOUT_PEFT, job, samples
from tests.families import tiny
from weftune.adapters.bottleneck.spec import DOWN, DOWN_BIAS, UP, UP_BIAS
from weftune.adapters.kind import JobAdapter
from weftune.adapters.registry import get_kind
from weftune.errors import AdapterError
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import new_training
from weftune.trainer.export import write_portable

ACTIVATIONS = {"relu": nn.ReLU(), "gelu": nn.GELU()}


class Narrow(nn.Module):
    """A linear of the base and a bottleneck behind it."""

    def __init__(self, base: nn.Module, activation: str, start: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.base, self.activation = base, ACTIVATIONS[activation]
        self.own = nn.ParameterDict({name: nn.Parameter(value.clone()) for name, value in start.items()})

    def forward(self, x):
        y = self.base(x)
        narrow = self.activation(y @ self.own[DOWN].T + self.own[DOWN_BIAS])
        return y + narrow @ self.own[UP].T + self.own[UP_BIAS]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_beside_the_others_a_bottleneck_equals_plain_torch(family, tmp_path):
    base, jobs = bench.base(family), [job(kind, family) for kind in (*WITHOUT_PEFT, "lora", "ia3")]
    bench.train(base, tmp_path / "out", jobs, capacity=512)
    for one in jobs[: len(WITHOUT_PEFT)]:
        adapter = JobAdapter(one.name, one.adapter, one.seed)
        begun = new_training(adapter, Recipe(1), base.shape.sites, base.dtype, torch.device("cpu"))
        kind, start = get_kind("bottleneck"), begun.layout.parameter_views(begun.master)
        model = tiny(family, torch.float64).requires_grad_(False)
        for site in dict.fromkeys(site for site, _ in start):
            own = {name: value for (where, name), value in start.items() if where == site}
            path, _, last = site.rpartition(".")
            setattr(
                model.get_submodule(path),
                last,
                Narrow(model.get_submodule(site), one.adapter.activation, own),
            )
        batches = bench.batches(samples(one.name), 3, 2, STEPS)
        losses = oracle.train_model(model, batches, oracle.Recipe(STEPS, 2e-3, "linear", 2))
        named = {kind.stored_name(*place): place for place in start}
        end = {name: model.get_submodule(site).own[own] for name, (site, own) in named.items()}
        want = oracle.Trained(losses, {name: start[place] for name, place in named.items()}, end)
        oracle.assert_equal_float64(bench.trained(tmp_path / "out", one.name, want.start), want)


def test_houlsby_is_behind_attention_and_feedforward_and_pfeiffer_behind_one_of_them():
    names = [site.name for site in bench.base("llama").shape.sites]
    houlsby, pfeiffer = (job(kind, "llama").adapter for kind in WITHOUT_PEFT)
    endings = [
        {name.rpartition(".")[2] for name in names if one.targets_site(name)} for one in (houlsby, pfeiffer)
    ]
    assert endings == [{"o_proj", "down_proj"}, {"down_proj"}]


def test_it_can_neither_be_merged_nor_served_and_says_so(tmp_path):
    base = bench.base("llama")
    bench.train(base, tmp_path / "out", [job("bottleneck", "llama")])
    with pytest.raises(AdapterError, match="a bottleneck adapter cannot be merged"):
        get_kind("bottleneck").merge(tmp_path / "out" / "bottleneck", base.sites(), base.shape.sites)
    with pytest.raises(AdapterError, match="is a bottleneck adapter, which servers do not load"):
        write_portable(tmp_path / "out" / "bottleneck", tmp_path / "portable")
