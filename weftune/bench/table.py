"""Aligned text tables: the first and the last column are left-aligned, the others right-aligned."""

from __future__ import annotations

from collections.abc import Sequence

ABSENT = "—"


def aligned(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[at]) for row in (titles, *rows)) for at in range(len(titles))]
    last = len(titles) - 1

    def line(row: Sequence[str]) -> str:
        cells = [
            word.ljust(width) if at in (0, last) else word.rjust(width)
            for at, (word, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(line(row) for row in (titles, *rows))


def number(value: float | None, format_spec: str = ",.1f", scale: float = 1.0) -> str:
    """Format `value` × `scale`; None becomes a dash."""
    return ABSENT if value is None else format(value * scale, format_spec)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator
