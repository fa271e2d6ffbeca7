"""Samples in chunks: every token once, chunks of a sample in order forth and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.outlooks import ground, outline
from weftune.plan.program.check import check
from weftune.plan.program.program import Backward, IllegalProgram
from weftune.plan.studies.chunked import chunked, chunked_forecast
from weftune.plan.studies.fit import lay_out

PIPE = ground("2xH100")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=5), min_size=1, max_size=2),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([64, 128, 256]),
    st.booleans(),
)
def test_every_token_is_trained_once_in_a_legal_program(jobs, size, together):
    made = [
        replace(outline(f"job{number}", 10), batches=tuple(map(tuple, batches)))
        for number, batches in enumerate(jobs)
    ]
    names = tuple(job.name for job in made)
    groups = (names,) if together else tuple((name,) for name in names)
    found = chunked(made, groups, size, PIPE, lay_out(PIPE, made, 512))
    check(found.program)
    assert found.program.chunk == size
    assert sum(one.tokens for one in found.program.microbatches) == sum(
        sum(batch) for batches in jobs for batch in batches
    )
    assert all(one.rows % size == 0 for one in found.program.microbatches)
    slices = [one for unit in found.units for chunk in unit.chunks for one in chunk]
    whole = sum(length**2 for batches in jobs for batch in batches for length in batch)
    assert sum(one.squares for one in slices) == whole, "attention costs what it costs for whole samples"


def test_chunks_that_run_back_in_the_wrong_order_are_illegal():
    job = replace(outline("a", 10), batches=((256,),))
    program = chunked([job], (("a",),), 64, PIPE, lay_out(PIPE, [job], 512)).program
    first = program.devices[-1]
    swapped = [one for one in first if isinstance(one, Backward)]
    turned = iter(reversed(swapped))
    wrong = tuple(next(turned) if isinstance(one, Backward) else one for one in first)
    with pytest.raises(IllegalProgram, match="comes before what it sends is computed"):
        check(replace(program, devices=(*program.devices[:-1], wrong)))


def test_one_chunk_to_a_microbatch_costs_what_whole_samples_cost():
    """Samples of one chunk each: nothing is cut, so squares and tokens are those of whole samples."""
    job = replace(outline("a", 10), batches=((512,) * 8,))
    layout = lay_out(PIPE, [job], 512)
    found = chunked_forecast([job], (("a",),), 512, PIPE, layout)
    assert found.microbatches == 8
    halves = chunked_forecast([job], (("a",),), 256, PIPE, layout)
    assert halves.microbatches == 16
    assert halves.busy > found.busy, "a pass more costs its launches"
