"""Who may come aboard while a streamed run goes on: what the choice of its cut counted with."""

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.plan.stream_cases import NEVER, base, every_draft, gpu
from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.layout.need import StreamCase
from weftune.plan.program.layout import Layout

LAYERS = 5
# A base that stays as one stage keeps no input to recompute from: nobody cuts it so.
DRAFTS = st.sampled_from([draft for draft in every_draft(LAYERS) if draft.resident_stages != (True,)])
JOB_SETS = st.lists(
    st.builds(
        JobShape,
        st.just("a"),
        st.just(0),
        st.just(0),
        trainable_parameters=st.sampled_from([0, 5000, 80_000]),
        max_sample_tokens=st.integers(1, 60),
        batch_tokens=st.integers(60, 200),
    ),
    min_size=1,
    max_size=3,
)
CAPACITIES = st.integers(60, 200)


def memory(cut: Layout, budget: int = NEVER, fused: bool = False) -> MemoryModel:
    return MemoryModel(base(LAYERS), budget, uses_fused_ops=fused, layout=cut, fixed_slack_bytes=5000)


@settings(max_examples=150, deadline=None)
@given(DRAFTS, JOB_SETS, CAPACITIES, st.booleans(), st.booleans(), st.booleans())
def test_it_counts_what_the_choice_counted_and_never_more(draft, jobs, capacity, travels, offloads, fused):
    tokens = sum(job.batch_tokens for job in jobs)
    device = gpu(NEVER, uses_fused_ops=fused)
    case = StreamCase(base(LAYERS), tuple(jobs), device, tokens, capacity, travels, offloads)
    cut = draft.make_layout(travels, tokens if offloads else 0)
    found = memory(cut, fused=fused).peak_bytes(jobs, capacity)
    # Bytes of a token are a whole number here. More may not be counted: who was planned for must come aboard.
    assert 0 <= case.device_bytes(draft) - found <= capacity + LAYERS


def test_where_passes_may_be_captured_their_buffers_and_the_padding_of_inputs_are_counted():
    """On a GPU: two microbatches of rows, and a sixteenth of what stages are given in a round."""
    jobs = (JobShape("a", 0, 0, 5000, max_sample_tokens=60, batch_tokens=160),)
    shape, (draft, *_) = base(LAYERS), every_draft(LAYERS)
    plain, captured = (
        StreamCase(shape, jobs, gpu(NEVER, uses_fused_ops=fused), 160, 64, adapters_travel=False)
        for fused in (False, True)
    )
    row = shape.hidden * shape.bytes_per_value
    more = captured.device_bytes(draft) - len(draft.layer_counts) * 10 * row - 2 * 64 * row
    kept = max(draft.layer_counts) * (captured.memory.kept_bytes - plain.memory.kept_bytes)
    assert more == plain.device_bytes(draft) + kept


@settings(max_examples=150, deadline=None)
@given(DRAFTS, JOB_SETS, CAPACITIES, st.booleans())
def test_offloaded_inputs_make_the_room_that_the_choice_foresaw(draft, jobs, capacity, travels):
    # One stage is given nothing by another: there is nothing to offload.
    assume(len(draft.layer_counts) > 1)
    tokens = sum(job.batch_tokens for job in jobs)
    kept = StreamCase(base(LAYERS), tuple(jobs), gpu(NEVER, uses_fused_ops=False), tokens, capacity, travels)
    cut = draft.make_layout(travels)
    saved = memory(cut).peak_bytes(jobs, capacity)
    saved -= memory(replace(cut, offloaded_rows=tokens)).peak_bytes(jobs, capacity)
    assert saved == kept.device_bytes(draft) - replace(kept, offloads_inputs=True).device_bytes(draft)


@settings(max_examples=100, deadline=None)
@given(DRAFTS, JOB_SETS, st.integers(0, 500_000), st.booleans())
def test_microbatches_are_as_large_as_the_budget_allows(draft, jobs, more, offloads):
    cut = draft.make_layout(False, 1 if offloads else 0)
    least = memory(cut).peak_bytes(jobs, 60)
    found = memory(cut, least + more)
    capacity = found.choose_capacity(jobs, max_tokens=10_000)
    assert capacity >= 60
    assert found.peak_bytes(jobs, capacity) <= least + more
    assert capacity == 10_000 or found.peak_bytes(jobs, capacity + 2) > least + more
