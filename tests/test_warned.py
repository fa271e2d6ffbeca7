"""What preview warns of, training says as well, once."""

from __future__ import annotations

from pathlib import Path

from tests import bench
from weftune import JobSpec
from weftune.cli.preview import collect_warnings, prepare_all
from weftune.jobs.sweeps.spec import Halving, Sweep, SweepSpec, Trial


class Heard:
    """A view that keeps every sentence."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def update(self, row: object) -> None:
        pass

    def sweep(self, record: object) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_training_says_once_what_preview_warns_of(tmp_path: Path) -> None:
    rows = bench.rows(bench.samples(5, longest=24))
    keys = dict(steps=1, batch_size=6, learning_rate=50.0, adapter={"rank": 2}, data={"rows": rows})
    keys["data"]["max_length"] = 10
    jobs = [JobSpec(name=name, **keys) for name in "ab"]
    base, heard = bench.base(), Heard()
    shown = prepare_all(jobs, bench.tokenizer(), base.shape.context)
    expected = [f"warning: {sentence}" for sentence in collect_warnings(jobs, shown, base.shape)]
    expected += [f"note: a, b: {note}" for one in shown for note in one.prepared.notes]
    assert [sentence.split()[3] for sentence in expected[:-1]] == ["learning_rate", "batch_size"]
    assert "truncated to 10 tokens" in expected[-1]

    bench.trainer(base, tmp_path / "out", jobs, view=heard).run()
    assert [note for note in heard.notes if note.startswith(("warning", "note"))] == expected


def test_training_and_preview_warn_of_a_sweeps_rung_within_the_warm_up(tmp_path: Path) -> None:
    keys = dict(data=bench.rows(bench.samples(40)), steps=4, warmup=2, eval={"fraction": 0.5})
    jobs = [JobSpec(name=f"s-{rank}", adapter={"rank": rank}, **keys) for rank in (2, 3)]
    spec = SweepSpec(over={"adapter.rank": (2, 3)}, halving=Halving((0.5,), 0.5))
    sweep = Sweep("s", spec, tuple(Trial(job.name, {}) for job in jobs))
    base, heard = bench.base(), Heard()
    shown = prepare_all(jobs, bench.tokenizer(), base.shape.context)
    found = collect_warnings(jobs, shown, base.shape, [sweep])
    assert len(found) == 1
    assert found[0].startswith("s: sweep.halving.at: the first rung is at step 2, and trials warm up until")

    bench.trainer(base, tmp_path / "out", jobs, view=heard).add_sweep(sweep).run()
    assert [note for note in heard.notes if note.startswith("warning: s: ")] == [f"warning: {found[0]}"]
