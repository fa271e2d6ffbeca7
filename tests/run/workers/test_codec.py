"""Messages between workers: whatever is sent arrives as it was, and nothing that is not known."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.run.processes import run_workers
from weftune.errors import UserError
from weftune.run.workers.codec import ForgedMessage, decode, encode, records_in
from weftune.run.workers.groups import SECRET, WorkerPosition, require_secret
from weftune.run.workers.messages import MESSAGE_RECORDS, Begun, CommandReceiver, JobCommand, WorkerControl


@dataclass(frozen=True, slots=True)
class Inner:
    tensor: torch.Tensor
    names: tuple[str, ...]


@dataclass(slots=True)
class Outer:
    inner: Inner | None
    many: dict[tuple[int, str], Inner]
    path: Path
    numbers: frozenset[int]
    rest: list[float | None]


HERE = records_in(Outer)


def test_records_are_found_by_the_annotations_that_lead_to_them():
    assert {"Outer": Outer, "Inner": Inner} == HERE
    assert {"Begin", "WorkerLayout", "Layout", "Program", "Forward", "LoraSpec", "WorkerReport"} <= set(
        MESSAGE_RECORDS
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_arrives_with_its_bits_dtype_and_shape(dtype):
    sent = torch.randn(3, 5).to(dtype)[:, ::2]
    found = decode(encode((sent, torch.empty(0, 4, dtype=dtype), sent[0, 0])), {})
    assert torch.equal(found[0], sent)
    assert found[0].dtype == dtype
    assert found[1].shape == (0, 4)
    assert torch.equal(found[2], sent[0, 0])


def test_nested_records_arrive_as_they_were():
    inner = Inner(torch.arange(3), ("a", "b"))
    sent = Outer(None, {(1, "x"): inner}, Path("some/where"), frozenset({1, 2}), [1.5, None, float("inf")])
    found = decode(encode(sent), HERE)
    assert (found.inner, found.path, found.numbers, found.rest) == (None, sent.path, sent.numbers, sent.rest)
    assert torch.equal(found.many[1, "x"].tensor, inner.tensor)
    assert found.many[1, "x"].names == inner.names


def test_a_record_that_no_message_holds_is_refused():
    with pytest.raises(KeyError):
        decode(encode(Inner(torch.zeros(1), ())), records_in(Begun))


def test_what_has_no_form_is_refused_by_who_sends_it():
    with pytest.raises(TypeError, match="cannot hold"):
        encode(object())


def test_a_message_without_the_secret_or_changed_on_its_way_is_refused():
    signed = encode(("step", 3), b"secret")
    assert decode(signed, {}, b"secret") == ("step", 3)
    for forged in (encode(("step", 3)), encode(("step", 3), b"other"), signed[:-1] + b" "):
        with pytest.raises(ForgedMessage):
            decode(forged, {}, b"secret")


def as_stranger(connections):
    """Every worker has a secret of its own: what the others say is refused with a sentence."""
    os.environ[SECRET] = f"of worker {connections.position.worker}"
    try:
        if connections.position.worker == 0:
            control = WorkerControl(connections)
            control.command(1, JobCommand("keep best", "a"))
            control.wait()
        else:
            receiver = CommandReceiver(connections)
            receiver.answer(Begun())
            receiver.next_command()
    except UserError as error:
        return str(error)
    return "heard"


def test_workers_with_different_secrets_say_so_and_wait_for_nobody():
    for sentence in run_workers(2, as_stranger):
        assert "is not signed with this run's secret; set WEFTUNE_SECRET" in sentence


def test_across_machines_a_secret_is_asked_for_and_on_one_it_is_not(monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    require_secret(WorkerPosition(0, 2, 0, 2))
    with pytest.raises(UserError, match="WEFTUNE_SECRET is not set; set it to the same long random text"):
        require_secret(WorkerPosition(0, 2, 0, 1))
    monkeypatch.setenv(SECRET, "long and random")
    require_secret(WorkerPosition(0, 2, 0, 1))
