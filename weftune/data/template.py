"""Chat templates: found, compiled in a sandbox, and rendered with a limit on what they may print."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from weftune.data.row import BadRow
from weftune.errors import DataError, Mistake

CHATML = "chatml"
LONGEST_PRINT = 16_000_000
"""Characters. A template can print without end, and a row that long is no sample anyway."""
TODAY = datetime(2024, 7, 26)
"""Templates that print the date would give other samples every day; Llama's falls back to this one."""
PLACE = "data.chat_template"


def template_source(tokenizer: Any, chosen: str | None, *, tools: bool = False) -> str | None:
    """The Jinja text: `chatml` is built in, else a file, else the tokenizer's own; None if there is none."""
    if chosen == CHATML:
        return _chatml(tokenizer)
    if chosen is not None:
        try:
            return Path(chosen).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
            raise DataError(Mistake(PLACE, f"the template {chosen} cannot be read: {reason}")) from problem
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, Mapping):
        own = (own.get("tool_use") if tools else None) or own.get("default")
    return own or None


def _chatml(tokenizer: Any) -> str:
    """Without `<|im_end|>` in the vocabulary a turn ends with EOS: generation stops at a single token."""
    source = resources.files("weftune.data").joinpath("templates", "chatml.jinja").read_text(encoding="utf-8")
    if "<|im_end|>" in tokenizer.get_vocab() or not tokenizer.eos_token:
        return source
    return source.replace("<|im_end|>", tokenizer.eos_token)


class Template:
    """One compiled template with the tokenizer's special tokens at hand."""

    def __init__(self, source: str, special: Mapping[str, Any]) -> None:
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = TODAY.strftime
        self._special = {name: value for name, value in special.items() if isinstance(value, str)}
        try:
            self._template = environment.from_string(source)
            used = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as problem:
            sentence = f"the chat template does not compile: {problem.message} (its line {problem.lineno})"
            raise DataError(Mistake(PLACE, sentence)) from problem
        self.prints_tools = "tools" in used

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, prompt: bool) -> str:
        """The text that these messages make; with `prompt`, up to where the assistant begins to speak."""
        pieces: list[str] = []
        printed = 0
        values = {**self._special, "messages": messages, "tools": tools, "documents": None}
        try:
            for piece in self._template.generate(values, add_generation_prompt=prompt):
                printed += len(piece)
                if printed > LONGEST_PRINT:
                    raise _PrintsTooMuch
                pieces.append(piece)
        except _PrintsTooMuch:
            sentence = f"the chat template printed more than {LONGEST_PRINT:,} characters for one row"
            raise DataError(Mistake(PLACE, sentence)) from None
        except RecursionError:
            raise BadRow("the chat template nests too deeply on this row") from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as problem:
            raise BadRow(f"the chat template refuses this row: {problem}") from problem
        return "".join(pieces)


class _PrintsTooMuch(Exception):
    pass


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Also stops a product or sum that would be too long before it is made."""

    intercepted_binops = frozenset(["*", "+"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and (
            isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple)
        ):
            sizes = [side if isinstance(side, int) else len(side) for side in (left, right)]
            if sizes[0] * sizes[1] > LONGEST_PRINT:
                raise _PrintsTooMuch
        if operator == "+" and isinstance(left, str) and len(left) > LONGEST_PRINT:
            raise _PrintsTooMuch
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text in some templates; we print it and need no mark."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=str,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
