from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.example import Job, write_example, write_lines
from weftune.errors import OutputError
from weftune.report.page import render_page
from weftune.report.read import read_run


def step_line(step: int, loss: float | None) -> dict[str, object]:
    return {"job": "a", "step": step, "loss": loss, "tokens": 10, "time": float(step)}


def eval_line(step: int, loss: float) -> dict[str, object]:
    return {"job": "a", "step": step, "eval_loss": loss, "eval_tokens": 5, "time": float(step)}


def curve(output: Path) -> list[tuple[int, float | None]]:
    (job,) = read_run(output).jobs
    return [(line.step, line.loss) for line in job.losses]


def validation(output: Path) -> list[tuple[int, float | None]]:
    (job,) = read_run(output).jobs
    return [(line.step, line.loss) for line in job.evaluations]


def test_everything_the_trainer_wrote_is_read(tmp_path: Path) -> None:
    run = read_run(write_example(tmp_path / "sweep"))
    jobs = {job.name: job for job in run.jobs}
    assert list(jobs) == ["r8-slow", "r16", "r64-best", "no-validation", "hot", "late"]
    assert (run.base, run.device, run.seconds, run.solo_seconds) == ("demo", "cpu", 184.2, 412.0)
    assert len(run.windows) == 30
    assert run.windows[0].predicted_seconds is None
    assert len(jobs["r16"].losses) == 60
    assert [line.step for line in jobs["r16"].evaluations] == list(range(0, 61, 6))
    assert jobs["r64-best"].spec["adapter"]["rank"] == 64
    assert jobs["hot"].losses[-1].loss is None
    assert jobs["hot"].state == "failed"
    assert "not finite" in jobs["hot"].reason
    assert jobs["late"].spec == {}


def test_a_torn_last_line_is_left_out_in_silence(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [step_line(1, 2.0)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"job": "a", "step": 2, "lo')
    assert curve(tmp_path) == [(1, 2.0)]
    assert read_run(tmp_path).notes == ()


def test_a_torn_line_within_the_file_is_counted_in_a_note(tmp_path: Path) -> None:
    text = json.dumps(step_line(1, 2.0)) + '\n{"job": "a", "st' + json.dumps(step_line(2, 1.0)) + "\n"
    (tmp_path / "metrics.jsonl").write_text(text + json.dumps(step_line(3, 0.5)) + "\n")
    assert curve(tmp_path) == [(1, 2.0), (3, 0.5)]
    assert "1 torn line of metrics.jsonl" in read_run(tmp_path).notes[0]


def test_steps_that_a_resumed_job_wrote_again_replace_the_old_ones(tmp_path: Path) -> None:
    before = [step_line(1, 3.0), step_line(2, 2.0), step_line(3, 9.0), eval_line(3, 9.0)]
    write_lines(
        tmp_path / "metrics.jsonl", [*before, step_line(2, 2.1), step_line(3, 1.1), eval_line(3, 1.2)]
    )
    assert curve(tmp_path) == [(1, 3.0), (2, 2.1), (3, 1.1)]
    assert validation(tmp_path) == [(3, 1.2)]


def test_a_resumed_job_keeps_no_evaluation_of_steps_that_it_makes_again(tmp_path: Path) -> None:
    before = [eval_line(0, 3.0), *(step_line(step, 9.0) for step in (1, 2, 3)), eval_line(2, 9.0)]
    write_lines(tmp_path / "metrics.jsonl", [*before, step_line(2, 2.0)])
    assert curve(tmp_path) == [(1, 9.0), (2, 2.0)]
    assert validation(tmp_path) == [(0, 3.0)]


def test_a_restarted_job_keeps_nothing_of_its_longer_first_run(tmp_path: Path) -> None:
    first = [eval_line(0, 3.0), *(step_line(step, 9.0) for step in range(1, 9)), eval_line(8, 9.0)]
    write_lines(tmp_path / "metrics.jsonl", [*first, eval_line(0, 3.0), step_line(1, 2.0)])
    assert curve(tmp_path) == [(1, 2.0)]
    assert validation(tmp_path) == [(0, 3.0)]


def test_values_that_are_not_finite_become_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"job": "a", "step": 1, "loss": NaN, "tokens": 1, "time": 1}\n'
        '{"job": "a", "step": 2, "loss": 1e400, "tokens": 1, "time": 1}\n'
        '{"job": "a", "step": 3, "loss": null, "tokens": 1, "time": 1}\n'
    )
    assert curve(tmp_path) == [(1, None), (2, None), (3, None)]


def test_a_name_that_climbs_out_of_the_folder_reads_nothing(tmp_path: Path) -> None:
    write_example(tmp_path / "other", [Job(name="secret")])
    output = tmp_path / "run"
    output.mkdir()
    write_lines(output / "metrics.jsonl", [step_line(1, 2.0) | {"job": "../other/secret"}])
    (job,) = read_run(output).jobs
    assert job.spec == {}


@pytest.mark.parametrize(("folder", "words"), [("empty", "holds no metrics"), ("absent", "is not a folder")])
def test_a_folder_without_metrics_is_a_sentence(tmp_path: Path, folder: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(OutputError, match=words):
        read_run(tmp_path / folder)


def test_the_report_never_imports_torch(tmp_path: Path) -> None:
    write_example(tmp_path)
    program = (
        "import sys; from pathlib import Path; import weftune.report.ending, weftune.report.loggers\n"
        "from weftune.report.page import write_report; write_report(Path(sys.argv[1]))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def test_metrics_of_preferences_are_read_and_shown(tmp_path: Path) -> None:
    rewards = {"rewards/margins": 0.25, "rewards/accuracies": 0.75}
    held_out = {"eval_rewards/margins": 1.5, "eval_rewards/accuracies": 0.9}
    write_lines(tmp_path / "metrics.jsonl", [step_line(1, 0.6) | rewards])
    assert read_run(tmp_path).jobs[0].losses[0].metrics == rewards
    assert "75.0 %" in render_page(read_run(tmp_path))
    write_lines(tmp_path / "metrics.jsonl", [step_line(1, 0.6) | rewards, eval_line(1, 0.5) | held_out])
    run = read_run(tmp_path)
    assert run.jobs[0].evaluations[0].metrics == {"rewards/margins": 1.5, "rewards/accuracies": 0.9}
    page = render_page(run)
    assert "rewards/margins" in page
    assert "90.0 %" in page
