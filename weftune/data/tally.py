"""Counts of what happened to the rows of one table on their way to samples, and sentences about it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Tally:
    rows: int = 0
    skipped: int = 0
    truncated: int = 0
    split: int = 0
    parted: int = 0
    endless: int = 0
    merged: int = 0
    control: int = 0
    untold: int = 0
    reasons: list[str] = field(default_factory=list)
    """Places and sentences of the first skipped rows."""
    explained: int = 0
    """Number of skipped rows that the reasons cover."""

    def add(self, other: Tally) -> None:
        """Add the counts of other rows; the caller handles the reasons."""
        for one in fields(self):
            if one.type == "int":
                setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def notes(self, label: str | None, longest: int) -> list[str]:
        """Return sentences for the report about all counts above 0. A label names the table if there are
        several."""
        count = f"of {self.rows} rows" + (f" of {label}" if label is not None else "")
        told = []
        if self.skipped:
            more = f"; and {self.skipped - self.explained} more" if self.skipped > self.explained else ""
            told.append(f"{self.skipped} {count} were skipped: {'; '.join(self.reasons)}{more}.")
        if self.truncated:
            told.append(f"{self.truncated} {count} were truncated to {longest} tokens.")
        if self.split:
            told.append(
                f"In {self.split} {count} each assistant turn became its own sample, because the chat "
                "template prints earlier turns differently once the conversation goes on."
            )
        if self.parted:
            told.append(
                f"In {self.parted} {count} the chat template's generation prompt is not what it prints "
                "before a finished turn; the turn is supervised from where they part."
            )
        if self.endless:
            told.append(
                f"In {self.endless} {count} the chat template ends an assistant turn without an end-of-turn "
                "token, so the model does not learn to stop with one."
            )
        if self.merged:
            told.append(
                f"In {self.merged} {count} one token holds the end of the prompt and the beginning of an "
                "answer; it is supervised, but at inference the prompt ends with other tokens."
            )
        if self.control:
            told.append(f"{self.control} {count} contain the text of a control token, which stays text.")
        if self.untold:
            told.append(f"{self.untold} {count} have tools, but the chat template does not print tools.")
        return told
