"""Rows that a captured pass finds by their numbers: its inputs on a CPU, and the pass uncaptured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests import bench
from tests.adapters.attached_banks import together
from tests.base.packs import random_samples
from tests.interpreter import interpret
from tests.run.passes.test_layers import one_layer
from weftune.adapters import banks as all_banks
from weftune.adapters.bottleneck.spec import BottleneckSpec
from weftune.adapters.kind import JobAdapter
from weftune.adapters.kinds import AdapterSpec
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.pissa.spec import PissaSpec
from weftune.adapters.prefix.spec import PrefixSpec
from weftune.adapters.registry import get_kind
from weftune.base.attention import GatheredPrefixes, Pack
from weftune.base.model import Base
from weftune.core.batch import Microbatch
from weftune.ops.lora.routes import Route
from weftune.plan.program.program import NOTHING
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.passes.graph_inputs import GraphInputs, GraphKey, make_graph_key
from weftune.run.passes.rows import build_membership, to_device_microbatch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here")
SPECS: dict[str, AdapterSpec] = {
    "lora": LoraSpec(rank=3, targets=("down_proj",)),
    "relu": BottleneckSpec(size=4),
    "gelu": BottleneckSpec(size=3, activation="gelu", targets=("gate_proj", "o_proj")),
    "silu": BottleneckSpec(size=2, activation="silu", placement="pfeiffer"),
    "short": PrefixSpec(num_virtual_tokens=2),
    "long": PrefixSpec(num_virtual_tokens=5),
}
FIRST = {"lora": (5,), "relu": (9,), "long": (4, 7, 3), "gelu": (6,), "short": (8,), "silu": (2,)}
OTHER = {"short": (3,), "gelu": (2,), "long": (6, 5, 4), "relu": (7,), "lora": (12,), "silu": (5,)}
"""Of each job, the lengths of its samples: as many rows and samples in both."""
CLOSE = 2e-5


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr(all_banks, "SLOTS", 8)


class ScoredJobs:
    """Jobs on a tiny base whose layers are fused, and what passes of it give them."""

    def __init__(
        self,
        base: Base,
        specs: dict[str, AdapterSpec],
        sick: Sequence[str] = (),
        route: Route = Route.tiled,
    ) -> None:
        self.base, self.adapted = base, AdaptedBase(base, route)
        self.gradients: dict[str, Tensor] = {}
        for job, spec in specs.items():
            self.attach(job, spec, job in sick)

    def attach(self, job: str, spec: AdapterSpec, sick: bool = False) -> None:
        layout = get_kind(spec.kind).layout(spec, self.base.shape.sites)
        generator = torch.Generator().manual_seed(len(self.gradients))
        weights = 0.3 * torch.randn(layout.size, generator=generator, dtype=self.base.dtype)
        self.gradients[job] = torch.zeros(layout.size)
        weights = weights * torch.nan if sick else weights
        self.adapted.banks.attach(JobAdapter(job, spec, 0), layout, weights, self.gradients[job])

    def plain(self, microbatch: Microbatch) -> dict[str, Tensor]:
        laid = to_device_microbatch(microbatch, microbatch.rows, bench.CPU)
        found = build_membership(self.adapted.base, self.adapted.banks, laid, self.adapted.route)
        with self.adapted.banks.bind(laid.microbatch, self.adapted.route, True, found.rows):
            return self._passed(self.base.hidden(laid.microbatch, found.pack), microbatch)

    def key(self, microbatch: Microbatch) -> GraphKey:
        laid = to_device_microbatch(microbatch, microbatch.rows, bench.CPU)
        return make_graph_key(laid, self.adapted.banks, NOTHING, self.base.shape.context)

    def inputs(self, microbatch: Microbatch) -> GraphInputs:
        return GraphInputs(self.adapted.banks, self.key(microbatch), bench.CPU)

    def gathered(self, feed: GraphInputs, microbatch: Microbatch) -> dict[str, Tensor]:
        """What a captured pass with these inputs would compute."""
        feed.fill(to_device_microbatch(microbatch, microbatch.rows, bench.CPU))
        with self.adapted.banks.bind(feed.microbatch, Route.tiled, True, feed.rows, feed.gathering.gathered):
            return self._passed(self.base.hidden(feed.microbatch, with_lengths(feed, microbatch)), microbatch)

    def _passed(self, h_TD: Tensor, microbatch: Microbatch) -> dict[str, Tensor]:
        for gradient in self.gradients.values():
            gradient.zero_()
        generator = torch.Generator().manual_seed(9)
        h_TD.backward(torch.randn(h_TD.shape, generator=generator, dtype=h_TD.dtype))
        rows = {segment.job: h_TD[segment.rows].detach() for segment in microbatch.segments}
        return rows | {f"d {job}": gradient.clone() for job, gradient in self.gradients.items()}


def with_lengths(feed: GraphInputs, microbatch: Microbatch) -> Pack:
    """The packs of the inputs with the lengths of their samples, which the attention of a CPU goes by."""
    prefixes = feed.pack.prefixes
    if isinstance(prefixes, GatheredPrefixes):
        lengths = [length for length in prefixes.pack.boundaries.diff().tolist() if length]
        assert max(lengths) <= prefixes.pack.max_length
        prefixes = replace(prefixes, pack=replace(prefixes.pack, lengths=tuple(lengths)))
    return replace(feed.pack, lengths=microbatch.sample_lengths, prefixes=prefixes)


def microbatch_of(jobs: Mapping[str, Sequence[int]]) -> Microbatch:
    """The samples of a job are one segment."""
    names = [job for job, lengths in jobs.items() for _ in lengths]
    made = together(names, random_samples([length for lengths in jobs.values() for length in lengths]))
    own = {job: [one for one in made.segments if one.job == job] for job in jobs}
    return replace(made, segments=tuple(replace(one[0], stop=one[-1].stop) for one in own.values()))


def test_a_pass_that_gathers_computes_what_one_that_knows_the_rows_does() -> None:
    jobs, other = ScoredJobs(one_layer("llama"), SPECS), microbatch_of(OTHER)
    feed = jobs.inputs(microbatch_of(FIRST))
    assert jobs.key(microbatch_of(FIRST)) == jobs.key(other)
    feed.fill(to_device_microbatch(microbatch_of(FIRST), other.rows, bench.CPU))
    found, wanted = jobs.gathered(feed, other), jobs.plain(other)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value.norm() > 0
        assert (found[name] - value).norm() <= CLOSE * value.norm(), name


@pytest.mark.parametrize("gathered", [False, True])
def test_where_nobody_else_has_adapters_a_bottleneck_gets_all_of_its_gradient(gathered: bool) -> None:
    """The first linears of the base have no input that needs a gradient."""
    base, spec, microbatch = one_layer("llama"), SPECS["relu"], microbatch_of({"relu": (5, 8)})
    plain = ScoredJobs(base, {"relu": spec}, route=Route.segmented)
    wanted = plain.plain(microbatch)["d relu"]
    plain.adapted.restore_base()
    jobs = ScoredJobs(base, {"relu": spec})
    found = jobs.gathered(jobs.inputs(microbatch), microbatch) if gathered else jobs.plain(microbatch)
    layout = get_kind(spec.kind).layout(spec, base.shape.sites)
    for parameter, value in layout.parameter_views(wanted).items():
        assert value.norm() > 0, parameter
        other = layout.parameter_views(found["d relu"])[parameter]
        assert (other - value).norm() <= CLOSE * value.norm(), parameter


def test_a_nan_stays_with_its_job() -> None:
    base, microbatch = one_layer("llama"), microbatch_of(FIRST)
    jobs = ScoredJobs(base, SPECS)
    healthy = jobs.gathered(jobs.inputs(microbatch), microbatch)
    jobs.adapted.restore_base()
    jobs = ScoredJobs(base, SPECS, sick=("relu", "long"))
    for name, value in jobs.gathered(jobs.inputs(microbatch), microbatch).items():
        if name.endswith(("relu", "long")):
            assert value.isnan().any(), name
        else:
            assert torch.equal(value, healthy[name]), name


def test_who_comes_aboard_again_has_another_key_and_who_was_not_there_has_no_part_in_it() -> None:
    jobs, microbatch = ScoredJobs(one_layer("llama"), SPECS), microbatch_of(FIRST)
    before = jobs.key(microbatch)
    assert [one.job for one in before.gathered_jobs] == ["relu", "gelu", "silu", "short", "long"]
    assert [(one.prefix_keys, one.samples) for one in before.gathered_jobs[3:]] == [(2, 1), (5, 4)]
    jobs.adapted.banks.detach("gelu")
    jobs.attach("gelu", SPECS["gelu"])
    assert jobs.key(microbatch) != before
    assert {one.job for one in before.gathered_jobs} == {
        one.job for one in jobs.key(microbatch).gathered_jobs
    }
    assert not jobs.key(microbatch_of({"lora": (44,)})).gathered_jobs


def test_only_kinds_that_change_outputs_alone_are_gathered() -> None:
    specs = {"relu": SPECS["relu"], "long": SPECS["long"], "pissa": PissaSpec(rank=2)}
    banks = ScoredJobs(one_layer("llama"), specs).adapted.banks
    able = microbatch_of({"relu": (3,), "long": (4,)})
    assert banks.is_capturable(able, gathers_rows=True)
    assert not banks.is_capturable(able)
    assert not banks.is_capturable(microbatch_of({"relu": (3,), "pissa": (4,)}), gathers_rows=True)
