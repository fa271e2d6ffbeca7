"""Jobs that the base, or another job of the run, does not fit: refused or warned of before training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from weftune.adapters.target import FromJob
from weftune.base.spec import BaseSpec, RopeScaling
from weftune.core.shapes import ModelShape, SiteShape
from weftune.errors import SpecError
from weftune.jobs.spec.checks import (
    check_lengths,
    check_names,
    check_starts,
    check_targets,
    data_warnings,
    merge_repeated_sentences,
    warnings,
)
from weftune.jobs.spec.read import parse_run, read_run
from weftune.jobs.spec.spec import JobSpec, changed_keys, resolve_job

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
    assert mistake.location == "job a adapter.targets[1]"
    assert '"vproj" matches no module of the base; did you mean v_proj?' in mistake.sentence
    assert "q_proj, v_proj, up_proj" in mistake.sentence


def test_a_regular_expression_must_match_a_whole_path() -> None:
    (mistake,) = check_targets([job(targets="q_proj")], SHAPE)
    assert mistake.location == "job a adapter.targets"
    assert "write a list: [q_proj]" in mistake.sentence
    (mistake,) = check_targets([job(targets="q_proj,v_proj")], SHAPE)
    assert "write a list: [q_proj, v_proj]" in mistake.sentence
    (mistake,) = check_targets([job(targets="up_proj, v_proj, q_proj")], SHAPE)
    assert "write a list: [up_proj, v_proj, q_proj]" in mistake.sentence
    (mistake,) = check_targets([job(targets=r"transformer\..*")], SHAPE)
    assert "its modules end in q_proj, v_proj, up_proj" in mistake.sentence


def test_a_target_of_a_file_is_placed_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text("base: demo\njobs:\n- name: a\n  data: owner/rows\n  adapter: {targets: [lm_head]}\n")
    run = read_run(file)
    (mistake,) = check_targets(run.jobs, SHAPE, run.locate)
    assert mistake.location == "jobs.yaml:5 jobs[0].adapter.targets[0]"


def test_what_may_not_be_meant_is_a_warning() -> None:
    assert warnings([job(rank=8)], SHAPE) == []
    (wide,) = warnings([job(rank=16)], SHAPE)
    assert wide.startswith("a: rank 16 is over the width 8 of model.layers.0.self_attn.v_proj and 1 more")
    (patterned,) = warnings([job(rank=4, rank_pattern={"q_proj": 8})], SHAPE)
    assert "weftune export --portable" in patterned
    stray, _ = warnings([job(rank=4, targets=["q_proj"], alpha_pattern={"v_proj": 8})], SHAPE)
    assert stray == 'a: alpha_pattern "v_proj" matches none of the job\'s targets'
    prompt = JobSpec(
        name="a",
        data={"path": "owner/rows", "max_length": 512},
        adapter={"kind": "prompt", "num_virtual_tokens": 12},
    )
    long = warnings([prompt], SHAPE)[-1]
    assert "max_length 512 is over the 500 that virtual tokens leave of the base's context of 512" in long


def test_a_max_length_over_the_context_is_told_once_for_all_jobs_at_one_place(tmp_path: Path) -> None:
    base, scalable = BaseSpec(model="x"), replace(SHAPE, unscaled_context=512)
    assert check_lengths([job(max_length=512), JobSpec(name="b", data="owner/rows")], SHAPE, base) == []
    jobs = [{"name": "a"}, {"name": "b"}]
    run = parse_run(
        {"base": "x/y", "jobs": jobs, "defaults": {"data": {"path": "o/r", "max_length": 513}}}, tmp_path
    )
    (mistake,) = check_lengths(run.jobs, scalable, base, run.locate)
    assert str(mistake) == (
        "defaults.data.max_length: max_length 513 of a, b is over the base's context of 512 tokens; write "
        "512 or less, or extend it with `rope_scaling: {rope_type: yarn, factor: 2}` under `base:`"
    )
    (learned,) = check_lengths(run.jobs[:1], SHAPE, base)
    assert learned.sentence.endswith("choose another base, for the positions of this one cannot be scaled")
    scaled = replace(base, rope_scaling=RopeScaling(rope_type="linear", factor=1.0))
    (larger,) = check_lengths(run.jobs[:1], scalable, scaled)
    assert larger.sentence.endswith("write 512 or less, or raise base.rope_scaling.factor to 2")


def test_a_learning_rate_that_nothing_trains_with_is_a_warning_before_the_run() -> None:
    (high,) = warnings([with_keys(learning_rate=50.0)], SHAPE)
    assert high.startswith("a: learning_rate 50 is far above what adapters train with")
    assert warnings([with_keys(learning_rate=0.1, weight_decay=1.0)], SHAPE) == []
    assert len(warnings([with_keys(learning_rate=0.5)], SHAPE)) == 1
    (decay,) = warnings([with_keys(weight_decay=1.5)], SHAPE)
    assert decay.startswith("a: weight_decay 1.5 is far above")


def test_an_evaluation_on_the_training_rows_is_a_warning() -> None:
    (warning,) = data_warnings(with_keys(batch_size=16), samples=16, steps=5, evaluates_trained_rows=True)
    assert warning.startswith("every row of its evaluation is also a training row")


def test_a_batch_over_the_data_and_a_warmup_over_the_run_are_warnings() -> None:
    one = with_keys(batch_size=16)
    assert list(data_warnings(one, samples=16, steps=5)) == []
    (batch,) = data_warnings(one, samples=15, steps=5)
    assert batch.startswith("batch_size 16 is over the number of its training samples, 15")
    (warmup,) = data_warnings(with_keys(batch_size=16, warmup=5), samples=16, steps=5)
    assert warmup.startswith("warmup takes 5 of its 5 steps")
    assert list(data_warnings(with_keys(batch_size=16, warmup=4), samples=16, steps=5)) == []
    assert len(list(data_warnings(with_keys(batch_size=16, warmup=2), samples=16, steps=2))) == 1
    assert list(data_warnings(with_keys(batch_size=16, warmup=1), samples=16, steps=1)) == [], (
        "one step is all"
    )


def test_what_holds_for_many_jobs_is_told_once() -> None:
    same = [(name, "it is so") for name in "abcdefg"]
    assert merge_repeated_sentences([*same, ("h", "it is not")]) == [
        "a, b, c, d and 3 more: it is so",
        "h: it is not",
    ]
    assert merge_repeated_sentences((name, "it is so") for name in "abcdef") == [
        "a, b, c, d and 2 more: it is so"
    ]
    assert merge_repeated_sentences((name, "it is so") for name in "abcde") == ["a, b, c, d, e: it is so"]
    assert merge_repeated_sentences([("a", "it is so"), ("a", "it is so")]) == ["a: it is so"]


def test_a_rank_over_one_width_names_that_module_and_counts_no_other() -> None:
    (wide,) = warnings([job(rank=16, targets=r".*\.1\..*(v|q)_proj")], SHAPE)
    assert wide == (
        "a: rank 16 is over the width 8 of model.layers.1.self_attn.v_proj; the ranks above it add nothing"
    )


def test_the_narrowest_of_the_modules_that_are_too_narrow_is_named() -> None:
    (wide,) = warnings([job(rank=64)], SHAPE)
    assert "rank 64 is over the width 8 of model.layers.0.self_attn.v_proj and 5 more" in wide


def test_an_expression_that_takes_too_long_is_a_mistake_and_the_only_one_of_its_job() -> None:
    slow = JobSpec(name="a", data="owner/rows", adapter={"targets": "zzz|(model.)+q"})
    object.__setattr__(slow.adapter, "targets", "(.*.*)*x")
    object.__setattr__(slow.adapter, "rank_pattern", {"q_proj": 2, "(.*.*)*y": 4})
    mistakes = check_targets([slow, job(targets=["no"])], SHAPE)
    assert [mistake.location for mistake in mistakes] == [
        "job a adapter.targets",
        "job a adapter.rank_pattern.(.*.*)*y",
        "job a adapter.targets[0]",
    ]
    assert "is a regular expression that" in mistakes[0].sentence


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """An adapter that was trained with a scale of 2, of 4 at up_proj."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "alpha_pattern": {"up_proj": 16}}))
    (tmp_path / "adapter_model.safetensors").touch()
    return tmp_path


