"""A run tells how its wall time was spent, from the command line and from Python."""

import json
import time

import pytest

from tests import bench
from tests.outputs import FOUR_JOBS, jobs_folder
from weftune import JobSpec
from weftune.core.clock import Phase, current_clock
from weftune.data.spec import DataSpec
from weftune.report.read import read_wall_times


class Listener:
    def __init__(self):
        self.notes = []

    def update(self, row):
        pass

    def note(self, text):
        self.notes.append(text)


def jobs(count=2):
    data = DataSpec(rows=bench.rows(bench.samples(8)))
    return [JobSpec(name=f"j{at}", data=data, steps=3, batch_size=2, save_every=1) for at in range(count)]


@pytest.mark.timed
def test_the_phases_of_a_run_from_python_are_its_wall_time(tmp_path):
    view = Listener()
    began = time.monotonic()
    trainer = bench.trainer(bench.base(), tmp_path / "out", jobs(), view=view)
    trainer.run()
    taken = time.monotonic() - began
    (wall,) = read_wall_times(tmp_path / "out")
    assert sum(wall.phases.values()) == pytest.approx(wall.seconds, abs=0.01)
    assert wall.seconds == pytest.approx(taken, abs=0.5)
    used = {phase for phase, seconds in wall.phases.items() if seconds > 0}
    assert {Phase.TOKENISING, Phase.TRAINING, Phase.SAVING, Phase.EXPORT, Phase.REPORT} <= used
    (told,) = [note for note in view.notes if note.startswith("Wall time")]
    assert "training" in told
    assert "until this page was drawn" in (tmp_path / "out" / "report.html").read_text()
    assert current_clock() is None


def test_a_callback_is_not_training(tmp_path):
    trainer = bench.trainer(bench.base(), tmp_path / "out", jobs(1))
    trainer.run(lambda event: time.sleep(0.05))
    (wall,) = read_wall_times(tmp_path / "out")
    assert wall.phases[Phase.OTHER] >= 0.15


def test_the_command_tells_it_in_its_last_line_and_a_resumed_run_beside_the_first(tmp_path, forks):
    folder = jobs_folder(tmp_path, FOUR_JOBS[:2])
    assert forks.weftune("train", "jobs.yaml", "--output", "out", cwd=folder) == 0
    *_, last = (folder / "log").read_text().splitlines()
    assert last.startswith("Wall time ")
    assert ", training " in last
    assert forks.weftune("train", "jobs.yaml", "--output", "out", "--resume", cwd=folder) == 0
    runs = json.loads((folder / "out" / "wall.json").read_text())["runs"]
    assert len(runs) == 2
    assert runs[0]["phases"]["training"] > 0
    assert runs[1]["phases"]["training"] == 0
