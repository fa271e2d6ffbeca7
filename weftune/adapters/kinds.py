"""The kinds of adapter by name, and the record that holds what a job may say about each. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

from weftune.adapters.lora.spec import LoraSpec

AdapterSpec = LoraSpec
"""Any adapter's spec; with a second kind this becomes the union of them, told apart by `kind`."""

KINDS: Mapping[str, type[AdapterSpec]] = {"lora": LoraSpec}