def test_a_start_at_another_scale_is_a_warning_at_the_first_module_where_it_differs(before: Path) -> None:
    alike = {"rank": 4, "alpha": 8, "targets": ["q_proj", "up_proj"], "init_from": str(before)}
    both = warnings([job(**alike)], SHAPE)
    assert len(both) == 1
    assert both[0].startswith(
        "a: its scale at model.layers.0.mlp.up_proj is 2, but init_from was trained with 4; to continue from"
    )
    same = warnings([job(**alike, alpha_pattern={"up_proj": 16})], SHAPE)
    assert [one for one in same if "scale" in one] == []


def test_a_start_whose_patterns_take_long_on_the_names_of_this_base_is_not_tried(before: Path) -> None:
    config = json.loads((before / "adapter_config.json").read_text())
    config["alpha_pattern"] = {"(z*z*z*z*)*!": 16}
    (before / "adapter_config.json").write_text(json.dumps(config))
    shape = replace(SHAPE, sites=(SiteShape("model.zzzzzzzzzzz", 32, 32),))
    assert warnings([job(rank=4, init_from=str(before))], shape) == []


def test_a_start_that_cannot_be_read_is_left_to_those_who_refuse_it(before: Path) -> None:
    (before / "adapter_config.json").write_text("{")
    assert warnings([job(rank=4, init_from=str(before))], SHAPE) == []


