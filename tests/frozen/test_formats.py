"""Who reads what a run writes, or what `plan --json` says, finds every key that was there, of its type."""

import json

import pytest

from tests.cases import slow_but
from tests.frozen.formats import FILE, PLANS, plan_folder, planned, written

RECORDED = json.loads(FILE.read_text())
GONE = {"streamed by two": ["mapping"]}
"""Left with the forecast that no run used: how stages were laid on GPUs that share a link to the host."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return written(tmp_path_factory.mktemp("formats") / "out")


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    return plan_folder(tmp_path_factory.mktemp("plans"))


def assert_held(recorded, now, where):
    """Every recorded key is there and has one of the types it had; there may be more keys."""
    if isinstance(recorded, dict):
        assert isinstance(now, dict), where
        for key, below in recorded.items():
            assert key in now, f"{where}.{key}"
            assert_held(below, now[key], f"{where}.{key}")
    elif isinstance(recorded, list):
        assert isinstance(now, list), where
        if recorded != [None]:
            assert_held(recorded[0], now[0], f"{where}[]")
    else:
        assert isinstance(now, str), where
        assert set(now.split(" or ")) <= set(recorded.split(" or ")), f"{where}: {now}, was {recorded}"


@pytest.mark.parametrize("kind", RECORDED["metrics.jsonl"])
def test_every_kind_of_line_in_the_metrics_has_its_keys(kind, found):
    now, recorded = found["metrics.jsonl"][kind], RECORDED["metrics.jsonl"][kind]
    assert_held(recorded, now, kind)
    assert list(now)[: len(recorded)] == list(recorded), "columns keep their order"


@pytest.mark.parametrize("file", ["status.json", "windows.jsonl"])
def test_the_status_and_the_windows_have_their_keys(file, found):
    assert_held(RECORDED[file], found[file], file)


@pytest.mark.parametrize("job", RECORDED["adapter"])
def test_an_adapter_folder_has_the_files_the_config_and_the_tensors_that_peft_reads(job, found):
    recorded, now = RECORDED["adapter"][job], found["adapter"][job]
    assert set(recorded["files"]) <= set(now["files"])
    assert recorded["tensors"] == now["tensors"]
    assert recorded["config"] == now["config"]


@pytest.mark.parametrize("job", RECORDED["checkpoint"])
def test_a_checkpoint_has_its_files_its_state_and_its_tensors(job, found):
    recorded, now = RECORDED["checkpoint"][job], found["checkpoint"][job]
    assert recorded["files"] == now["files"]
    assert recorded["tensors"] == now["tensors"]
    assert_held(recorded["state"], now["state"], "state")


@pytest.mark.parametrize("way", slow_but(PLANS, [one for one in PLANS if one != "one device"]))
def test_a_plan_in_json_has_its_keys_whatever_way_it_chooses(way, plans):
    recorded = RECORDED["plan --json"][way]
    held = {key: kind for key, kind in recorded.items() if key not in GONE.get(way, ())}
    assert_held(held, planned(plans, way), way)


def test_the_plans_are_of_different_kinds():
    kinds = [frozenset(RECORDED["plan --json"][way]) for way in PLANS]
    assert len(set(kinds)) > 1


@pytest.mark.parametrize(
    "now",
    [
        {"loss": "float"},
        {"loss": "str", "step": "int"},
        {"loss": "float or null", "step": "int"},
        {"loss": "float", "step": ["int"]},
    ],
)
def test_a_vanished_key_and_another_type_are_found(now):
    assert_held({"loss": "float", "step": "int"}, {"loss": "float", "step": "int", "more": "str"}, "a line")
    with pytest.raises(AssertionError):
        assert_held({"loss": "float", "step": "int"}, now, "a line")
