"""Lookup of chat templates, and rendering in Jinja's sandbox inside a limited process.

The sandbox prevents access to Python objects; the limited process (`weftune.core.limited`) bounds time and
memory. The functions that run in that process are at the end of this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from weftune.core.limited import SECONDS, LimitExceeded, limit_seconds, run_limited
from weftune.data.chats import (
    PrintCheck,
    Rendered,
    equivalent_chats,
    render_answer,
    render_everything,
    render_turns,
)
from weftune.data.formats import Chat
from weftune.data.row import BadRow, CommonBadRow, bad_row_from_json
from weftune.errors import DataError, Mistake

CHATML = "chatml"
MAX_PRINTED_CHARACTERS = 16_000_000
"""Maximum number of characters that a template may print for a row."""
FIXED_DATE = datetime(2024, 7, 26)
"""Date that templates print in place of the current one, so that samples do not depend on the day. It is the
default date of Llama's template."""
KEY = "data.chat_template"


def template_source(tokenizer: Any, template_choice: str | None, *, tools: bool = False) -> str | None:
    """Return the Jinja source of `chatml`, of a file or of the tokenizer; None if there is no template."""
    if template_choice == CHATML:
        return _chatml(tokenizer)
    if template_choice is not None:
        try:
            return Path(template_choice).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
            raise DataError(
                Mistake(KEY, f"the template {template_choice} cannot be read: {reason}")
            ) from problem
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, Mapping):
        own = (own.get("tool_use") if tools else None) or own.get("default")
    return own or None


def _chatml(tokenizer: Any) -> str:
    """Return the ChatML template. If `<|im_end|>` is not in the vocabulary, turns end with the EOS token,
    since generation stops at a single token."""
    source = resources.files("weftune.data").joinpath("templates", "chatml.jinja").read_text(encoding="utf-8")
    if "<|im_end|>" in tokenizer.get_vocab() or not tokenizer.eos_token:
        return source
    return source.replace("<|im_end|>", tokenizer.eos_token)


class Template:
    """A chat template with the tokenizer's special tokens. It is rendered in a process with limited time and
    memory."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        self.source = source
        self._special = json.dumps(
            {name: text for name, text in special_tokens.items() if isinstance(text, str)}
        )
        self.prints_tools: bool = _fetch_template_properties(source, self._special)["prints_tools"]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        *,
        prompt: bool,
        uses_current_date: bool = False,
    ) -> str:
        """Return the messages as text, followed by the generation prompt if `prompt`. The template sees the
        date `FIXED_DATE` or, with `uses_current_date`, the current date."""
        reply = _run(render_one, self.source, self._special, messages, tools, prompt, uses_current_date)
        if "bad" in reply:
            raise bad_row_from_json(reply)
        return str(reply["text"])

    def render_chats(
        self, chats: Sequence[Chat], end_strings: Collection[str] | None
    ) -> list[tuple[Rendered, ...] | BadRow]:
        """Render each chat. Return for each one the texts of its samples, or a BadRow with the reason why the
        chat is unusable. Without `end_strings`, all text is supervised."""
        rows = _run(render_rows, self.source, self._special, list(chats), end_strings) if chats else []
        return [
            bad_row_from_json(row) if isinstance(row, dict) else tuple(map(Rendered.from_json, row))
            for row in rows
        ]


_REFUSED_TEMPLATES: dict[str, str] = {}
"""Maps each template that exceeded a limit of time or memory to the reason, so that the template is not tried
again."""


@lru_cache(maxsize=8)
def _fetch_template_properties(source: str, special_tokens: str) -> Any:
    return _run(template_properties, source, special_tokens)


def _run(function: Callable[..., Any], source: str, *arguments: Any) -> Any:
    """Call a function of this module in the process with limited time and memory, and return the function's
    result."""
    try:
        if source not in _REFUSED_TEMPLATES:
            return run_limited(function, source, *arguments)
    except LimitExceeded as stopped:
        _REFUSED_TEMPLATES[source] = str(stopped)
    sentence = (
        f"the chat template {_REFUSED_TEMPLATES[source]} for one row and was stopped; use another template"
    )
    raise DataError(Mistake(KEY, sentence))


class SandboxedTemplate:
    """A compiled chat template with the tokenizer's special tokens, for use inside the process with limited
    time and memory."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = FIXED_DATE.strftime
        self._special = {name: value for name, value in special_tokens.items() if isinstance(value, str)}
        del environment.globals["lipsum"]  # random words without end, useless in samples
        try:
            self._template = environment.from_string(source)
            used = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except MemoryError:
            raise
        except jinja2.TemplateSyntaxError as problem:
            raise _compile_error(f"{problem.message} (its line {problem.lineno})") from problem
        except RecursionError:
            raise _compile_error("it is nested too deeply") from None
        except Exception as problem:  # Jinja computes constants, and Python compiles what Jinja writes
            raise _compile_error(str(problem).partition(" (<")[0]) from problem
        self.prints_tools = "tools" in used

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        *,
        prompt: bool,
        uses_current_date: bool = False,
    ) -> str:
        """Return the messages as text, followed by the generation prompt if `prompt`. The template sees the
        date `FIXED_DATE` or, with `uses_current_date`, the current date."""
        limit_seconds(SECONDS)
        pieces: list[str] = []
        printed = 0
        values = {**self._special, "messages": messages, "tools": tools, "documents": None}
        if uses_current_date:
            values["strftime_now"] = datetime.now().strftime
        try:
            for piece in self._template.generate(values, add_generation_prompt=prompt):
                printed += len(piece)
                if printed > MAX_PRINTED_CHARACTERS:
                    raise _PrintsTooMuch
                pieces.append(piece)
        except _PrintsTooMuch:
            sentence = (
                f"the chat template printed more than {MAX_PRINTED_CHARACTERS:,} characters for one row"
            )
            raise DataError(Mistake(KEY, sentence)) from None
        except RecursionError:
            raise BadRow("the chat template nests too deeply on this row") from None
        except MemoryError:
            raise
        except jinja2.TemplateError as problem:
            raise BadRow(f"the chat template refuses this row: {problem}") from problem
        except Exception as problem:  # a template can call what raises anything
            sentence = f"the chat template refuses this row: {type(problem).__name__}: {problem}"
            raise BadRow(sentence) from problem
        return "".join(pieces)


