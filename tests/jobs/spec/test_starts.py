"""`init_from: {job: NAME}` is refused where nobody could start from that job, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.spec.test_checks import SHAPE
from weftune.adapters.start import FromJob
from weftune.core.shapes import ModelShape
from weftune.errors import SpecError
from weftune.jobs.spec.checks import warnings
from weftune.jobs.spec.read import parse_run, read_run
from weftune.jobs.spec.spec import JobSpec, changed_keys, resolved
from weftune.jobs.spec.starts import check_names, check_starts


def job(name: str, source: str = "", **adapter: object) -> JobSpec:
    start = {"init_from": {"job": source}} if source else {}
    data = {"path": "owner/rows", "max_length": 128}
    return JobSpec(name=name, data=data, adapter={"rank": 4, **adapter, **start})


def refused(folder: Path, jobs: str, shape: ModelShape | None = None) -> list[tuple[str, str]]:
    path = folder / "jobs.yaml"
    path.write_text(f"base: demo\ndefaults: {{data: owner/rows}}\njobs:\n{jobs}")
    with pytest.raises(SpecError) as caught:
        read_run(path, lambda _: shape)
    return [(mistake.place, mistake.sentence) for mistake in caught.value.mistakes]


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
    assert job("b", "a").adapter.init_from == FromJob("a")
    again = JobSpec(name="b", data="owner/rows", adapter=job("b", "a").adapter)
    assert again.adapter.init_from == FromJob("a")
    assert resolved(again)["adapter"]["init_from"] == {"job": "a"}
    assert changed_keys(resolved(job("b", "a")), resolved(job("b", "c"))) == ["adapter.init_from.job"]
    assert changed_keys(resolved(job("b", "a")), resolved(job("b"))) == ["adapter.init_from"]
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


def test_a_circle_is_told_once_with_all_who_are_in_it(tmp_path: Path) -> None:
    ((place, sentence),) = refused(
        tmp_path,
        "  - {name: d, adapter: {init_from: {job: a}}}\n  - {name: a, adapter: {init_from: {job: b}}}\n"
        "  - {name: b, adapter: {init_from: {job: c}}}\n  - {name: c, adapter: {init_from: {job: a}}}\n",
    )
    assert place == "jobs.yaml:5 jobs[1].adapter.init_from.job"
    assert sentence == (
        "jobs wait for each other in a circle, a from b from c from a; let one of them start from a folder"
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
    (mistake,) = check_starts([job("a", targets=["q_proj"]), job("b", "a", targets=["v_proj"])], SHAPE)
    assert mistake.place == "job b adapter.init_from.job"
    assert mistake.sentence == (
        "a and this job do not adapt the same sites: only a does model.layers.0.self_attn.q_proj, and 3 more "
        "differ; set adapter.targets as a has it"
    )
    pattern = {"rank_pattern": {"q_proj": 8}}
    assert len(check_starts([job("a", **pattern), job("b", "a")], SHAPE)) == 1
    assert check_starts([job("a", **pattern), job("b", "a", **pattern)], SHAPE) == []
    assert check_starts([job("a", dropout=0.1), job("b", "a", targets=r".*_proj")], SHAPE) == []


def test_in_python_the_job_is_named() -> None:
    (mistake,) = check_names([job("b", "a")], ["b"])
    assert (mistake.place, mistake.sentence) == (
        "job b adapter.init_from.job",
        'there is no job "a" in this run; for a folder write its path as init_from',
    )


def test_another_scale_than_its_source_has_is_warned_about() -> None:
    (told,) = warnings([job("a", alpha=8.0), job("b", "a", alpha=16.0)], SHAPE)
    assert told.startswith(
        "b: its scale at model.layers.0.self_attn.q_proj is 4, but init_from was trained with 2;"
    )
    assert warnings([job("a"), job("b", "a")], SHAPE) == []
