"""The keys of a prompt tuning adapter in a jobs file. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from weftune.adapters.target import ROWS, TargetSpec, embedding_width
from weftune.core.bounds import SIZE
from weftune.core.shapes import SiteShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpec(TargetSpec):
    """Prompt tuning: trained embeddings of virtual tokens that are inserted before every sample. The layers
    are not adapted."""

    implementation: ClassVar[str] = "weftune.adapters.prompt.apply:Prompt"
    runs_on_shards: ClassVar[bool] = True
    peft_type: ClassVar[str | None] = "PROMPT_TUNING"
    is_mergeable: ClassVar[bool] = False
    unused_keys: ClassVar[frozenset[str]] = frozenset({"targets", "layers"})

    kind: Literal["prompt"] = "prompt"
    num_virtual_tokens: Annotated[int, SIZE] = 16
    init: Literal["random", "vocabulary", "text"] = "random"
    """Initial values of the virtual tokens: normally distributed (`random`), the embeddings of random tokens
    (`vocabulary`), or the embeddings of `init_text`, repeated or cut to `num_virtual_tokens` (`text`)."""
    init_text: str = ""

    def targets_site(self, name: str) -> bool:
        return False

    @property
    def start_text(self) -> str:
        return self.init_text if self.init == "text" else ""

    @property
    def rows_before(self) -> int:
        return self.num_virtual_tokens

    def shapes_outside_linears(self, sites: Sequence[SiteShape]) -> dict[str, tuple[int, ...]]:
        """Return the shape of the parameter with the virtual tokens, whose width is that of the embedding.
        Empty for a stage without layer 0."""
        width = embedding_width(sites)
        return {} if width == 0 else {ROWS: (self.num_virtual_tokens, width)}