def _compile_error(reason: str) -> DataError:
    return DataError(Mistake(KEY, f"the chat template does not compile: {reason}"))


class _PrintsTooMuch(Exception):
    pass


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A Jinja sandbox that also refuses products and sums whose result would be too long."""

    intercepted_binops = frozenset(["*", "+"])

    def call_binop(self, context: Any, operator: str, first: Any, second: Any) -> Any:
        if operator == "*" and (
            isinstance(first, str | list | tuple) or isinstance(second, str | list | tuple)
        ):
            sizes = [side if isinstance(side, int) else len(side) for side in (first, second)]
            if sizes[0] * sizes[1] > MAX_PRINTED_CHARACTERS:
                raise _PrintsTooMuch
        if operator == "+" and isinstance(first, str) and len(first) > MAX_PRINTED_CHARACTERS:
            raise _PrintsTooMuch
        return super().call_binop(context, operator, first, second)


class _Generation(jinja2.ext.Extension):
    """A Jinja extension that ignores the tag `{% generation %}`, which marks the assistant's text in some
    templates."""

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
    """Return a value as JSON. Jinja's own filter would escape HTML, unlike the templates with which models
    were trained."""
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


@lru_cache(maxsize=8)
def compile_template(source: str, special_tokens: str) -> SandboxedTemplate:
    """Return the compiled template. `special_tokens` holds the tokenizer's special tokens as JSON."""
    return SandboxedTemplate(source, json.loads(special_tokens))


def template_properties(source: str, special_tokens: str) -> dict[str, bool]:
    """Return a dict with the properties of a template that are needed before any row is rendered: whether it
    prints tools."""
    return {"prints_tools": compile_template(source, special_tokens).prints_tools}


def render_one(
    source: str,
    special_tokens: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    prompt: bool,
    uses_current_date: bool,
) -> dict[str, Any]:
    """Return a dict with the rendered text or, on failure, with the reason under the key `bad`."""
    try:
        return {
            "text": compile_template(source, special_tokens).render(
                messages, tools, prompt=prompt, uses_current_date=uses_current_date
            )
        }
    except BadRow as problem:
        return problem.to_json()


def render_rows(
    source: str, special_tokens: str, chats: Sequence[Chat], end_strings: Collection[str] | None
) -> list[list[dict[str, Any]] | dict[str, Any]]:
    """Return, for each chat, its rendered samples as dicts or, if the chat is refused, a dict with the reason
    under the key `bad`."""
    template, check = compile_template(source, special_tokens), print_check(source, special_tokens)
    replies: list[list[dict[str, Any]] | dict[str, Any]] = []
    for chat in chats:
        try:
            replies.append([asdict(one) for one in _render_row(chat, template, end_strings, check)])
        except BadRow as problem:
            replies.append(problem.to_json())
    return replies


@lru_cache(maxsize=8)
def print_check(source: str, special_tokens: str) -> PrintCheck:
    return PrintCheck(compile_template(source, special_tokens))


def _render_row(
    chat: Chat, template: SandboxedTemplate, end_strings: Collection[str] | None, check: PrintCheck
) -> tuple[Rendered, ...]:
    """Return the chat as rendered in the first of its equivalent forms that the template prints
    completely."""
    problems: list[BadRow] = []
    for form in equivalent_chats(chat):
        try:
            if form.answer is not None:
                row = render_answer(form, template)
            elif end_strings is None:
                row = render_everything(form, template)
            else:
                row = render_turns(form, template, end_strings)
            check.refuse_dropped(form, row[-1].text)
            return row
        except BadRow as problem:
            problems.append(problem)
    # A dropped part is more informative than the refusal of another form of the row.
    raise next((problem for problem in problems if isinstance(problem, CommonBadRow)), problems[0])
