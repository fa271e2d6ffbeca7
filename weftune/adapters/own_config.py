"""The config of adapters whose kind PEFT does not have: an `adapter_config.json` with Weftune's own keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from weftune.adapters.folder import CONFIG
from weftune.adapters.kinds import KINDS
from weftune.adapters.target import TargetSpec

KIND, BASE = "weftune_kind", "base_model_name_or_path"


@dataclass(frozen=True, slots=True)
class OwnConfig:
    spec: TargetSpec
    base: str

    def save_pretrained(self, folder: str) -> None:
        """Write the config, as the method of PEFT's configs does."""
        keys = {item.name: getattr(self.spec, item.name) for item in fields(self.spec)}
        whole = {KIND: keys.pop("kind"), BASE: self.base, **keys, "init_from": None}
        (Path(folder) / CONFIG).write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")

    @staticmethod
    def spec_in(config: Mapping[str, Any]) -> TargetSpec:
        own = {key: value for key, value in config.items() if key not in (KIND, BASE)}
        lists = {key: tuple(value) for key, value in own.items() if isinstance(value, list)}
        return KINDS[config[KIND]](**{**own, **lists})
