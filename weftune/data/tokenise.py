"""Conversion of normalised rows to samples: tokens and the mask of supervised ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weftune.data.encode import Encoded, Encoder, hide_control, holds_control
from weftune.data.formats import Chat, Content, Pair, Text, Tokens
from weftune.data.row import BadRow, CommonBadRow
from weftune.data.spec import TrainOn
from weftune.data.tally import Tally
from weftune.data.template import Template
from weftune.data.turns import Rendered, Rendering
from weftune.errors import DataError

NO_TEMPLATE = (
    "the base's tokenizer has no chat template, and these rows are chats; "
    "write `data.chat_template: chatml`, or name a Jinja file"
)

SKIP = "leave such rows out with `data.skip_bad_rows: true`"
RAISE_OR_SKIP = f"raise `data.max_length` to {{needed_tokens}} or more, or {SKIP}"
SHORTEN_OR_SKIP = f"`data.max_length` cannot be raised beyond that; shorten such rows, or {SKIP}"


@dataclass(frozen=True, slots=True)
class Sample:
    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]


Outcome = tuple[Sample, ...] | BadRow
"""Samples of one row, or the reason why it has none."""


@dataclass(frozen=True, slots=True)
class _SampleDraft:
    """A chat sample as text, before its tokens are known."""

    rendered: Rendered
    stand_ins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Hidden:
    """A chat whose control tokens are hidden behind stand-ins."""

    chat: Chat
    stand_ins: Mapping[str, str]


class Tokeniser:
    def __init__(
        self,
        encoder: Encoder,
        template: Template | None,
        tool_template: Template | None,
        train_on: TrainOn,
        longest: int,
        tally: Tally,
        *,
        context: int | None,
    ) -> None:
        self._encoder = encoder
        self._template = template
        self._tool_template = tool_template
        self._train_on = train_on
        self._longest = longest
        self._tally = tally
        self._context = context

    def outcomes(self, contents: Sequence[Content]) -> Iterator[Outcome]:
        """Yield one outcome for each row, in order; all rows have one form, or are chats and pairs mixed."""
        whole = self._chats(contents)
        plain = self._plain([content for content in contents if isinstance(content, Pair | Text)])
        for content, chat in zip(contents, whole, strict=True):
            if isinstance(content, Chat):
                yield self._finish(chat)
            elif isinstance(content, Tokens):
                yield self._finish(self._given(content))
            else:
                yield self._finish((next(plain),))

    def _finish(self, made: Outcome) -> Outcome:
        if isinstance(made, BadRow):
            return made
        kept = []
        for sample in made:
            cut = Sample(sample.tokens[: self._longest], sample.mask[: self._longest])
            if cut.mask[1:].any():
                kept.append(cut)
        shortened = any(len(sample.tokens) > self._longest for sample in made)
        if not kept:
            return self._unsupervised(made)
        self._tally.truncated += shortened
        return tuple(kept)

    def _unsupervised(self, samples: Sequence[Sample]) -> BadRow:
        """Return why a row has nothing to train on: it is cut before its first supervised token, or has
        none."""
        reached = [int(sample.mask[1:].argmax()) + 2 for sample in samples if sample.mask[1:].any()]
        if not reached:
            return BadRow("the row has no supervised token")
        sentence = "the row has no supervised token within its first {} tokens"
        if self._context is not None and min(reached) > self._context:
            whole = sentence.format(self._context) + ", which is all that the base reads"
            return CommonBadRow(whole, kind="longer than the context", remedy=SHORTEN_OR_SKIP)
        return CommonBadRow(
            sentence.format(self._longest),
            kind="longer than max_length",
            remedy=RAISE_OR_SKIP,
            needed_tokens=min(reached),
        )

    def _given(self, content: Tokens) -> Outcome:
        tokens = content.tokens
        outside = np.flatnonzero((tokens < 0) | (tokens >= self._encoder.size))
        if len(outside):
            at = int(outside[0])
            return BadRow(
                f"`input_ids[{at}]` is {tokens[at]}, but the vocabulary has {self._encoder.size} tokens"
            )
        return (Sample(tokens.astype(np.int32), content.mask),)

    def _plain(self, contents: Sequence[Pair | Text]) -> Iterator[Sample]:
        """Yield the samples of texts and pairs of texts. A pair's prompt is tokenised by itself, exactly as
        at inference, and its completion as a continuation, so that the border between them never depends on
        the text around it."""
        encoder = self._encoder
        if contents and encoder.eos is None:
            raise DataError(
                "the base's tokenizer has no end-of-text token, which text and completion rows end with"
            )
        heads = encoder.texts(
            [content.prompt if isinstance(content, Pair) else content.text for content in contents]
        )
        tails = iter(encoder.continuations([item.completion for item in contents if isinstance(item, Pair)]))
        lead = np.array(encoder.lead, dtype=np.int32)
        end = np.array([encoder.eos], dtype=np.int32)
        for content, head in zip(contents, heads, strict=True):
            unsupervised = len(lead)
            parts = [lead, head, end]
            if isinstance(content, Pair):
                parts = [lead, head, next(tails), end]
                unsupervised += len(head) if self._train_on != "all" else 0
                self._tally.control += holds_control([content.prompt, content.completion], encoder.control)
            else:
                self._tally.control += holds_control(content.text, encoder.control)
            tokens = np.concatenate(parts)
            yield Sample(tokens, np.arange(len(tokens)) >= unsupervised)

    def _chats(self, contents: Sequence[Content]) -> list[Outcome]:
        """Return one outcome for each row that is a chat, and an empty one for the others."""
        chats = iter(self._drafts([content for content in contents if isinstance(content, Chat)]))
        drafts = [next(chats) if isinstance(content, Chat) else [] for content in contents]
        simple = [
            draft.rendered.text
            for row in drafts
            if not isinstance(row, BadRow)
            for draft in row
            if not draft.stand_ins
        ]
        encoded = iter(self._encoder.rendered(simple))
        return [row if isinstance(row, BadRow) else self._samples(row, encoded) for row in drafts]

    def _drafts(self, chats: Sequence[Chat]) -> list[list[_SampleDraft] | BadRow]:
        """Return the drafts of all chats. They are rendered in one call, since that happens in another
        process."""
        if not chats:
            return []
        hidden = [self._hidden(chat) for chat in chats]
        shown = [row.chat for row in hidden if isinstance(row, _Hidden)]
        plain = self._renderings(self._template, [chat for chat in shown if chat.tools is None])
        with_tools = self._renderings(self._tool_template, [chat for chat in shown if chat.tools is not None])
        return [
            row
            if isinstance(row, BadRow)
            else self._draft(row, next(plain if row.chat.tools is None else with_tools))
            for row in hidden
        ]

    def _renderings(self, template: Template | None, chats: Sequence[Chat]) -> Iterator[Rendering | BadRow]:
        if not chats:
            return iter(())
        if template is None:
            raise DataError(NO_TEMPLATE)
        ends = None if self._train_on == "all" else sorted(self._encoder.added)
        return iter(template.renderings(chats, ends))

    def _hidden(self, chat: Chat) -> _Hidden | BadRow:
        stand_ins: Mapping[str, str] = {}
        if holds_control([chat.messages, chat.tools], self._encoder.control):
            try:
                (messages, tools), stand_ins = hide_control(
                    [chat.messages, chat.tools], self._encoder.control
                )
            except BadRow as problem:
                return problem
            chat = replace(chat, messages=tuple(messages), tools=tools)
        return _Hidden(chat, stand_ins)

    def _draft(self, row: _Hidden, rendering: Rendering | BadRow) -> list[_SampleDraft] | BadRow:
        if isinstance(rendering, BadRow):
            return rendering
        self._count(rendering, row.chat, control=bool(row.stand_ins))
        return [_SampleDraft(rendered, row.stand_ins) for rendered in rendering.samples]

    def _count(self, rendering: Rendering, chat: Chat, control: bool) -> None:
        self._tally.split += rendering.split
        self._tally.parted += rendering.parted
        self._tally.endless += rendering.endless
        self._tally.control += control
        assert self._tool_template is not None or chat.tools is None
        self._tally.untold += self._tool_template is not None and (
            chat.tools is not None and not self._tool_template.prints_tools
        )

    def _samples(self, drafts: Sequence[_SampleDraft], simple: Iterator[Encoded]) -> tuple[Sample, ...]:
        """Return samples with exactly the tokens of `apply_chat_template`; BOS only if the template prints
        it."""
        encoded = [
            self._encoder.pieces(draft.rendered.text, draft.stand_ins) if draft.stand_ins else next(simple)
            for draft in drafts
        ]
        rows = list(zip(drafts, encoded, strict=True))
        self._tally.merged += any(self._merges(draft, part) for draft, part in rows)
        return tuple(self._supervise(draft, part) for draft, part in rows)

    def _merges(self, draft: _SampleDraft, encoded: Encoded) -> bool:
        return any(self._encoder.begins_inside(encoded, start) for start, _ in draft.rendered.spans or ())

    def _supervise(self, draft: _SampleDraft, encoded: Encoded) -> Sample:
        spans = draft.rendered.spans
        mask = np.full(len(encoded.tokens), spans is None)
        for start, stop in spans or ():
            # A token that begins in the prompt and continues into the answer counts too: the answer begins
            # with it.
            mask |= ((encoded.starts >= start) | (encoded.stops > start)) & (encoded.starts < stop)
        if len(mask) and encoded.tokens[0] == self._encoder.bos:
            mask[0] = False
        return Sample(encoded.tokens, mask)
