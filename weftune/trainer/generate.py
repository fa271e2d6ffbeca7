"""Answers of a base and its adapters to one prompt, decoded greedily by transformers and PEFT themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from weftune.adapters.folder import CONFIG, check_adapter_folder, read_config, wrap_config_errors
from weftune.base.load import best_device, load_plain, load_tokenizer
from weftune.base.quant.linear import dequantise_linears
from weftune.base.spec import BaseSpec
from weftune.core.limited import slow_pattern_error, suffix_expression
from weftune.errors import AdapterError

BASE = "base"
"""Key of the answer that the base gives without an adapter."""
Tokenise = Callable[[Any, str, str | None], Sequence[int]]


def generate_answers(
    base: BaseSpec,
    adapters: Mapping[str, Path],
    prompt: str,
    *,
    tokenise: Tokenise,
    system: str | None = None,
    max_tokens: int = 128,
    device: torch.device | None = None,
    with_base: bool = True,
) -> dict[str, str]:
    """Return the answers of the base (if `with_base`), which is loaded once, and of the base with each
    adapter. `tokenise` maps a tokenizer, the prompt and the system message to tokens."""
    assert BASE not in adapters, "that key is the base's own"
    for folder in adapters.values():
        check_adapter_folder(folder)
    model: Any = load_for_adapters(base, list(adapters.values()), device or best_device())
    base_tokenizer = load_tokenizer(base)
    said = {}
    if with_base:
        said[BASE] = generate_answer(
            model, base_tokenizer, tokenise(base_tokenizer, prompt, system), max_tokens
        )
    for index, (name, folder) in enumerate(adapters.items()):
        # PEFT makes module names from adapter names, which cannot hold every character of a job's name.
        model = with_adapter(model, f"adapter{index}", folder)
        tokenizer = adapter_tokenizer(folder, base_tokenizer)
        said[name] = generate_answer(model, tokenizer, tokenise(tokenizer, prompt, system), max_tokens)
    return said


def load_for_adapters(base: BaseSpec, adapters: Sequence[Path], device: torch.device) -> PreTrainedModel:
    """Load the base with the weights that the adapters were trained on, so that PEFT can run them on it. The
    linears of a quantised base stay quantised, unless an adapter is DoRA: PEFT's DoRA reads their weights, so
    they are replaced by plain linears with the dequantised matrices."""
    model = load_plain(base, device)
    if any(read_config(folder).get("use_dora") for folder in adapters):
        dequantise_linears(model)
    return model


def with_adapter(model: Any, name: str, folder: Path) -> Any:
    """Return `model` with the adapter of `folder` active. PEFT wraps the model once and adds later adapters.
    (The type is Any since a PeftModel passes every attribute on to the model inside.)"""
    from peft import PeftModel

    refuse_config(model, folder)
    try:
        if not isinstance(model, PeftModel):
            model = PeftModel.from_pretrained(model, folder, adapter_name=name)
        else:
            model.load_adapter(folder, adapter_name=name)
        model.set_adapter(name)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise AdapterError(f"The adapter in {folder} does not fit this base: {first_line}") from error
    return model.eval()


def refuse_config(model: Any, folder: Path) -> None:
    """Refuse adapter kinds that PEFT lacks, and slow patterns in an adapter's config, which PEFT matches
    against the name of every module."""
    config = read_config(folder)
    with wrap_config_errors(folder):
        targets = [config.get(key) for key in ("target_modules", "exclude_modules")]
        expressions = [target for target in targets if isinstance(target, str)]
        for key in ("rank_pattern", "alpha_pattern"):
            expressions += [suffix_expression(pattern) for pattern in config.get(key) or {}]
    if "weftune_kind" in config:
        raise AdapterError(
            f"{folder} holds a {config['weftune_kind']} adapter, a kind that PEFT does not have, and PEFT "
            "gives the answers; if it can be merged, weftune export --merged makes a model to ask"
        )
    if slow := slow_pattern_error(expressions, [name for name, _ in model.named_modules()]):
        raise AdapterError(f"{folder / CONFIG}: one of its patterns {slow}.")


def adapter_tokenizer(folder: Path, base_tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer saved with the adapter; its chat template is the one used in training."""
    if not (folder / "tokenizer_config.json").is_file():
        return base_tokenizer
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise AdapterError(f"The tokenizer in {folder} cannot be read: {error}") from error


@torch.no_grad()
def generate_answer(
    model: Any, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], max_tokens: int
) -> str:
    tokens_1T = torch.tensor([tokens], device=model.device)
    own = model.generation_config.eos_token_id
    known = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
    ends = sorted(end for end in known if end is not None)
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    written_1T = model.generate(
        input_ids=tokens_1T, attention_mask=torch.ones_like(tokens_1T), generation_config=settings
    )
    return str(tokenizer.decode(written_1T[0, tokens_1T.shape[1] :], skip_special_tokens=True)).strip()
