"""Where the samples of a microbatch lie, for plain passes and captured ones."""

import pytest

from tests import bench
from tests.adapters.attached_banks import attach, together
from tests.adapters.test_kinds import drawn
from tests.base.packs import random_samples
from weftune.adapters.lora.spec import LoraSpec
from weftune.base.attention import pack
from weftune.core.deterministic import deterministic_kernels
from weftune.ops.lora.routes import Route
from weftune.plan.program.program import NOTHING
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.passes.graph_inputs import GraphInputs, make_graph_key
from weftune.run.passes.rows import bucket_pack, build_membership, pad_microbatch, to_device_microbatch


@pytest.mark.parametrize("lengths", [(5, 6, 7), (5, 6, 7, 8, 9), (6, 6, 6), (5,)])
def test_a_deterministic_pass_has_the_samples_of_a_captured_one(lengths):
    """The kernel of the attention adds up otherwise for another number of samples."""
    base, spec = bench.base("gpt2"), LoraSpec(rank=2)
    adapted = AdaptedBase(base, Route.tiled)
    attach(adapted.banks, base, "a", spec, drawn(base, spec, 0))
    microbatch = together(["a"] * len(lengths), random_samples(lengths))
    laid = to_device_microbatch(microbatch, microbatch.rows, bench.CPU)
    capture_graph = GraphInputs(
        adapted.banks, make_graph_key(laid, adapted.banks, NOTHING, base.shape.context), bench.CPU
    )
    usual = build_membership(base, adapted.banks, laid, adapted.route)
    capture_graph.copy(laid, usual)
    assert usual.pack.boundaries.tolist() == pack(lengths, bench.CPU).boundaries.tolist()
    with deterministic_kernels():
        strict = build_membership(base, adapted.banks, laid, adapted.route).pack
    assert strict.boundaries.tolist() == capture_graph.pack.boundaries.tolist()
    assert (strict.max_length, strict.has_equal_lengths) == (
        capture_graph.pack.max_length,
        capture_graph.pack.has_equal_lengths,
    )
    assert strict.lengths == lengths


def test_no_bucket_is_longer_than_the_context():
    """A context that is no power of two, such as Qwen3's 40960."""
    base = bench.base("gpt2")
    microbatch = together(["a", "a"], random_samples((90, 50)))
    laid = to_device_microbatch(microbatch, microbatch.rows, bench.CPU)
    assert make_graph_key(laid, AdaptedBase(base, Route.tiled).banks, NOTHING, context=100).max_length == 100
    assert bucket_pack(pack((90, 50), bench.CPU), context=100).max_length == 100
    assert bucket_pack(pack((90, 50), bench.CPU), context=2048).max_length == 128


def test_the_only_sample_of_a_microbatch_is_padded_itself_up_to_the_context():
    """So that the attention of a single long sample has the kernels of a plain batch."""
    alone = together(["a"], random_samples((90,)))
    assert pad_microbatch(alone, 96, context=100).sample_lengths == (96,)
    assert pad_microbatch(alone, 96, context=95).sample_lengths == (90, 6)
    assert pad_microbatch(alone, 96).sample_lengths == (90, 6)
    assert pad_microbatch(together(["a", "a"], random_samples((50, 40))), 96, context=100).sample_lengths == (
        50,
        40,
        6,
    )
