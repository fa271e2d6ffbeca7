"""What may follow --gpus, and what may not stand beside it: every mistake is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.outputs import jobs_folder
from weftune.cli.train import train
from weftune.errors import PlanError, UserError
from weftune.run.measure.memory import requested_devices

TWO_JOBS = [{"name": "a", "steps": 3}, {"name": "b", "steps": 2}]


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    return jobs_folder(tmp_path, TWO_JOBS) / "jobs.yaml"


def gpus_here(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize("text", ["0", "-1", "many", "2.5", ""])
def test_a_number_that_is_none_is_a_mistake(jobs: Path, text: str) -> None:
    with pytest.raises(UserError, match=f"^--gpus {text}: write all, or how many: 1 or more$"):
        train(jobs, device="cpu", gpus=text)


def test_beside_auto_or_more_stages_than_layers_it_is_a_mistake_that_says_why(jobs: Path) -> None:
    with pytest.raises(UserError, match=r"^--pipeline 4: the base has 2 layers, and each stage needs one"):
        train(jobs, device="cpu", gpus="2", pipeline="4")
    with pytest.raises(UserError, match="--pipeline auto inspects every GPU by itself; omit it or"):
        train(jobs, gpus="all", pipeline="auto")


def test_under_torchrun_it_is_a_mistake(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--gpus 2: torchrun has started 2 workers, stages of one"):
        train(jobs, device="cpu", gpus="2")


@pytest.mark.parametrize(("text", "instead"), [("all", 2), ("1", 1), ("3", 3)])
def test_without_a_gpu_it_is_a_mistake_that_names_the_way_out(
    jobs: Path, monkeypatch: pytest.MonkeyPatch, text: str, instead: int
) -> None:
    gpus_here(monkeypatch, 0)
    with pytest.raises(
        UserError, match=f"^--gpus {text}: no GPU is found here, .* --device cpu --gpus {instead}$"
    ):
        train(jobs, gpus=text)


def test_more_gpus_than_there_are_is_a_mistake_with_their_number(
    jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus_here(monkeypatch, 2)
    with pytest.raises(UserError, match=r"^--gpus 3: this machine has 2; write all, or at most 2$"):
        train(jobs, gpus="3")


def test_shares_of_several_workers_need_as_many_gpus_each(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_here(monkeypatch, 9)
    assert requested_devices(2, None, 4) == ("cuda:0", "cuda:4")
    assert requested_devices(None, "cuda", 3) == ("cuda:0", "cuda:3", "cuda:6")
    assert requested_devices(3, "cpu", 4) == ("cpu", "cpu", "cpu")
    with pytest.raises(UserError, match=r"^--gpus 3: .* needs 4 GPUs .* so 3 need 12, and this"):
        requested_devices(3, None, 4)
    with pytest.raises(UserError, match=r"^--gpus all: .* so 1 need 10, and this machine has 9"):
        requested_devices(None, None, 10)


def test_all_means_gpus_and_a_device_that_is_one_gpu_is_a_mistake(jobs: Path) -> None:
    with pytest.raises(UserError, match="--gpus all counts GPUs; with --device cpu write how many"):
        train(jobs, device="cpu", gpus="all")
    with pytest.raises(UserError, match="--gpus 2: --device cuda:1 names one device"):
        train(jobs, device="cuda:1", gpus="2")


def test_what_is_asked_for_becomes_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_here(monkeypatch, 4)
    assert requested_devices(None, None) == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert requested_devices(2, "cuda") == ("cuda:0", "cuda:1")
    assert requested_devices(3, "cpu") == ("cpu", "cpu", "cpu")


def test_one_is_the_ordinary_run(jobs: Path) -> None:
    train(jobs, device="cpu", gpus="1")
    output = jobs.parent / "out"
    assert (output / "a" / "adapter_config.json").exists()
    assert not (output / "shares.json").exists()
    assert not (output / "ranks").exists()


def test_jobs_that_fit_no_share_are_named_with_their_numbers_and_nothing_is_begun(jobs: Path) -> None:
    with pytest.raises(PlanError) as caught:
        train(jobs, device="cpu", gpus="2", memory="100MiB")
    told = [str(mistake) for mistake in caught.value.mistakes]
    assert [sentence[:6] for sentence in told] == ["job a:", "job b:"]
    assert all("but 0.05 GiB are available; lower " in sentence for sentence in told)
    assert all(
        sentence.endswith("or give more memory, or cut the base into stages with --pipeline")
        for sentence in told
    )
    assert [path.name for path in (jobs.parent / "out").iterdir()] == [".lock"]


def test_a_mistake_in_the_data_is_found_before_any_process_is_started(jobs: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "w7"}\n{"nothing": 1}\n')
    with pytest.raises(UserError, match=r"job a: .*2"):
        train(jobs, device="cpu", gpus="2")
    assert not (tmp_path / "out" / "ranks").exists()


def test_by_command_a_mistake_is_exit_code_2(tmp_path: Path, forks) -> None:
    jobs_folder(tmp_path, TWO_JOBS)
    assert forks.weftune("train", "jobs.yaml", "--device", "cpu", "--gpus", "none", cwd=tmp_path) == 2
    assert (tmp_path / "log").read_text() == "--gpus none: write all, or how many: 1 or more\n"
