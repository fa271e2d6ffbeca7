"""Conversion of messages between workers to bytes: a JSON header and the raw bytes of tensors, never a
pickle.

The header gives the type of every value. A dataclass is given by its name, which is looked up among the
dataclasses that a message may contain, so no other class can be created. With a secret, messages that were
not signed with it are refused.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from weftune.errors import UserError

ALIGNMENT = 64
"""Number of bytes of which the offset of every tensor in a message is a multiple."""
DIGEST_BYTES = hashlib.sha256().digest_size


class ForgedMessage(UserError):
    """Raised for a message that was not signed with this run's secret, or was changed on its way."""


def encode(value: object, secret: bytes = b"") -> bytes:
    packer = _Packer()
    header = json.dumps({"value": packer.to_json(value), "tensors": packer.tensor_headers}).encode()
    body = len(header).to_bytes(8, "little") + header + b"".join(packer.pieces)
    return _digest(body, secret) + body if secret else body


def decode(message: bytes, records: Mapping[str, type], secret: bytes = b"") -> Any:
    """Return the message that the bytes encode. `records` maps the names of the dataclasses that the message
    may contain to the classes."""
    if secret:
        digest, message = message[:DIGEST_BYTES], message[DIGEST_BYTES:]
        if not hmac.compare_digest(digest, _digest(message, secret)):
            raise ForgedMessage(
                "A message of another worker is not signed with this run's secret; set WEFTUNE_SECRET to the "
                "same text on all machines"
            )
    size = int.from_bytes(message[:8], "little")
    header = json.loads(message[8 : 8 + size])
    payload = bytearray(message[8 + size :])
    tensors = [_read_tensor(payload, *tensor_headers) for tensor_headers in header["tensors"]]
    return _decode_value(header["value"], tensors, records)


def _digest(body: bytes, secret: bytes) -> bytes:
    return hmac.new(secret, body, hashlib.sha256).digest()


class _Packer:
    """A converter of values into JSON that collects the tensors it finds in them."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.tensor_headers: list[tuple[str, list[int], int]] = []
        """For each collected tensor, its dtype, its shape and its offset in bytes."""
        self._end = 0

    def to_json(self, value: object) -> object:
        """Return a value in a form that JSON can represent: numbers, strings, booleans and None unchanged,
        any other value as a list of a tag, which names its type, and its contents."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return ["tensor", self._add_tensor(value)]
        if isinstance(value, Path):
            return ["path", str(value)]
        if is_dataclass(value) and not isinstance(value, type):
            return [
                "record",
                type(value).__name__,
                [self.to_json(getattr(value, one.name)) for one in fields(value)],
            ]
        if isinstance(value, Mapping):
            return ["map", [[self.to_json(key), self.to_json(item)] for key, item in value.items()]]
        for kind, tag in ((tuple, "tuple"), (list, "list"), (Set, "set")):
            if isinstance(value, kind):
                return [tag, [self.to_json(one) for one in value]]
        raise TypeError(f"a message cannot hold {type(value)}")

    def _add_tensor(self, tensor: Tensor) -> int:
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        self.tensor_headers.append((str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self._end))
        padding = bytes(-len(raw) % ALIGNMENT)
        self.pieces += [raw, padding]
        self._end += len(raw) + len(padding)
        return len(self.tensor_headers) - 1


def _read_tensor(payload: bytearray, name: str, shape: list[int], start: int) -> Tensor:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"{name} is no dtype"
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype, count=count, offset=start).view(shape)


def _decode_value(json_value: Any, tensors: list[Tensor], records: Mapping[str, type]) -> Any:
    if not isinstance(json_value, list):
        return json_value
    tag, *content = json_value
    match tag:
        case "tensor":
            return tensors[content[0]]
        case "path":
            return Path(content[0])
        case "record":
            name, values = content
            return _build_record(records[name], [_decode_value(one, tensors, records) for one in values])
        case "map":
            pairs = content[0]
            return {
                _decode_value(key, tensors, records): _decode_value(one, tensors, records)
                for key, one in pairs
            }
        case _:
            made = [_decode_value(one, tensors, records) for one in content[0]]
            return {"tuple": tuple, "list": list, "set": frozenset}[tag](made)


def _build_record(kind: type, values: list[Any]) -> Any:
    """Return an instance of the dataclass `kind` with the given field values. Its constructor is not run."""
    instance: Any = object.__new__(kind)
    for one, value in zip(fields(kind), values, strict=True):
        object.__setattr__(instance, one.name, value)
    return instance


@cache
def records_in(kind: Any) -> Mapping[str, type]:
    """Return a dict from name to class of all dataclasses that occur in the type `kind`, directly or in the
    annotations of fields."""
    records: dict[str, type] = {}
    _collect_records(kind, records)
    return records


def _collect_records(kind: Any, records: dict[str, type]) -> None:
    for one in get_args(kind):
        _collect_records(one, records)
    if isinstance(kind, type) and is_dataclass(kind) and records.get(kind.__name__) is not kind:
        assert kind.__name__ not in records, f"two records are called {kind.__name__}"
        records[kind.__name__] = kind
        for hint in get_type_hints(kind).values():
            _collect_records(hint, records)
