"""Sequences of many adapters, decoded together, beside transformers' `generate` with PEFT, one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from tests.adapters.kinds.cases import case, write_start
from tests.adapters.kinds.test_tokens import TOKENS
from tests.adapters.kinds.test_tokens import write_start as write_trained_tokens
from tests.base.folders import wrapper_folder
from tests.base.packs import CPU, base_of, packed, random_samples
from tests.base.quant.bases import plain_folder
from tests.cases import slow_but
from tests.families import EVERY, MORE, WRAPPERS, tiny
from weftune.adapters.kinds import KINDS
from weftune.adapters.registry import adapter_layout, get_kind
from weftune.base.load import load_base
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.core.batch import Segment
from weftune.errors import UserError
from weftune.generate.adapters import attach_adapter_folder
from weftune.generate.cache import PAGE_ROWS
from weftune.generate.decoder import Decoder
from weftune.generate.sampling import Sampling
from weftune.plan.cost.memory import decoder_row_bytes
from weftune.run.passes.adapted import AdaptedBase

PEFT_KINDS = ("lora", "dora", "vera", "ia3", "prompt", "prefix")
OTHER_KINDS = ("bottleneck", "diff")
REFUSED = {("opt", "prompt"), ("qwen3_5", "prefix")}
"""Embeddings of this OPT are narrower than its layers, and not all layers of Qwen3.5 have keys and values."""
NEW = 12
PROMPTS = [tokens.tolist() for tokens in random_samples((5, 19, 9, 33, 2, 16, 17, 11, 7), seed=3)]
MIB = 1 << 20


def other_folder(folder: Path, base: Base, kind: str, family: str) -> Path:
    """A random adapter of a kind that PEFT lacks."""
    spec = KINDS[kind](**{key: value for key, value in case(kind, family).adapter.items() if key != "kind"})
    layout = adapter_layout(spec, base.shape.sites)
    weights = 0.1 * torch.randn(layout.size, generator=torch.Generator().manual_seed(1), dtype=base.dtype)
    get_kind(kind).save(folder, spec, layout.parameter_views(weights), base.shape.sites, "tiny")
    return folder


def adapted_with(family: str, folder: Path, kinds: tuple[str, ...], dtype: torch.dtype) -> AdaptedBase:
    base = base_of(tiny(family, dtype))
    adapted = AdaptedBase(base)
    for kind in kinds:
        own = folder / kind
        if kind in PEFT_KINDS:
            write_start(own, base.model, kind, family)
        else:
            other_folder(own, base, kind, family)
        attach_adapter_folder(adapted, kind, own)
    return adapted


def greedy(model: torch.nn.Module, prompt: list[int], **settings: float) -> list[int]:
    tokens_1T = torch.tensor([prompt])
    written = model.generate(
        input_ids=tokens_1T,
        attention_mask=torch.ones_like(tokens_1T),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        **settings,
    )
    return written[0, len(prompt) :].tolist()


def logprobs_of(logits_TV: Tensor, tokens: list[int]) -> Tensor:
    """Of the last tokens, from the logits of a whole sequence."""
    own = logits_TV[-len(tokens) - 1 : -1].double().log_softmax(-1)
    return own.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
@pytest.mark.parametrize(
    "family",
    slow_but([*EVERY, *MORE, "qwen3_5"], ["gemma3", "gpt2", "qwen3_5"]),
)
def test_greedy_tokens_of_every_kind_in_one_batch_equal_transformers_with_peft(family, tmp_path):
    kinds = [kind for kind in (*PEFT_KINDS, *OTHER_KINDS) if (family, kind) not in REFUSED]
    adapted = adapted_with(family, tmp_path, tuple(kinds), torch.float32)
    decoder = Decoder(adapted, MIB)
    names = [None, *kinds]
    sampling = Sampling(max_tokens=NEW, prompt_logprobs=True)
    made = [decoder.submit(prompt, sampling, name) for name, prompt in zip(names, PROMPTS, strict=False)]
    decoder.run_until_idle()
    for name, prompt, one in zip(names, PROMPTS, made, strict=False):
        if name in OTHER_KINDS:
            continue
        model = tiny(family, torch.float32)
        if name is not None:
            model = PeftModel.from_pretrained(model, tmp_path / name).eval()
        assert one.tokens == greedy(model, prompt), name
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([prompt + one.tokens])).logits[0]
        expected = logprobs_of(logits_TV, prompt[1:] + one.tokens)
        got = torch.tensor(one.prompt_logprobs + one.logprobs)
        assert torch.allclose(got.double(), expected, atol=1e-5, rtol=0), name
        assert one.finish_reason == "length"


def uncached(adapted: AdaptedBase, adapter: str | None, tokens: list[int]) -> Tensor:
    """Logits of a whole sequence in one training pass without dropout, [T, V]."""
    microbatch = packed([torch.tensor(tokens)])
    segment = Segment(adapter or "", 1, 0, len(tokens), adapter=adapter)
    microbatch = replace(microbatch, segments=(segment,)).to(adapted.base.device)
    with torch.no_grad(), adapted.banks.bind(microbatch, adapted.route, training=False):
        return adapted.base.head().logits(adapted.base.hidden(microbatch))


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_kinds_that_peft_lacks_decode_as_a_training_pass_computes(kind, tmp_path):
    adapted = adapted_with("llama", tmp_path, (kind,), torch.float64)
    decoder = Decoder(adapted, MIB)
    made = [
        decoder.submit(prompt, Sampling(max_tokens=NEW), name) for name in (kind, None) for prompt in PROMPTS
    ]
    decoder.run_until_idle()
    for one in made:
        logits_TV = uncached(adapted, one.adapter, [*one.prompt, *one.tokens])
        assert logits_TV[-NEW - 1 : -1].argmax(-1).tolist() == one.tokens
        assert one.logprobs == pytest.approx(logprobs_of(logits_TV, one.tokens).tolist(), abs=1e-9)
    assert made[0].logprobs != made[len(PROMPTS)].logprobs


def test_a_step_laid_out_ahead_is_laid_out_as_it_would_be_later(tmp_path):
    decoder = Decoder(adapted_with("llama", tmp_path, ("lora",), torch.float64), MIB)
    for number, prompt in enumerate(PROMPTS):
        decoder.submit(prompt, Sampling(max_tokens=3 + number), ("lora", None)[number % 2])
    laid_ahead = 0
    while not decoder.is_idle:
        decoder.run_pass()
        running, ahead = decoder._running_sequences, decoder._prepared_step
        if not running or ahead is None or ahead.batch != running:
            continue
        microbatch, sequences = decoder._build_batch(running)
        decoder._prepared_step = None
        later, later_sequences = decoder._build_batch(running)
        assert microbatch.tokens_T.equal(later.tokens_T)
        assert microbatch.positions_T.equal(later.positions_T)
        assert (microbatch.segments, sequences) == (later.segments, later_sequences)
        decoder._prepared_step, laid_ahead = ahead, laid_ahead + 1
    assert laid_ahead


@pytest.mark.parametrize("family", WRAPPERS)
def test_text_towers_decode_as_a_training_pass_computes(family, tmp_path):
    folder = wrapper_folder(tmp_path, family)
    adapted = AdaptedBase(load_base(BaseSpec(model=str(folder), dtype="float32"), CPU))
    decoder = Decoder(adapted, MIB)
    made = [decoder.submit(prompt, Sampling(max_tokens=NEW)) for prompt in PROMPTS]
    decoder.run_until_idle()
    for one in made:
        logits_TV = uncached(adapted, None, [*one.prompt, *one.tokens])
        assert one.logprobs == pytest.approx(logprobs_of(logits_TV, one.tokens).tolist(), abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_trained_token_embeddings_are_read_and_predicted_as_with_peft(family, tmp_path):
    """The head of GPT-2 is tied to its embedding."""
    adapted = AdaptedBase(base_of(tiny(family, torch.float32)))
    attach_adapter_folder(adapted, "tokens", write_trained_tokens(tmp_path, family, torch.float32))
    decoder = Decoder(adapted, MIB)
    prompts = [[*prompt[:1], *TOKENS, *prompt[1:]] for prompt in PROMPTS[:3]]
    sampling = Sampling(max_tokens=NEW, prompt_logprobs=True)
    made = [decoder.submit(prompt, sampling, name) for prompt in prompts for name in ("tokens", None)]
    decoder.run_until_idle()
    model = PeftModel.from_pretrained(tiny(family, torch.float32), tmp_path).eval()
    for one in made[0::2]:
        assert one.tokens == greedy(model, list(one.prompt))
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([[*one.prompt, *one.tokens]])).logits[0]
        expected = logprobs_of(logits_TV, [*one.prompt[1:], *one.tokens])
        assert one.prompt_logprobs + one.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_on_a_quantised_base_decoding_equals_a_training_pass(quantize, tmp_path):
    folder = plain_folder(tmp_path / "base", tiny("llama", torch.float32))
    base = load_base(BaseSpec(model=str(folder), quantize=quantize), CPU)
    adapted = AdaptedBase(base)
    attach_adapter_folder(adapted, "lora", write_start(tmp_path / "lora", base.model, "lora", "llama"))
    decoder = Decoder(adapted, MIB)
    made = [decoder.submit(PROMPTS[0], Sampling(max_tokens=NEW), name) for name in ("lora", None)]
    decoder.run_until_idle()
    for one in made:
        logits_TV = uncached(adapted, one.adapter, [*one.prompt, *one.tokens])
        assert one.logprobs == pytest.approx(logprobs_of(logits_TV, one.tokens).tolist(), abs=1e-5)


SAMPLED = Sampling(max_tokens=NEW, temperature=0.9, top_p=0.95, top_k=40, seed=11)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5"])
def test_sampled_tokens_depend_on_their_seed_and_not_on_the_other_sequences(family, tmp_path):
    adapted = adapted_with(family, tmp_path, ("lora", "dora", "prompt"), torch.float32)
    alone = Decoder(adapted, MIB)
    first = alone.submit(PROMPTS[1], SAMPLED, "lora")
    alone.run_until_idle()
    crowded = Decoder(adapted, MIB)
    for name, prompt in zip([None, "dora", "prompt", "lora"], PROMPTS, strict=False):
        crowded.submit(prompt, replace(SAMPLED, seed=5), name)
    crowded.run_pass()
    again = crowded.submit(PROMPTS[1], SAMPLED, "lora")
    other = crowded.submit(PROMPTS[1], replace(SAMPLED, seed=12), "lora")
    crowded.run_until_idle()
    assert again.tokens == first.tokens != other.tokens


def test_a_repetition_penalty_changes_its_own_sequence_as_in_transformers(tmp_path):
    adapted = adapted_with("llama", tmp_path, ("lora",), torch.float32)
    decoder = Decoder(adapted, MIB)
    penalised = Sampling(max_tokens=NEW, repetition_penalty=1.8)
    made = [
        (decoder.submit(prompt, penalised, "lora"), decoder.submit(prompt, Sampling(max_tokens=NEW), "lora"))
        for prompt in PROMPTS
    ]
    decoder.run_until_idle()
    model = PeftModel.from_pretrained(tiny("llama", torch.float32), tmp_path / "lora").eval()
    for one, plain in made:
        assert one.tokens == greedy(model, list(one.prompt), repetition_penalty=1.8)
        assert plain.tokens == greedy(model, list(one.prompt))
    assert any(one.tokens != plain.tokens for one, plain in made)


def test_with_a_high_presence_penalty_no_token_is_generated_twice(tmp_path):
    adapted = AdaptedBase(base_of(tiny("llama", torch.float32)))
    decoder = Decoder(adapted, MIB)
    plain = [decoder.submit(prompt, Sampling(max_tokens=NEW)) for prompt in PROMPTS]
    made = [decoder.submit(prompt, Sampling(max_tokens=NEW, presence_penalty=100.0)) for prompt in PROMPTS]
    decoder.run_until_idle()
    assert any(len(set(one.tokens)) < NEW for one in plain)
    for one, without in zip(made, plain, strict=True):
        assert len(set(one.tokens)) == NEW
        assert one.tokens[0] == without.tokens[0]


def test_a_cancelled_sequence_gives_its_pages_to_the_next_and_the_others_continue(tmp_path):
    adapted = adapted_with("llama", tmp_path, ("lora",), torch.float32)
    free = Decoder(adapted, MIB)
    expected = [free.submit(prompt, SAMPLED, "lora") for prompt in PROMPTS[:4]]
    free.run_until_idle()
    # Two sequences fill the four pages: the first needs one, the second two, the third two.
    decoder = Decoder(adapted, MIB, max_positions=4 * PAGE_ROWS)
    running, other, waiting, last = (
        decoder.submit(prompt, SAMPLED, "lora") for prompt in (*PROMPTS[:3], PROMPTS[0])
    )
    decoder.run_pass()
    decoder.run_pass()
    assert [len(one.tokens) for one in (running, other, waiting, last)] == [2, 2, 0, 0]
    decoder.cancel(running)
    decoder.cancel(last)
    decoder.run_pass()
    assert len(waiting.tokens) == 1
    decoder.run_until_idle()
    assert [one.finish_reason for one in (running, other, waiting, last)] == [None, "length", "length", None]
    assert [other.tokens, waiting.tokens] == [one.tokens for one in expected[1:3]]
    assert running.tokens == expected[0].tokens[:2]
    assert last.tokens == []
    decoder.cancel(other)  # It has ended, so nothing happens.
    assert decoder.is_idle
    whole = decoder.submit([5] * (4 * PAGE_ROWS - NEW), Sampling(max_tokens=NEW))
    decoder.run_until_idle()
    assert len(whole.tokens) == NEW, "every page is free again"


def test_waiting_sequences_start_as_others_end_and_nothing_changes(tmp_path):
    adapted = adapted_with("llama", tmp_path, ("lora", "ia3"), torch.float32)
    names = [None, "lora", "ia3"] * 3
    wide = Decoder(adapted, MIB)
    together = [wide.submit(prompt, SAMPLED, name) for name, prompt in zip(names, PROMPTS, strict=True)]
    wide.run_until_idle()
    narrow = Decoder(adapted, MIB, max_positions=4 * PAGE_ROWS)
    in_turns = [narrow.submit(prompt, SAMPLED, name) for name, prompt in zip(names, PROMPTS, strict=True)]
    narrow.run_pass()
    assert 0 < sum(bool(one.tokens) for one in in_turns) < len(in_turns)
    narrow.run_until_idle()
    assert [one.tokens for one in in_turns] == [one.tokens for one in together]


def test_an_adapter_never_reads_a_prefix_that_another_one_computed(tmp_path):
    adapted = adapted_with("llama", tmp_path, ("lora", "ia3"), torch.float32)
    prompt = PROMPTS[3]
    decoder = Decoder(adapted, MIB)
    for name in (None, "lora", "ia3", "lora", None):
        one = decoder.submit(prompt, Sampling(max_tokens=NEW), name)
        decoder.run_pass()
        fresh = Decoder(adapted, MIB)
        expected = fresh.submit(prompt, Sampling(max_tokens=NEW), name)
        fresh.run_until_idle()
        decoder.run_until_idle()
        assert one.tokens == expected.tokens
        assert one.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_prompt_that_was_computed_before_is_read_from_the_cache(tmp_path):
    adapted = adapted_with("llama", tmp_path, ("lora",), torch.float32)
    decoder = Decoder(adapted, MIB)
    computed = []
    for version in (1, 1, 2):
        adapted.banks.attached["lora"].version = version
        one = decoder.submit(PROMPTS[3], Sampling(max_tokens=1), "lora")
        decoder.run_pass()
        computed.append(one.cached_prompt_positions)
        assert one.versions == [version]
    assert computed == [0, 2 * PAGE_ROWS, 0]


def test_another_adapter_under_the_same_name_computes_its_own_prefixes(tmp_path):
    adapted = adapted_with("llama", tmp_path, ("lora", "dora"), torch.float32)
    decoder = Decoder(adapted, MIB)
    first = decoder.submit(PROMPTS[3], Sampling(max_tokens=NEW), "lora")
    decoder.run_until_idle()
    adapted.banks.detach("lora")
    attach_adapter_folder(adapted, "lora", tmp_path / "dora")
    again = decoder.submit(PROMPTS[3], Sampling(max_tokens=NEW), "lora")
    same = decoder.submit(PROMPTS[3], Sampling(max_tokens=NEW), "dora")
    decoder.run_until_idle()
    assert again.cached_prompt_positions == 0
    assert again.tokens == same.tokens
    assert again.logprobs == pytest.approx(same.logprobs, abs=1e-6)
    assert again.logprobs != pytest.approx(first.logprobs, abs=1e-3)


def test_a_stop_token_ends_its_sequence_only(tmp_path):
    adapted = AdaptedBase(base_of(tiny("llama", torch.float32)))
    decoder = Decoder(adapted, MIB)
    free = decoder.submit(PROMPTS[0], Sampling(max_tokens=NEW))
    decoder.run_until_idle()
    stop = free.tokens[4]
    stopped = decoder.submit(PROMPTS[0], Sampling(max_tokens=NEW, stop_ids=frozenset({stop})))
    beside = decoder.submit(PROMPTS[0], Sampling(max_tokens=NEW))
    decoder.run_until_idle()
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert (stopped.finish_reason, beside.finish_reason) == ("stop", "length")
    assert beside.tokens == free.tokens


def test_what_cannot_be_generated_is_a_sentence():
    decoder = Decoder(AdaptedBase(base_of(tiny("llama", torch.float32))), MIB, max_positions=2 * PAGE_ROWS)
    with pytest.raises(UserError, match="The prompt is empty"):
        decoder.submit([])
    with pytest.raises(UserError, match="has 64 tokens, and the base has 64 positions"):
        decoder.submit([5] * 64)
    with pytest.raises(
        UserError, match="need 44 positions, and the cache has room for 32; lower --max-tokens"
    ):
        decoder.submit([5] * 33, Sampling(max_tokens=NEW))
    assert decoder.is_idle


@pytest.mark.parametrize("family", EVERY)
def test_the_memory_that_is_reserved_for_a_position_is_enough(family):
    base = base_of(tiny(family))
    decoder = Decoder(AdaptedBase(base), MIB)
    own, reserved = decoder._page_bytes / PAGE_ROWS, decoder_row_bytes(base.shape)
    assert own <= reserved
    assert family not in ("llama", "qwen2") or own == reserved