MIXED = replace(
    SHAPE,
    sites=tuple(
        site
        for layer in range(2)
        for site in (
            SiteShape(f"model.layers.{layer}.self_attn.q_proj", 32, 32),
            SiteShape(f"model.layers.{layer}.mlp.experts.gate_up_proj", 32, 48, experts=4, active_matrices=2),
            SiteShape(f"model.layers.{layer}.mlp.experts.down_proj", 24, 32, experts=4, active_matrices=2),
        )
    ),
)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def test_experts_have_an_adapter_only_where_parameters_are_named() -> None:
    for adapter, wanted in [
        (job().adapter, []),
        (job(targets=r".*_proj").adapter, []),
        (job(target_parameters=EXPERTS).adapter, ["gate_up_proj", "down_proj"]),
        (job(targets=[], target_parameters=["down_proj"]).adapter, ["down_proj"]),
    ]:
        found = [site.name for site in MIXED.sites if site.experts and adapter.adapts(site)]
        assert found == [f"model.layers.{layer}.mlp.experts.{name}" for layer in range(2) for name in wanted]


def test_parameters_that_no_experts_have_are_mistakes() -> None:
    assert check_targets([job(target_parameters=EXPERTS)], MIXED) == []
    (mistake,) = check_targets([job(target_parameters=[EXPERTS[0], "mlp.gate.weight"])], MIXED)
    assert mistake.location == "job a adapter.target_parameters[1]"
    assert '"mlp.gate.weight" matches no parameter of the base\'s experts; write target' in mistake.sentence
    (mistake,) = check_targets([job(target_parameters=["mlp.experts.down_proj"])], SHAPE)
    assert "asks for experts, which the base has none of; leave it out" in mistake.sentence


def test_modules_that_are_experts_are_answered_with_their_parameters() -> None:
    (mistake,) = check_targets([job(targets=["q_proj", "down_proj"])], MIXED)
    wanted = "for its experts write target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]"
    assert mistake.sentence.endswith(wanted)
    (mistake,) = check_targets([job(targets=["k_proj"], target_parameters=EXPERTS)], MIXED)
    assert '"k_proj" matches no module of the base' in mistake.sentence


def test_what_vllm_does_not_load_is_said_when_the_job_is_read() -> None:
    (sentence,) = warnings([job(target_parameters=EXPERTS)], MIXED)
    stored = "vLLM does not load adapters on experts as PEFT stores them"
    assert sentence == f"a: {stored}; to serve it there, run weftune export --merged"
    assert warnings([job()], MIXED) == []


