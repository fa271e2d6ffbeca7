"""The check at load: what it accepts, what it refuses, and that it can fail."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers import (
    BloomConfig,
    Gemma2Config,
    GraniteConfig,
    Lfm2Config,
    LlavaConfig,
    MambaConfig,
    OlmoeConfig,
    OlmoHybridConfig,
    PretrainedConfig,
    RecurrentGemmaConfig,
    T5Config,
)

from tests.base.packs import base_of, packed, random_samples
from tests.families import EVERY, GROUPED, MIXTURES, WINDOW, config, randomised, tiny
from weftune.base import attention
from weftune.base.check import Routing, refuse_config
from weftune.errors import BaseModelError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", EVERY)
def test_every_family_passes_in_the_precision_it_is_used_in(family: str, dtype: torch.dtype) -> None:
    assert base_of(tiny(family, dtype)).dtype == dtype


def test_an_unknown_family_is_accepted_when_packed_equals_separate() -> None:
    """Gemma 2 caps its attention's scores and runs eagerly in transformers; Granite scales its logits."""
    gemma = Gemma2Config(**GROUPED, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=0.5)
    granite = GraniteConfig(**GROUPED, logits_scaling=3.0, attention_multiplier=0.2, residual_multiplier=0.7)
    for unknown in (gemma, granite):
        model = randomised(unknown, torch.float32)
        model.set_attn_implementation("eager")
        samples = random_samples()
        expected = torch.cat([model(tokens_L[None]).logits[0] for tokens_L in samples])
        base = base_of(model)
        logits_TV = base.head().logits(base.hidden(packed(samples)))
        torch.testing.assert_close(logits_TV, expected, rtol=0.0, atol=1e-5)


def test_an_unknown_family_is_refused_when_packing_would_change_it() -> None:
    """Bloom has an attention of its own."""
    unknown = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    unknown.max_position_embeddings = 64
    with pytest.raises(BaseModelError, match=r"stranger .*(packed|packs|cannot be a base)"):
        base_of(randomised(unknown, torch.float32), "stranger")


def test_an_unknown_mixture_of_experts_is_named_and_refused() -> None:
    mixture = OlmoeConfig(**GROUPED, num_experts=4, num_experts_per_tok=2)
    known = "Weftune trains dense .* models, and of mixtures of experts mixtral and qwen3_moe"
    with pytest.raises(BaseModelError, match=rf"^tiny is a mixture of experts \(olmoe\); {known}"):
        base_of(randomised(mixture, torch.float32))


@pytest.mark.parametrize("family", MIXTURES)
def test_a_token_whose_experts_are_next_to_equal_does_not_fail_the_check(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed rows see another rounding; without the decisions of the first passes they go elsewhere."""
    model = tiny(family, torch.float32)
    torch.nn.Module.register_forward_pre_hook(model.model.layers[0].mlp.gate, _shaken)
    assert base_of(copy.deepcopy(model)).dtype == torch.float32
    monkeypatch.setattr(Routing, "replay_decisions", lambda _: nullcontext())
    with pytest.raises(BaseModelError, match="computes something else when samples are packed together"):
        base_of(model)


def _shaken(router: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Noise that differs with the number of rows."""
    (x_TD,) = given
    noise = torch.randn(x_TD.shape, generator=torch.Generator().manual_seed(len(x_TD)))
    return (x_TD + noise,)


@pytest.mark.parametrize(
    ("unknown", "layers"),
    [
        (OlmoHybridConfig(num_hidden_layers=4), "linear-attention"),
        (MambaConfig(num_hidden_layers=2), r"[\w-]+"),
        (RecurrentGemmaConfig(num_hidden_layers=2), "recurrent"),
        (Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]), "conv"),
    ],
    ids=["olmo_hybrid", "mamba", "recurrent_gemma", "lfm2"],
)
def test_layers_with_a_state_are_refused_with_the_reason(unknown: PretrainedConfig, layers: str) -> None:
    with pytest.raises(
        BaseModelError,
        match=rf"^some/model \({unknown.model_type}\) has {layers} layers, whose state would flow from one "
        "sample of a pack into the next one, so Weftune cannot train on it.$",
    ):
        refuse_config(unknown, "some/model")


def test_a_mixture_of_experts_whose_config_is_silent_is_known_by_its_modules() -> None:
    model = tiny("llama")
    expert = type("SecretSparseMoeBlock", (torch.nn.Identity,), {})
    model.model.layers[0].extra = expert()
    with pytest.raises(BaseModelError, match="tiny is a mixture of experts"):
        base_of(model)


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (LlavaConfig(text_config=config("llama")), r"a vision model \(llava\)"),
        (T5Config(), r"an encoder-decoder model \(t5\)"),
    ],
    ids=["vision", "encoder-decoder"],
)
def test_vision_and_encoder_decoder_models_are_named_and_refused(other: PretrainedConfig, kind: str) -> None:
    with pytest.raises(BaseModelError, match=f"some/model is {kind}; Weftune trains dense text-only"):
        refuse_config(other, "some/model")


def test_quantised_weights_are_refused() -> None:
    quantised = config("llama")
    quantised.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(BaseModelError, match="quantised weights"):
        refuse_config(quantised, "some/model")


@pytest.mark.parametrize("fault", ["window", "scale", "boundaries"])
def test_the_check_notices_a_wrong_attention(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.attend_by_sample

    def wrong(q, k, v, pack, rule):  # type: ignore[no-untyped-def]
        if fault == "window":
            rule = attention.Rule(rule.scale, rule.window + 1, rule.softcap)
        if fault == "scale":
            rule = attention.Rule(rule.scale * 1.01, rule.window, rule.softcap)
        if fault == "boundaries":
            pack = attention.pack((sum(pack.lengths),), q.device)
        return right(q, k, v, pack, rule)

    monkeypatch.setattr(attention, "attend_by_sample", wrong)
    with pytest.raises(BaseModelError, match="computes something else when samples are packed together"):
        base_of(tiny("mistral", torch.float32))


def test_a_base_with_broken_weights_is_refused() -> None:
    model = tiny("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(BaseModelError, match="logits that are not finite"):
        base_of(model)
