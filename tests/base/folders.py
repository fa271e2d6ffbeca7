"""Model folders as a user would have them, for tests that load."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.families import VOCABULARY, tiny, tiny_wrapper

CHATML = (
    "{% for message in messages %}<s> {{ message['role'] }} {{ message['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)


def word_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a word: w3 … w96, and the few that a template needs."""
    words = ["<pad>", "<s>", "</s>", "system", "user", "assistant"]
    words += [f"w{number}" for number in range(len(words), VOCABULARY)]
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter, digit or space, which are bytes to it."""
    letters = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz0123456789\u0120\u010a"]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def model_folder(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    tiny(family, dtype).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def wrapper_folder(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    tiny_wrapper(family, dtype).save_pretrained(folder)
    # Transformers gives every tokenizer of Qwen3.5 the splitting rule of its own.
    (letter_tokenizer() if family == "qwen3_5" else word_tokenizer()).save_pretrained(folder)
    return folder
