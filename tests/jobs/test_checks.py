from __future__ import annotations

from pathlib import Path

from weftune.core.shapes import ModelShape, SiteShape
from weftune.jobs.checks import check_targets, data_warnings, told_once, warnings
from weftune.jobs.read import read_run
from weftune.jobs.spec import JobSpec

SHAPE = ModelShape(
    layers=2,
    hidden=32,
    vocabulary=100,
    parameters=1000,
    bytes_per_value=4,
    sites=tuple(
        SiteShape(f"model.layers.{layer}.{name}", 32, width)
        for layer in range(2)
        for name, width in (("self_attn.q_proj", 32), ("self_attn.v_proj", 8), ("mlp.up_proj", 96))
    ),
    context=512,
)


def job(max_length: int = 128, **adapter: object) -> JobSpec:
    return JobSpec(name="a", data={"path": "owner/rows", "max_length": max_length}, adapter=adapter)


def with_keys(**keys: object) -> JobSpec:
    return JobSpec(name="a", data={"path": "owner/rows", "max_length": 128}, adapter={"rank": 4}, **keys)


def test_targets_that_all_match_are_no_mistake() -> None:
    jobs = [job(), job(targets=["q_proj", "mlp.up_proj"]), job(targets=r".*\.1\..*(q|v)_proj")]
    assert check_targets(jobs, SHAPE) == []


def test_every_entry_of_a_target_list_must_match() -> None:
    (mistake,) = check_targets([job(targets=["q_proj", "vproj"])], SHAPE)
    assert mistake.place == "job a adapter.targets[1]"
    assert '"vproj" matches no module of the base; did you mean v_proj?' in mistake.sentence
    assert "q_proj, v_proj, up_proj" in mistake.sentence


def test_a_regular_expression_must_match_a_whole_path() -> None:
    (mistake,) = check_targets([job(targets="q_proj")], SHAPE)
    assert mistake.place == "job a adapter.targets"
    assert "write a list: [q_proj]" in mistake.sentence
    (mistake,) = check_targets([job(targets="q_proj,v_proj")], SHAPE)
    assert "write a list: [q_proj, v_proj]" in mistake.sentence
    (mistake,) = check_targets([job(targets=r"transformer\..*")], SHAPE)
    assert "its modules end in q_proj, v_proj, up_proj" in mistake.sentence


def test_a_target_of_a_file_is_placed_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text("base: demo\njobs:\n- name: a\n  data: owner/rows\n  adapter: {targets: [lm_head]}\n")
    run = read_run(file)
    (mistake,) = check_targets(run.jobs, SHAPE, run.place)
    assert mistake.place == "jobs.yaml:5 jobs[0].adapter.targets[0]"


def test_what_may_not_be_meant_is_a_warning() -> None:
    assert warnings([job(rank=8)], SHAPE) == []
    (wide,) = warnings([job(rank=16)], SHAPE)
    assert wide.startswith("a: rank 16 is over the width 8 of model.layers.0.self_attn.v_proj and 1 more")
    (patterned,) = warnings([job(rank=4, rank_pattern={"q_proj": 8})], SHAPE)
    assert "weftune export --portable" in patterned
    stray, _ = warnings([job(rank=4, targets=["q_proj"], alpha_pattern={"v_proj": 8})], SHAPE)
    assert stray == 'a: alpha_pattern "v_proj" matches none of the job\'s targets'
    (long,) = warnings([job(rank=4, max_length=513)], SHAPE)
    assert "max_length 513 is over the base's context of 512 tokens" in long


def test_a_learning_rate_that_nothing_trains_with_is_a_warning_before_the_run() -> None:
    (high,) = warnings([with_keys(learning_rate=50.0)], SHAPE)
    assert high.startswith("a: learning_rate 50 is far above what adapters train with")
    assert warnings([with_keys(learning_rate=0.1)], SHAPE) == []
    (decay,) = warnings([with_keys(weight_decay=10.0)], SHAPE)
    assert decay.startswith("a: weight_decay 10 is far above")


def test_a_batch_over_the_data_and_a_warmup_over_the_run_are_warnings() -> None:
    one = with_keys(batch_size=16)
    assert list(data_warnings(one, samples=16, steps=5)) == []
    (batch,) = data_warnings(one, samples=15, steps=5)
    assert batch.startswith("batch_size 16 is over the number of its training samples, 15")
    (warmup,) = data_warnings(with_keys(batch_size=16, warmup=5), samples=16, steps=5)
    assert warmup.startswith("warmup takes 5 of its 5 steps")


def test_what_holds_for_many_jobs_is_told_once() -> None:
    same = [(name, "it is so") for name in "abcdefg"]
    assert told_once([*same, ("h", "it is not")]) == ["a, b, c, d and 3 more: it is so", "h: it is not"]