def starting(name: str, source: str = "", **adapter: object) -> JobSpec:
    start = {"init_from": {"job": source}} if source else {}
    data = {"path": "owner/rows", "max_length": 128}
    return JobSpec(name=name, data=data, adapter={"rank": 4, **adapter, **start})


def refused(folder: Path, jobs: str, shape: ModelShape | None = None) -> list[tuple[str, str]]:
    path = folder / "jobs.yaml"
    path.write_text(f"base: demo\ndefaults: {{data: owner/rows}}\njobs:\n{jobs}")
    with pytest.raises(SpecError) as caught:
        read_run(path, lambda _: shape)
    return [(mistake.location, mistake.sentence) for mistake in caught.value.mistakes]


def test_a_job_may_name_one_that_stands_behind_it_or_in_front_of_it(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "base: demo\ndefaults: {data: owner/rows}\n"
        "jobs: [{name: b, adapter: {init_from: {job: a}}}, {name: a}, "
        "{name: c, adapter: {init_from: {job: b}}}]\n"
    )
    run = read_run(path, lambda _: SHAPE)
    assert [one.adapter.init_from for one in run.jobs] == [FromJob("a"), None, FromJob("b")]


def test_from_python_it_is_a_mapping_or_the_record_and_is_kept_as_written() -> None:
    assert starting("b", "a").adapter.init_from == FromJob("a")
    again = JobSpec(name="b", data="owner/rows", adapter=starting("b", "a").adapter)
    assert again.adapter.init_from == FromJob("a")
    assert resolve_job(again)["adapter"]["init_from"] == {"job": "a"}
    assert changed_keys(resolve_job(starting("b", "a")), resolve_job(starting("b", "c"))) == [
        "adapter.init_from.job"
    ]
    assert changed_keys(resolve_job(starting("b", "a")), resolve_job(starting("b"))) == ["adapter.init_from"]
    run = parse_run(
        {"base": "demo", "jobs": [{"name": "a", "data": "o/r", "adapter": {"init_from": {"job": "b"}}},
                                  {"name": "b", "data": "o/r"}]},
        Path.cwd(),
    )  # fmt: skip
    assert run.jobs[0].adapter.init_from == FromJob("b")


def test_a_name_that_no_job_has_is_told_with_the_nearest(tmp_path: Path) -> None:
    found = refused(
        tmp_path,
        "  - {name: support}\n  - name: late\n    adapter: {init_from: {job: suport}}\n"
        "  - name: other\n    adapter: {init_from: {job: nobody}}\n",
    )
    assert found == [
        (
            "jobs.yaml:6 jobs[1].adapter.init_from.job",
            'there is no job "suport" in this run; did you mean support?',
        ),
        (
            "jobs.yaml:8 jobs[2].adapter.init_from.job",
            'there is no job "nobody" in this run; its other jobs are support, late',
        ),
    ]


def test_a_job_that_starts_from_itself_is_refused_also_by_defaults(tmp_path: Path) -> None:
    ((place, sentence),) = refused(tmp_path, "  - {name: a, adapter: {init_from: {job: a}}}\n")
    assert place == "jobs.yaml:4 jobs[0].adapter.init_from.job"
    assert sentence == "a job cannot start from itself; name another, or write init_from: null"


def test_nobody_starts_from_a_sweep_or_a_trial_whose_adapter_may_never_be(tmp_path: Path) -> None:
    swept = "eval: {fraction: 0.1}, sweep: {over: {adapter.rank: [8, 16]}}"
    found = refused(
        tmp_path,
        f"  - {{name: a, {swept}}}\n  - {{name: b, adapter: {{init_from: {{job: a}}}}}}\n"
        f"  - {{name: c, adapter: {{init_from: {{job: a-r16}}}}}}\n"
        f"  - {{name: d, adapter: {{init_from: {{job: d}}}}, {swept}}}\n",
    )
    mend = "in a later run write the path of a folder in {}/best as init_from"
    whole = "is a sweep, whose best adapter is known at its end only"
    assert found == [
        ("jobs.yaml:5 jobs[1].adapter.init_from.job", f"a {whole}; {mend.format('a')}"),
        (
            "jobs.yaml:6 jobs[2].adapter.init_from.job",
            f"a-r16 is a trial of the sweep a and may leave without an adapter; {mend.format('a')}",
        ),
        ("jobs.yaml:7 jobs[3].adapter.init_from.job", f"d {whole}; {mend.format('d')}"),
    ]


