"""Passes of a base that stays on its device: who is in a microbatch says whether it may be captured."""

import pytest
import torch

from tests import bench
from tests.adapters.attached_banks import attach, together
from tests.adapters.test_kinds import all_kinds, drawn
from tests.adapters.toys import toys  # noqa: F401 (a fixture)
from tests.base.packs import random_samples
from tests.run import executors
from weftune.ops.lora.routes import Route
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.passes.graphs import CapturedPasses
from weftune.run.passes.plain import PlainPasses
from weftune.run.passes.rows import StageVisit, to_device_microbatch


@pytest.mark.usefixtures("toys")
def test_kinds_without_kernels_are_never_missing_from_passes_that_could_be_captured():
    """Here nothing can be: a pass that asked for it would fail."""
    base = bench.base("gpt2")
    adapted = AdaptedBase(base, Route.tiled)
    for seed, (job, spec) in enumerate(all_kinds("gpt2").items()):
        attach(adapted.banks, base, job, spec, drawn(base, spec, seed))
    microbatch = together(["lora", "gate"], random_samples((5, 6)))
    laid = to_device_microbatch(microbatch, microbatch.rows, bench.CPU)
    plain = PlainPasses(adapted, {0: base})
    gradients = []
    for passes in (plain, *(CapturedPasses(adapted, {0: base}) for _ in range(2))):
        for one in adapted.banks.attached.values():
            one.gradient.zero_()
        visit, rows = StageVisit(0, 0), executors.in_flight(laid)
        h_TD = passes.forward(visit, rows, None, keeps_activations=True)
        assert rows.pass_times.is_typical
        passes.backward(visit, rows, None, torch.ones_like(h_TD))
        gradients.append([adapted.banks.attached[job].gradient.clone() for job in ("lora", "gate")])
    for found in gradients:
        assert all(gradient.norm() > 1e-3 for gradient in found)
        assert all(map(torch.equal, found, gradients[0]))
