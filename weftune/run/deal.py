"""A microbatch's rows as kernels want to know them."""

from __future__ import annotations

from dataclasses import dataclass

from weftune.adapters.banks import Banks
from weftune.base.attention import Pack, pack
from weftune.base.model import Base
from weftune.ops.lora import Route
from weftune.ops.rows import Rows
from weftune.run.lay import Laid


@dataclass(frozen=True, slots=True)
class Dealt:
    """Whose the rows of a microbatch are, and where its samples begin."""

    rows: Rows | None
    pack: Pack


def deal(base: Base, banks: Banks, laid: Laid, route: Route) -> Dealt:
    """The same for every stage that the microbatch passes."""
    rows = None
    if route is Route.tiled:
        rows = Rows.empty(laid.microbatch.rows, banks.slots, base.device)
        rows.fill(banks.seats(laid.microbatch), laid.token_index)
    return Dealt(rows, pack(laid.microbatch.sample_lengths, base.device))
