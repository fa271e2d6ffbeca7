"""The folder `best` of a sweep: itself the adapter's where one trial is kept, else one folder for each."""

from __future__ import annotations

from pathlib import Path

from weftune.jobs.sweeps.record import best_folder
from weftune.jobs.sweeps.running import link_winners


def winner(output: Path, name: str) -> Path:
    (output / name / "checkpoints").mkdir(parents=True)
    for file in ("adapter_config.json", "adapter_model.safetensors", "job.yaml"):
        (output / name / file).write_text(name)
    return output / name


def test_the_one_trial_that_is_kept_lies_in_best_itself(tmp_path: Path) -> None:
    sweep, first, second = tmp_path / "s", winner(tmp_path, "s-1"), winner(tmp_path, "s-2")
    sweep.mkdir()
    link_winners(sweep, [first, second], has_one_winner=False)
    assert best_folder(sweep, "s-2") == sweep / "best" / "s-2"
    link_winners(sweep, [second], has_one_winner=True)
    assert best_folder(sweep, "s-2") == sweep / "best"
    assert {path.name: path.read_text() for path in (sweep / "best").iterdir()} == {
        "adapter_config.json": "s-2",
        "adapter_model.safetensors": "s-2",
        "job.yaml": "s-2",
    }
    assert [path.name for path in sweep.iterdir()] == ["best"]
