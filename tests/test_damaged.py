"""Files of a run that a disk has damaged: what was found is said, and what can be rebuilt is."""

import random

import pytest

from tests import bench
from tests.outputs import Crash, assert_same_results, assert_whole, events_of, rich_jobs, rich_run, status
from weftune import Options
from weftune.errors import OutputError


@pytest.fixture(scope="module")
def model():
    return bench.base()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return rich_run(tmp_path_factory.mktemp("damaged") / "out")


@pytest.fixture
def crashed(tmp_path, model, undisturbed):
    """A run that broke off when both jobs had checkpoints of several steps."""
    with pytest.raises(Crash):
        events_of(tmp_path / "out", model, 28)
    return tmp_path / "out"


class Told:
    def __init__(self):
        self.notes, self.rows = [], {}

    def update(self, row):
        self.rows[row.name] = row

    def note(self, text):
        self.notes.append(text)


def resumed(output, model, **options):
    told = Told()
    results = bench.trainer(
        model, output, rich_jobs(), options=Options(resume=True, **options), view=told
    ).run()
    return {name: result.state for name, result in results.items()}, told


def flip(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def checkpoints(output, job):
    return sorted((output / job / "checkpoints").glob("step-*"))


def test_without_a_whole_checkpoint_a_job_is_paused_and_begins_anew_only_at_the_users_word(
    crashed, model, undisturbed
):
    damaged = [path.name for path in checkpoints(crashed, "drops")]
    assert damaged
    metrics = (crashed / "metrics.jsonl").read_text().count('"drops"')
    for path in checkpoints(crashed, "drops"):
        (path / "tensors.safetensors").write_bytes(b"torn")
    reached, told = resumed(crashed, model)
    assert reached == {"drops": "paused", "stops": "succeeded"}
    reason = status(crashed)["jobs"]["drops"]["reason"]
    assert reason == (
        f"none of its checkpoints is whole ({', '.join(reversed(damaged))}); put back a copy of one, "
        "or restart it with options=weftune.Options(resume=True, restart=('drops',))"
    )
    assert told.rows["drops"].reason == reason
    assert (crashed / "metrics.jsonl").read_text().count('"drops"') == metrics, "its curve is kept"
    reached, _ = resumed(crashed, model)
    assert reached["drops"] == "paused", "still"
    assert resumed(crashed, model, restart=("drops",))[0]["drops"] == "succeeded"
    assert_whole(crashed)
    assert_same_results(crashed, undisturbed[0])


def test_checkpoints_that_are_gone_are_no_reason_to_begin_anew_either(crashed, model):
    (crashed / "drops" / "checkpoints").rename(crashed.parent / "elsewhere")
    assert resumed(crashed, model)[0]["drops"] == "paused"
    assert "its checkpoints are gone; put back a copy" in status(crashed)["jobs"]["drops"]["reason"]
    (crashed.parent / "elsewhere").rename(crashed / "drops" / "checkpoints")
    assert resumed(crashed, model)[0]["drops"] == "succeeded"


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_is_used(crashed, model, undisturbed):
    *_, before, newest = checkpoints(crashed, "drops")
    flip(newest / "tensors.safetensors", random.Random(1))
    reached, told = resumed(crashed, model)
    assert reached["drops"] == "succeeded"
    (said,) = [note for note in told.notes if "damaged" in note]
    step = int(before.name.removeprefix("step-"))
    assert said == (
        f"drops: damaged checkpoints are left aside ({newest.name}); it resumes from step {step}."
    )
    assert_whole(crashed)
    assert_same_results(crashed, undisturbed[0])


def test_a_status_with_a_flipped_bit_is_said_and_rebuilt_and_the_jobs_go_on(crashed, model, undisturbed):
    (crashed / "status.json").write_text((crashed / "status.json").read_text().replace('"drops"', '"drips"'))
    reached, told = resumed(crashed, model)
    assert set(reached.values()) == {"succeeded"}
    assert any("status.json was damaged (it does not match its checksum)" in note for note in told.notes)
    assert_whole(crashed)
    assert_same_results(crashed, undisturbed[0])


def test_a_damaged_job_file_is_said_and_its_copy_is_used(crashed, model, undisturbed):
    (crashed / "drops" / "job.yaml").write_bytes(b"job: [\xff")
    reached, told = resumed(crashed, model)
    assert set(reached.values()) == {"succeeded"}
    assert any("job.yaml was damaged; it is written again from its copy" in note for note in told.notes)
    assert_same_results(crashed, undisturbed[0])


def test_a_job_file_that_is_damaged_with_its_copy_is_a_sentence_with_the_remedy(crashed, model):
    for folder in (crashed / "drops", crashed / "drops" / "checkpoints"):
        (folder / "job.yaml").write_bytes(b"job: [\xff")
    with pytest.raises(
        OutputError, match=r"job.yaml cannot be used .* restart it with .*restart=\('drops',\)"
    ):
        resumed(crashed, model)
    assert resumed(crashed, model, restart=("drops",))[0]["drops"] == "succeeded"
