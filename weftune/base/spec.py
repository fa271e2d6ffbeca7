"""What a user may say about the base. No torch here: `jobs` builds on this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Quantize = Literal["nf4", "int8", "fp8"]

DEMO = "demo"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSpec:
    """A Hub id, a local folder, a GGUF file, or `demo`."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    model: str
    dtype: Dtype | None = None
    """None: bfloat16 on a GPU, float32 on a CPU."""
    revision: str | None = None
    quantize: Quantize | None = None
    """What the weights of the layers are stored in. None: as the base's files have them."""
    written: str | None = None
    """What the user wrote, where `model` is the absolute path made of it; never a key of jobs.yaml."""

    @property
    def published_name(self) -> str:
        """What an exported adapter names as its base."""
        return DEMO_HUB_ID if self.model == DEMO else self.written or self.model