def test_a_cycle_is_told_once_with_all_who_are_in_it(tmp_path: Path) -> None:
    ((place, sentence),) = refused(
        tmp_path,
        "  - {name: d, adapter: {init_from: {job: a}}}\n  - {name: a, adapter: {init_from: {job: b}}}\n"
        "  - {name: b, adapter: {init_from: {job: c}}}\n  - {name: c, adapter: {init_from: {job: a}}}\n",
    )
    assert place == "jobs.yaml:5 jobs[1].adapter.init_from.job"
    assert sentence == (
        "jobs wait for each other in a cycle, a from b from c from a; let one of them start from a folder"
    )


@pytest.mark.parametrize(
    ("written", "place", "sentence"),
    [
        ("{}", "adapter.init_from", "needs job: the name of another job"),
        ("{job: 7}", "adapter.init_from.job", "must be text, got 7; write it in quotes"),
        ("{jbo: b}", "adapter.init_from.jbo", "is not a key of init_from; did you mean job?"),
        ("[b]", "adapter.init_from[0]", 'there is no folder "b"'),
        ("7", "adapter.init_from", "must be an adapter folder, or {job: NAME} for the adapter of another"),
    ],
)
def test_whatever_else_is_written_there_is_refused_at_its_place(
    tmp_path: Path, written: str, place: str, sentence: str
) -> None:
    found = refused(tmp_path, f"  - {{name: a, adapter: {{init_from: {written}}}}}\n  - {{name: b}}\n")
    assert any(where == f"jobs.yaml:4 jobs[0].{place}" and sentence in told for where, told in found), found


def test_other_sites_or_ranks_are_refused_when_the_file_is_read_as_those_of_a_folder_are(
    tmp_path: Path,
) -> None:
    ((place, sentence),) = refused(
        tmp_path,
        "  - {name: a, adapter: {rank: 8}}\n  - {name: b, adapter: {rank: 4, init_from: {job: a}}}\n",
        SHAPE,
    )
    assert place == "jobs.yaml:5 jobs[1].adapter.init_from.job"
    assert sentence == (
        "a has rank 8 at model.layers.0.self_attn.q_proj, the job asks for 4; set adapter.rank and "
        "adapter.rank_pattern as a has them"
    )
    (mistake,) = check_starts(
        [starting("a", targets=["q_proj"]), starting("b", "a", targets=["v_proj"])], SHAPE
    )
    assert mistake.location == "job b adapter.init_from.job"
    assert mistake.sentence == (
        "a and this job do not adapt the same sites: only a does model.layers.0.self_attn.q_proj, and 3 more "
        "differ; set adapter.targets as a has it"
    )
    pattern = {"rank_pattern": {"q_proj": 8}}
    assert len(check_starts([starting("a", **pattern), starting("b", "a")], SHAPE)) == 1
    assert check_starts([starting("a", **pattern), starting("b", "a", **pattern)], SHAPE) == []
    assert check_starts([starting("a", dropout=0.1), starting("b", "a", targets=r".*_proj")], SHAPE) == []


def test_in_python_the_job_is_named() -> None:
    (mistake,) = check_names([starting("b", "a")], ["b"])
    assert (mistake.location, mistake.sentence) == (
        "job b adapter.init_from.job",
        'there is no job "a" in this run; for a folder write its path as init_from',
    )


def test_another_scale_than_its_source_has_is_warned_about() -> None:
    (told,) = warnings([starting("a", alpha=8.0), starting("b", "a", alpha=16.0)], SHAPE)
    assert told.startswith(
        "b: its scale at model.layers.0.self_attn.q_proj is 4, but init_from was trained with 2;"
    )
    assert warnings([starting("a"), starting("b", "a")], SHAPE) == []
