"""Plans that can be priced and drawn but not run are refused with a sentence before anything happens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.outlooks import ground, outline, outlines
from weftune.errors import PlanError
from weftune.plan.outlook.chunked import chunked
from weftune.plan.outlook.fit import lay_out
from weftune.plan.outlook.outlook import outlook
from weftune.plan.outlook.streamed import stream_outlook
from weftune.run.executor import refuse_what_is_not_run


def test_a_pipeline_is_refused():
    program = outlook(ground("2xH100"), outlines(2)).run.program
    with pytest.raises(PlanError, match="for 2 devices"):
        refuse_what_is_not_run(program)


def test_streamed_stages_are_refused():
    program = stream_outlook(ground("T4"), outlines(1)).run.program
    with pytest.raises(PlanError, match="Evict, Load"):
        refuse_what_is_not_run(program)


def test_chunks_are_refused():
    job = replace(outline("a", 10), batches=((256,),))
    place = ground("H100")
    program = chunked([job], (("a",),), 64, place, lay_out(place, [job], 512)).program
    with pytest.raises(PlanError, match="chunks of 64 rows"):
        refuse_what_is_not_run(program)


def test_a_plan_for_one_device_is_not():
    refuse_what_is_not_run(outlook(ground("H100"), outlines(2)).run.program)
