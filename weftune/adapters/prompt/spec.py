"""The adapter keys of a prompt tuning job. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from weftune.adapters.target import ROWS, TargetSpec
from weftune.core.bounds import SIZE
from weftune.core.shapes import SiteShape, layer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpec(TargetSpec):
    """Trained rows before every sample in the place of embeddings; the base itself is unchanged."""

    implementation: ClassVar[str] = "weftune.adapters.prompt.apply:Prompt"
    peft_type: ClassVar[str | None] = "PROMPT_TUNING"
    merges: ClassVar[bool] = False
    unused: ClassVar[frozenset[str]] = frozenset({"targets", "layers"})

    kind: Literal["prompt"] = "prompt"
    num_virtual_tokens: Annotated[int, SIZE] = 16
    init: Literal["random", "vocabulary", "text"] = "random"
    """Initial values of virtual tokens: drawn from a normal distribution, embeddings of tokens drawn from the
    vocabulary, or those of `init_text`, repeated or cut to their number."""
    init_text: str = ""

    def targets_site(self, name: str) -> bool:
        return False

    @property
    def start_text(self) -> str:
        return self.init_text if self.init == "text" else ""

    @property
    def rows_before(self) -> int:
        return self.num_virtual_tokens

    def shapes_outside(self, sites: Sequence[SiteShape]) -> dict[str, tuple[int, ...]]:
        """Return the shape of the rows, as wide as the input of the first layer and only on its stage."""
        width = next((site.in_features for site in sites if layer_of(site.name) == 0), None)
        return {} if width is None else {ROWS: (self.num_virtual_tokens, width)}
