"""The scripts themselves at a toy size on the CPU: they must run the first time where a GPU is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import (
    gpu_experts,
    gpu_kinds,
    gpu_step,
    gpu_stream,
    pipeline_gpu,
    preferences,
    shared_base,
)
from benchmarks.where import KernelKind
from tests.interpreter import interpret
from weftune.bench import gpu_churn, gpu_lengths, gpu_quality
from weftune.bench import gpu_step as bench_step
from weftune.bench.timing import MeasuredStep


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def toy(script: ModuleType, *words: str) -> dict[str, Any]:
        file = tmp_path / "found.json"
        monkeypatch.setattr(sys, "argv", [script.__name__, "--toy", "--json", str(file), *words])
        script.main()
        return json.loads(file.read_text())

    return toy


def test_a_step_is_measured_in_every_way_and_weftune_comes_last(
    run: Any, capsys: pytest.CaptureFixture
) -> None:
    found = run(gpu_step, "--baselines", "frozen,peft,peft-bf16,liger")
    names = [row["name"] for row in found["rows"]]
    assert names[0] == bench_step.FROZEN
    assert names[-1] == bench_step.WEFTUNE
    assert found["strongest"] in names[1:3]
    for row in found["rows"]:
        assert (row["seconds"] is None) == bool(row["note"])
        assert row["seconds"] is None or row["rho"] > 0
    last = capsys.readouterr().out.split("ms per step")[1]
    assert all(name in last for name in names)


def test_the_time_of_a_profiled_round_is_shared_out_among_kinds(
    run: Any, capsys: pytest.CaptureFixture
) -> None:
    found = run(gpu_step, "--baselines", "", "--profile")
    by_kind = found["where"]["by_kind"]
    assert set(by_kind) == {str(kind) for kind in KernelKind}
    assert sum(by_kind.values()) - by_kind[KernelKind.IDLE] > 0
    heaviest = found["where"]["heaviest"]
    assert [one["microseconds"] for one in heaviest] == sorted(
        (one["microseconds"] for one in heaviest), reverse=True
    )
    said = capsys.readouterr().out.split("under the profiler:")[1]
    assert all(kind in said for kind in KernelKind)


def test_without_baselines_weftune_is_measured_alone_and_without_a_profile_nothing_is_said_of_where(
    run: Any,
) -> None:
    found = run(gpu_step, "--baselines", "none")
    assert [row["name"] for row in found["rows"]] == [bench_step.WEFTUNE]
    assert found["where"] is None
    with pytest.raises(SystemExit):
        run(gpu_step, "--baselines", "none,frozen")


def test_the_optimizer_in_host_memory_is_a_row_before_weftunes_own(run: Any) -> None:
    found = run(gpu_step, "--baselines", "none", "--offload")
    assert [row["name"] for row in found["rows"]] == [gpu_step.OFFLOADED, bench_step.WEFTUNE]
    assert all(row["seconds"] > 0 for row in found["rows"])
    assert found["strongest"] is None


def test_a_quantised_base_is_a_row_for_every_format_with_the_bytes_that_it_holds(
    run: Any, capsys: pytest.CaptureFixture
) -> None:
    found = run(gpu_step, "--baselines", "frozen", "--quantize", "nf4,int8,fp8", "--profile")
    rows = {row["name"]: row for row in found["rows"]}
    nf4, int8, fp8 = gpu_step.QUANTISED.values()
    assert list(rows) == [bench_step.FROZEN, nf4, int8, fp8, bench_step.WEFTUNE]
    assert all(row["seconds"] > 0 for row in rows.values())
    assert rows[int8]["base_bytes"] < rows[bench_step.WEFTUNE]["base_bytes"]
    assert 0 < rows[nf4]["base_bytes"] != rows[int8]["base_bytes"] < rows[fp8]["base_bytes"]
    assert found["strongest"] is None
    assert f"One round of {fp8}, under the profiler" in capsys.readouterr().out


def test_a_format_that_there_is_not_is_refused_with_a_sentence(
    run: Any, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(gpu_step, "--quantize", "nf4,gguf")
    assert "gguf is none of nf4" in capsys.readouterr().err


def test_the_same_bits_twice_are_a_row_before_weftunes_own(run: Any) -> None:
    found = run(gpu_step, "--baselines", "frozen", "--deterministic")
    assert [row["name"] for row in found["rows"]] == [
        bench_step.FROZEN,
        gpu_step.DETERMINISTIC,
        bench_step.WEFTUNE,
    ]
    assert found["strongest"] is None
    assert not torch.are_deterministic_algorithms_enabled()


def test_jobs_of_unlike_ranks_and_dropouts_are_measured_also_after_one_has_left(run: Any) -> None:
    options = "--baselines none --ranks 4x2,9 --dropouts 0x2,0.1 --leave 1 --order wide"
    found = run(gpu_step, *options.split())
    assert (found["ranks"], found["dropouts"]) == ([4, 4, 9], [0.0, 0.0, 0.1])
    assert (found["jobs"], found["left"], found["order"]) == (3, 1, "wide")
    assert found["rows"][0]["seconds"] > 0


@pytest.mark.parametrize(
    "options",
    [
        "--ranks 4x2,9 --baselines peft",
        "--ranks 4,no --baselines none",
        "--ranks 4,5 --dropouts 0 --baselines none",
    ],
)
def test_ranks_and_dropouts_of_each_job_are_refused_with_a_sentence(
    options: str, run: Any, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(gpu_step, *options.split())
    assert "error: " in capsys.readouterr().err


def test_the_strongest_is_the_fastest_way_to_train_that_is_not_weftune() -> None:
    rows = [
        bench_step.StepRow(bench_step.FROZEN, MeasuredStep(1.0, 0), 1.0, trains_adapters=False),
        bench_step.StepRow("slow", MeasuredStep(3.0, 0), 1.0, trains_adapters=True),
        bench_step.StepRow("fast", MeasuredStep(2.0, 0), 1.0, trains_adapters=True),
        bench_step.StepRow("absent", MeasuredStep(None, None, "not here"), 1.0, trains_adapters=True),
        bench_step.StepRow(bench_step.WEFTUNE, MeasuredStep(1.5, 0), 1.0, trains_adapters=True),
    ]
    best = bench_step.fastest_baseline(rows)
    assert best is not None
    assert best.name == "fast"
    assert bench_step.fastest_baseline([rows[0], rows[-1]]) is None


def test_real_lengths_are_drawn_alike_every_time_and_a_quarter_from_each_dataset() -> None:
    first, again = (gpu_lengths.draw_rounds(2, 8, 4) for _ in range(2))
    assert first == again
    pools = list(json.loads(gpu_lengths.FILE.read_text()).values())
    assert len(pools) == 4
    for jobs in first:
        for job, batch in enumerate(jobs):
            assert set(batch) <= set(pools[job % 4])


def test_real_lengths_are_measured_with_the_padding_of_both(run: Any) -> None:
    found = run(gpu_lengths)
    (batches,) = gpu_lengths.draw_rounds(1, 4, 4)
    useful = sum(map(sum, batches))
    peft, weftune = found["rows"]
    assert peft["padding"] == pytest.approx(1 - useful / sum(4 * max(batch) for batch in batches))
    assert found["tokens"] == useful
    assert 0 <= weftune["padding"] < 1
    assert weftune["seconds"] > 0


@pytest.mark.slow
def test_experts_are_measured_with_adapters_and_without(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    found = run(gpu_experts, "--jobs", "2", "--tokens", "8")["seconds"]
    assert len(found) == 5
    assert all(seconds > 0 for seconds in found.values())


@pytest.mark.slow
def test_joins_and_leaves_are_made_and_counted(run: Any) -> None:
    found = run(gpu_churn)
    assert found["joins"] + found["leaves"] == found["changes"]
    assert found["leaves"] > 0
    assert found["verdict"].startswith("memory ")


@pytest.mark.skipif(not gpu_quality.MODEL.is_dir(), reason="stories15M is not here")
@pytest.mark.slow
def test_quality_in_float32_is_that_of_peft(run: Any) -> None:
    found = run(gpu_quality)
    assert len(found["apart"]) == 4
    assert all(abs(apart) < 1e-4 for apart in found["apart"].values())


def test_dpo_is_measured_with_its_scoring_beside_sft_and_a_forward(run: Any) -> None:
    found = run(preferences)
    times = found["times"]
    expected = (times["dpo"] + times["scoring"]) / (times["sft"] + times["forward"])
    assert found["ratio"] == expected


def test_a_decoder_on_the_base_that_trains_agrees_and_is_measured(run: Any) -> None:
    found = run(shared_base, "--jobs", "2", "--sequences", "2", "--tokens", "4")
    assert found["agreement"]["tokens"] == 4 * 2 * 4
    assert found["agreement"]["max"] < 1e-4
    assert found["weights"]["first"] > 0
    capacities = [one["capacity"] for one in found["speed"].values()]
    assert capacities[0] > capacities[1] == capacities[2]
    assert found["speed"]["while sequences decode"]["gaps"]


@pytest.mark.slow
def test_jobs_that_arrive_at_a_service_are_measured_beside_a_run(run: Any) -> None:
    service_jobs = pytest.importorskip("benchmarks.service_jobs")
    found = run(service_jobs)
    assert found["service"]["started"] == 4
    assert found["service"]["chat_beside_all_jobs"]["answers"] > 0
    assert found["service"]["chat_beside_all_jobs"]["errors"] == []
    assert found["train"]["tokens_per_second"] > 0


@pytest.mark.parametrize("script", [gpu_step, bench_step, gpu_lengths, gpu_churn, gpu_quality])
def test_without_a_gpu_a_script_says_so(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [script.__name__])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
def test_a_streamed_base_is_measured_in_every_cut_beside_the_resident_one(run: Any, tmp_path: Path) -> None:
    curve = tmp_path / "curve.html"
    options = "--cuts chosen,largest,smallest --compare same,resident,fsdp --plot"
    found = run(gpu_stream, *options.split(), str(curve))
    streamed, *_, same, _, offloaded = found["rows"]
    assert streamed["losses"] == same["losses"]
    assert found["loss_gaps"][gpu_stream.SAME] == 0.0
    assert found["loss_gaps"][gpu_stream.RESIDENT] < 1e-5
    assert [len(rounds) for rounds in streamed["losses"]] == [2, 2]
    assert streamed["losses"][0][0] != streamed["losses"][0][1]
    assert all(0 <= row["predicted_wait"] < 1 for row in found["rows"][:3])
    assert len({row["cut"] for row in found["rows"][:3]}) >= 2
    assert offloaded["note"] == "needs a GPU"
    assert "streamed from host memory" in curve.read_text()


def test_streamed_losses_are_held_to_those_of_as_many_resident_jobs() -> None:
    def row(name: str, jobs: int, loss: float) -> gpu_stream.Row:
        return gpu_stream.Row(name, jobs, 16, MeasuredStep(1.0, 0), losses=((loss, 2.0),) * jobs)

    rows = [row("Weftune, streamed", jobs, 3.0 + jobs) for jobs in (4, 2, 1)]
    assert gpu_stream.loss_gap(rows, gpu_stream.RESIDENT) is None
    assert gpu_stream.loss_gap([*rows, row(gpu_stream.RESIDENT, 4, 7.5)], gpu_stream.RESIDENT) == 0.5


@pytest.mark.slow
def test_a_pipeline_on_one_device_has_the_losses_of_one_process(run: Any) -> None:
    found = run(pipeline_gpu)
    assert found["gap"] <= pipeline_gpu.NOISE * max(found["noise"], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--no-peft",), ("--profile",)])
def test_companies_of_kinds_are_measured_beside_eight_lora_jobs_and_peft(run: Any, words: tuple[str]) -> None:
    found = run(gpu_kinds, *words)
    rows = {row["name"]: row["measured"]["seconds"] for row in found["rows"]}
    peft = () if "--no-peft" in words else (f"PEFT, {name}" for name in gpu_kinds.COMPANIES)
    assert [*rows] == [*gpu_kinds.COMPANIES, *peft]
    assert all(seconds > 0 for seconds in rows.values())
    assert all(row["predicted"] for row in found["rows"][: len(gpu_kinds.COMPANIES)])
    assert found["captures"].keys() == {"lora", *gpu_kinds.JOINING}
