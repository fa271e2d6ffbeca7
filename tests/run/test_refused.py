"""Plans that can be priced and drawn but not run are refused with a sentence before anything happens."""

from __future__ import annotations

import pytest

from benchmarks.studies.search import outlook
from tests import bench
from tests.plan.outlooks import ground, outlines
from tests.plan.program.test_check import course
from weftune.errors import PlanError
from weftune.plan.program.layout import Layout, StageLayers
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor


def run(program):
    return list(resident_executor(bench.base()).run(program, None, lambda: False))


def test_a_pipeline_is_refused():
    program = outlook(ground("2xH100"), outlines(2)).run.program
    with pytest.raises(PlanError, match="for 2 devices"):
        run(program)


def test_streamed_stages_are_refused():
    stages = (StageLayers(0, 1), StageLayers(1, 2))
    program = plan_window([course("a", [[5]])], Layout(stages, (1,)), 16)
    with pytest.raises(PlanError, match="Evict, Load"):
        run(program)
