"""Text answers to prompts by a base model with finished adapters: chat templates, stop strings, and text that
is streamed while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from weftune.adapters.folder import check_adapter_folder
from weftune.base.load import best_device, load_base, load_tokenizer
from weftune.base.spec import BaseSpec
from weftune.data.formats import Message
from weftune.data.tokenise import prompt_tokens
from weftune.errors import AdapterError
from weftune.generate.adapters import attach_adapter_folder
from weftune.generate.decoder import Decoder, FinishReason, Generation
from weftune.generate.sampling import GREEDY, Sampling
from weftune.run.passes.adapted import AdaptedBase

BASE = "base"
"""Name that stands for the base model without an adapter in lists of adapters."""


@dataclass(slots=True, eq=False)
class StreamedAnswer:
    """The answer of one adapter, or of the base, to one prompt."""

    adapter: str
    generation: Generation
    tokenizer: PreTrainedTokenizerBase
    stop: tuple[str, ...] = ()
    """Strings that end the answer. These strings are not part of the answer's text."""
    text: str = ""
    """Text generated so far. A character is left out until all of its bytes have been generated."""
    is_stopped: bool = False
    """Whether a stop string has ended the answer."""
    _final_token_count: int = field(default=0)
    """Number of generated tokens whose text is final, since later tokens cannot change it."""
    _final_text: str = ""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the answer has ended. None while it continues."""
        return "stop" if self.is_stopped else self.generation.finish_reason

    def update(self) -> str:
        """Decode the tokens generated since the last call, and return the new text."""
        before, tokens = len(self.text), self.generation.tokens
        # Decoded from the last few tokens on, since the text of a token may depend on the one before it.
        context = max(0, self._final_token_count - 1)
        piece = self._decode(tokens[context:])[len(self._decode(tokens[context : self._final_token_count])) :]
        if not piece.endswith("�") or self.generation.finish_reason is not None:
            self._final_token_count, self._final_text = len(tokens), self._final_text + piece
        text = self._final_text
        for stop in self.stop:
            if (found := text.find(stop)) >= 0:
                text, self.is_stopped = text[:found], True
        if self.finish_reason is None:
            # A stop string that has begun may be completed by the next token.
            text = text[
                : len(text) - max((_stop_string_overlap(text, stop) for stop in self.stop), default=0)
            ]
        self.text = text
        return self.text[before:]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def _stop_string_overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of the stop string."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


class Answers:
    """A base model and its adapters, loaded once, that answer any number of prompts in shared batches."""

    def __init__(
        self, base: BaseSpec, adapters: Mapping[str, Path], device: torch.device | None = None
    ) -> None:
        assert BASE not in adapters, "that name is the base's own"
        for folder in adapters.values():
            check_adapter_folder(folder)
        self.spec = base
        self.adapted = AdaptedBase(load_base(base, device or best_device()))
        own = load_tokenizer(base)
        self.tokenizers = {BASE: own}
        for name, folder in adapters.items():
            attach_adapter_folder(self.adapted, name, folder)
            self.tokenizers[name] = adapter_tokenizer(folder, own)
        self.stop_ids = stop_ids(self.adapted.base.model, own)

    def adapter_title(self, adapter: str) -> str:
        """Return the title under which the answers of an adapter, or of the base model, are shown."""
        return f"{BASE} ({self.spec.model})" if adapter == BASE else adapter

    def is_reward_model(self, adapter: str) -> bool:
        return bool(self.adapted.banks.attached[adapter].adapter.spec.scalar_head)

    def encode_prompt(
        self, adapter: str, messages: str | Sequence[Message], is_plain_text: bool = False
    ) -> list[int]:
        """Return the tokens of a prompt for an adapter. A string is sent as the user's message of a chat, or
        unchanged if `is_plain_text`; a sequence of messages is formatted as a chat."""
        return prompt_tokens(self.tokenizers[adapter], messages, is_plain_text=is_plain_text)

    def complete_prompts(
        self,
        prompts: Sequence[tuple[str, Sequence[int]]],
        sampling: Sampling = GREEDY,
        stop: Sequence[str] = (),
        on_text: Callable[[StreamedAnswer, str], None] = lambda answer, text: None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> list[StreamedAnswer]:
        """Answer all prompts, given as (adapter, tokens), in one batch. `on_text` is called with new text as
        it is generated. If `stop_requested` returns True, all answers end at once."""
        sampling = replace(sampling, stop_ids=sampling.stop_ids | self.stop_ids)
        longest = sum(len(tokens) + sampling.max_tokens + PAGE_SLACK for _, tokens in prompts)
        decoder = Decoder(self.adapted, cache_budget(self.adapted.base.device), max_positions=longest)
        answers = {}
        for adapter, tokens in prompts:
            generation = decoder.submit(tokens, sampling, None if adapter == BASE else adapter)
            answers[generation] = StreamedAnswer(adapter, generation, self.tokenizers[adapter], tuple(stop))
        while not decoder.is_idle and not stop_requested():
            for generation in decoder.run_pass():
                answer = answers[generation]
                on_text(answer, answer.update())
                if answer.is_stopped:
                    decoder.cancel(generation)
        return list(answers.values())


PAGE_SLACK = 64
"""Number of positions that are added to each sequence when its cache is sized: for virtual tokens, and for
the unused end of its last page."""


def cache_budget(device: torch.device) -> int:
    """Return the maximum size in bytes of a decoder's KV cache on a device on which nothing else runs."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.9)
    import psutil

    return int(psutil.virtual_memory().available * 0.5)


def generate_answers(
    base: BaseSpec,
    adapters: Mapping[str, Path],
    prompt: str,
    *,
    system: str | None = None,
    max_tokens: int = 128,
    device: torch.device | None = None,
    with_base: bool = True,
) -> dict[str, str]:
    """Return the greedy answers of each adapter to one prompt and, if `with_base`, the answer of the base
    model without an adapter."""
    answers = Answers(base, adapters, device)
    names = [BASE, *adapters] if with_base else list(adapters)
    messages = chat_messages(prompt, system)
    prompts = [(name, answers.encode_prompt(name, messages)) for name in names]
    said = answers.complete_prompts(prompts, Sampling(max_tokens=max_tokens))
    return {answer.adapter: answer.text.strip() for answer in said}


def chat_messages(prompt: str | Sequence[Message], system: str | None) -> str | Sequence[Message]:
    """Return a prompt unchanged if `system` is None, else a chat that begins with this system message."""
    if system is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": "system", "content": system}, *messages]


def stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the tokens that end an answer: the end tokens of the base's generation config and of
    the tokenizer."""
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    known = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
    return frozenset(int(end) for end in known if end is not None)


def adapter_tokenizer(folder: Path, base_tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer saved with the adapter, which has the chat template used in training, or the
    base's tokenizer if none was saved."""
    if not (folder / "tokenizer_config.json").is_file():
        return base_tokenizer
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise AdapterError(f"The tokenizer in {folder} cannot be read: {error}") from error
