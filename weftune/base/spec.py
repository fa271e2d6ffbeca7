"""The keys with which a user describes the base. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from weftune.core.bounds import MAX_COUNT, Bound

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Quantize = Literal["nf4", "int8", "fp8"]
RopeType = Literal["linear", "yarn", "llama3"]

DEMO = "demo"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """RoPE scaling, which extends the context of the base. The fields have the names of transformers; fields
    that are None keep the value of the base's config."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    rope_type: RopeType
    factor: Annotated[float, Bound(at_least=1, at_most=1e6)]
    """Factor by which the context is extended."""
    rope_theta: Annotated[float | None, Bound(above=0)] = None
    original_max_position_embeddings: Annotated[int | None, Bound(at_least=1, at_most=MAX_COUNT)] = None
    """Context in tokens that `factor` multiplies. None selects the context of the base's config."""
    attention_factor: Annotated[float | None, Bound(above=0)] = None
    beta_fast: Annotated[float | None, Bound(above=0)] = None
    beta_slow: Annotated[float | None, Bound(above=0)] = None
    mscale: Annotated[float | None, Bound(above=0)] = None
    mscale_all_dim: Annotated[float | None, Bound(above=0)] = None
    truncate: bool | None = None
    low_freq_factor: Annotated[float | None, Bound(above=0)] = None
    high_freq_factor: Annotated[float | None, Bound(above=0)] = None

    def values(self) -> dict[str, Any]:
        """Return the keys of the RoPE scaling that are not None, with their values."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


ORIGINAL = "original_max_position_embeddings"
ROPE_KEYS: Mapping[RopeType, tuple[str, ...]] = {
    "linear": (),
    "yarn": (
        ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    ),
    "llama3": (ORIGINAL, "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
"""Maps each type of rope scaling to the keys that it has besides `rope_type`, `factor` and `rope_theta`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSpec:
    """The user's specification of the base model: `model` is a Hub id, a local folder, a GGUF file, or
    `demo`."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    model: str
    dtype: Dtype | None = None
    """Dtype of the base. None selects bfloat16 on a GPU and float32 on a CPU."""
    revision: str | None = None
    quantize: Quantize | None = None
    """Quantisation format of the layers' weights. None keeps the format of the base's files."""
    rope_scaling: RopeScaling | None = None
    """RoPE scaling, which extends the base's context. None keeps the positions of the base's config."""
    written: str | None = None
    """Name of the model as the user wrote it, if `model` is its absolute path. Users cannot set this field in
    jobs.yaml."""

    @property
    def published_name(self) -> str:
        """Name of the base model that is written into the config of an exported adapter."""
        return DEMO_HUB_ID if self.model == DEMO else self.written or self.model

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> BaseSpec:
        """Return the base that `record`, a result of `BaseSpec.record`, describes. Raise TypeError or
        KeyError if it is malformed."""
        values: dict[str, Any] = {name: record.get(name) for name in (*BASE_KEYS, "written")}
        scaling = values.pop("rope_scaling")
        values["model"] = str(record["model"])
        return cls(**values, rope_scaling=None if scaling is None else RopeScaling(**scaling))

    def record(self) -> dict[str, Any]:
        """Return a dict of the keys that identify the base, with plain values, to be stored."""
        found = {name: getattr(self, name) for name in BASE_KEYS}
        scaling = self.rope_scaling
        return {**found, "rope_scaling": None if scaling is None else scaling.values()}


BASE_KEYS = ("model", "dtype", "revision", "quantize", "rope_scaling")
"""Keys that identify a base. The path as the user wrote it (`written`) is not one of these keys."""
