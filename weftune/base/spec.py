"""The keys with which a user describes the base. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Quantize = Literal["nf4", "int8", "fp8"]

DEMO = "demo"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSpec:
    """The base: `model` is a Hub id, a local folder, a GGUF file, or `demo`."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    model: str
    dtype: Dtype | None = None
    """Dtype of the base. None selects bfloat16 on a GPU and float32 on a CPU."""
    revision: str | None = None
    quantize: Quantize | None = None
    """Quantisation format of the layers' weights. None keeps the format of the base's files."""
    written: str | None = None
    """The user's original name if `model` is its absolute path. It is never a key of jobs.yaml."""

    @property
    def published_name(self) -> str:
        """Name of the base in the config of an exported adapter."""
        return DEMO_HUB_ID if self.model == DEMO else self.written or self.model
