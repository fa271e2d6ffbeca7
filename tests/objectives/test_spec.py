"""The keys of `objective` in a job: the shorthand, TRL's defaults, and the record in job.yaml."""

from __future__ import annotations

from dataclasses import fields

import pytest

from weftune.errors import SpecError
from weftune.jobs.spec.spec import JobSpec, changed_keys, resolve_job
from weftune.objectives.spec import OBJECTIVES, SFT_SPEC, CpoSpec, DpoSpec, OrpoSpec

ROWS = [{"text": "a"}]


def test_a_job_is_fine_tuned_on_supervised_tokens_by_default():
    job = JobSpec(name="a", data=ROWS)
    assert job.objective == SFT_SPEC
    assert job.learning_rate == 2e-4
    assert resolve_job(job)["objective"] == "sft"


@pytest.mark.parametrize(("kind", "spec"), [("dpo", DpoSpec()), ("cpo", CpoSpec()), ("orpo", OrpoSpec())])
def test_a_name_is_short_for_the_kind_and_sets_the_default_learning_rate(kind, spec):
    job = JobSpec(name="a", data=ROWS, objective=kind)
    assert job.objective == JobSpec(name="a", data=ROWS, objective={"kind": kind}).objective == spec
    assert job.learning_rate == 1e-6
    assert JobSpec(name="a", data=ROWS, objective=kind, learning_rate=1e-5).learning_rate == 1e-5


def test_a_record_is_accepted_as_it_is_and_written_with_all_its_keys():
    job = JobSpec(name="a", data=ROWS, objective=CpoSpec(loss_type="simpo", cpo_alpha=0.0, beta=2.0))
    plain = resolve_job(job)
    assert plain["objective"] == {
        "kind": "cpo", "loss_type": "simpo", "beta": 2.0, "label_smoothing": 0.0, "cpo_alpha": 0.0,
        "simpo_gamma": 0.5,
    }  # fmt: skip
    again = JobSpec(name="a", data=ROWS, objective=plain["objective"])
    assert again.objective == job.objective
    assert changed_keys(plain, resolve_job(JobSpec(name="a", data=ROWS, objective="orpo"))) == [
        "objective.beta", "objective.cpo_alpha", "objective.kind", "objective.label_smoothing",
        "objective.loss_type", "objective.simpo_gamma",
    ]  # fmt: skip


def test_kto_needs_answers_to_several_prompts_in_a_batch_unless_it_has_no_kl_term():
    with pytest.raises(SpecError, match="batch_size: must be at least 2 for objective kto"):
        JobSpec(name="a", data=ROWS, objective="kto", batch_size=1)
    objective = {"kind": "kto", "loss_type": "apo_zero_unpaired"}
    assert JobSpec(name="a", data=ROWS, objective=objective, batch_size=1).batch_size == 1


@pytest.mark.slow
def test_keys_and_defaults_are_those_of_trl(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trl = pytest.importorskip("trl")
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.orpo import ORPOConfig

    configs = {"dpo": trl.DPOConfig, "cpo": CPOConfig, "orpo": ORPOConfig, "kto": trl.KTOConfig}
    for kind, config in configs.items():
        spec, theirs = OBJECTIVES[kind](), config(output_dir=str(tmp_path), bf16=False)
        for key in {item.name for item in fields(spec)} - {"kind"}:
            default = getattr(theirs, key)
            assert getattr(spec, key) == (default[0] if isinstance(default, list) else default)
        assert spec.learning_rate == theirs.learning_rate
