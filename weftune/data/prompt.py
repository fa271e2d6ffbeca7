"""A prompt as tokens, exactly as the rows of its kind begin in training."""

from __future__ import annotations

from typing import Any

from weftune.data.encode import Encoder, hide_control
from weftune.data.row import BadRow
from weftune.data.template import Template, template_source
from weftune.errors import DataError


def prompt_tokens(tokenizer: Any, prompt: str, system: str | None = None) -> list[int]:
    """Return the prompt's tokens, rendered by the tokenizer's chat template up to the answer; without a
    template, as plain text.

    With a template these are the tokens of `apply_chat_template`, but control tokens in the prompt stay text.
    """
    encoder = Encoder(tokenizer)
    source = template_source(tokenizer, None)
    if source is None:
        if system is not None:
            raise DataError("This base has no chat template, so it takes no system message.")
        (tokens,) = encoder.texts([prompt])
        return _filled([*encoder.lead, *tokens.tolist()])
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    hidden, stand_ins = hide_control(messages, encoder.control)
    try:
        template = Template(source, tokenizer.special_tokens_map)
        text = template.render(hidden, None, prompt=True, now=True)
    except BadRow as problem:
        raise DataError(f"This prompt cannot be put to the model: {problem}.") from problem
    return _filled(encoder.pieces(text, stand_ins).tokens.tolist())


def _filled(tokens: list[int]) -> list[int]:
    if not tokens:
        raise DataError("The prompt is empty: there is nothing that the model could answer.")
    return tokens
