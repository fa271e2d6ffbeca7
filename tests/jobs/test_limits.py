"""No jobs file takes long to refuse, whatever stands in it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cases import is_within
from weftune.errors import SpecError
from weftune.jobs.spec.read import read_run


def listed(count: int, text: str) -> str:
    return ", ".join(text.format(number) for number in range(count))


JOBS = "".join(f"- {{name: a{number}, data: rows.jsonl}}\n" for number in range(300))
HOSTILE = {
    "lists in lists": ("base: " + "[" * 20_000, "nested too deeply"),
    "mappings in mappings": ("base: " + "{a: " * 60 + "1" + "}" * 60, "nested too deeply"),
    "lists below lists": ("- " * 9000 + "a", "nested too deeply"),
    "keys below keys": ("\n".join(" " * depth + "a:" for depth in range(190)), "nested too deeply"),
    "wide defaults of many jobs": (
        f"base: demo\ndefaults: {{adapter: {{rank_pattern: {{{listed(1000, 'k{}: 1')}}}}}}}\njobs:\n{JOBS}",
        "has 1,003 values for each of 300 jobs, and a file can hold 50,000 in all; split it",
    ),
    "aliases in defaults": (
        f"base: demo\nx: &b [{listed(1000, '1')}]\ndefaults: {{adapter: {{targets: [{listed(150, '*b')}]}}}}",
        "holds more than 50000 values once aliases are followed",
    ),
    "merged mappings": (
        f"x: &b {{{listed(500, 'k{}: 1')}}}\njobs:\n" + "- {<<: *b}\n" * 350,
        "once aliases are followed",
    ),
    "aliases of aliases": (
        "a0: &a0 1\n" + "\n".join(f"a{n}: &a{n} {{k: *a{n - 1}}}" for n in range(1, 900)),
        "once aliases are followed",
    ),
    "many unknown keys": (f"base: demo\njobs:\n- {{{listed(2000, 'k{}: 1')}}}", "is not a key of a job"),
    "a long file": ("# " + "x" * 1_000_000, "has more than 1,000,000 characters"),
    "a long number": ("base: demo\njobs: [{name: a, steps: " + "9" * 19_000 + "}]", "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_a_sentence_within_seconds(name: str, tmp_path: Path) -> None:
    text, expected = HOSTILE[name]
    (tmp_path / "jobs.yaml").write_text(text)
    (tmp_path / "rows.jsonl").touch()
    started = time.process_time()
    with pytest.raises(SpecError, match=expected):
        read_run(tmp_path / "jobs.yaml")
    assert is_within(time.process_time() - started, 8)


def test_a_list_of_plain_paths_still_knows_the_place_of_each(tmp_path: Path) -> None:
    text = "base: demo\njobs:\n- name: a\n  data:\n  - owner/name\n  - missing.jsonl\n"
    (tmp_path / "jobs.yaml").write_text(text)
    with pytest.raises(SpecError, match=r"jobs\.yaml:6 jobs\[0\]\.data\[1\]: there is no file"):
        read_run(tmp_path / "jobs.yaml")


NUMBERS = {
    "adapter.rank": [0, -1, 1e6, 10**6, 1.5],
    "adapter.alpha": [0, -1],
    "adapter.dropout": [-1, 1],
    "adapter.loraplus_lr_ratio": [0, -1],
    "adapter.d_initial": [],
    "adapter.size": [0, -1, 1e6, 10**6, 1.5],
    "adapter.sparsity": [0, -1, 1.5],
    "adapter.l0_weight": [-1],
    "adapter.relaxed": [0, -1, 1.5],
    "adapter.mask_lr_ratio": [0, -1],
    "adapter.num_virtual_tokens": [0, -1, 1e6, 10**6, 1.5],
    "adapter.svd_iterations": [-1, 1001, 1.5],
    "objective.beta": [0, -1],
    "objective.label_smoothing": [-1, 0.5],
    "objective.cpo_alpha": [-1],
    "objective.desirable_weight": [-1],
    "objective.undesirable_weight": [-1],
    "objective.simpo_gamma": [-1],
    "objective.center_rewards_coefficient": [-1],
    "adapter.projection_prng_key": [-1, 2**63, 1.5],
    "adapter.rank_pattern.q_proj": [0, -1, 1e6, 10**6],
    "adapter.alpha_pattern.q_proj": [0, -1],
    "data.limit": [0, -1],
    "data.max_length": [0, -1],
    "eval.fraction": [0, -1, 1],
    "eval.every": [0, -1],
    "eval.generate.prompts": [0, -1, 1.5],
    "eval.generate.max_new_tokens": [0, -1, 1.5],
    "epochs": [0, -1],
    "steps": [0, -1],
    "batch_size": [0, -1],
    "learning_rate": [0, -1],
    "warmup": [-1],
    "weight_decay": [-1],
    "clip": [-1],
    "seed": [-1],
    "early_stop.patience": [0, -1],
    "early_stop.min_delta": [-1],
    "save_every": [0, -1],
    "priority": [0.5],
    "eps": [0, -1],
    "sweep.trials": [0, 1.5, 1001],
    "sweep.keep": [0, 1.5],
    "sweep.halving.keep": [0, 1],
}
"""Every number of a job with what it must not be, besides what no number may be."""
NEVER = [".nan", ".inf", "-.inf", "1e400", "-1e400", "9" * 5000]


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_that_no_job_can_have_is_refused_with_its_place(key: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    *sections, last = key.split(".")
    rest = "early_stop: {patience: 1}, eval: {fraction: 0.1, every: 0.1}" if key != "eval.fraction" else ""
    for value in [*NEVER, *NUMBERS[key]]:
        inner = f"{last}: {value}"
        for section in reversed(sections):
            inner = f"{section}: {{{inner}}}"
        own = "data: {path: rows.jsonl}" if sections[:1] != ["data"] else ""
        if sections[:1] == ["eval"]:
            inner = inner.replace("eval: {", "eval: {fraction: 0.1, ") if last == "every" else inner
            rest = ""
        elif sections[:1] == ["early_stop"]:
            patience = "" if last == "patience" else "patience: 1, "
            inner, rest = (
                inner.replace("early_stop: {", f"early_stop: {{{patience}"),
                "eval: {fraction: 0.1, every: 1}",
            )
        elif sections[:1] == ["data"]:
            inner = inner.replace("data: {", "data: {path: rows.jsonl, ")
        text = ", ".join(part for part in ("name: a", own, inner, rest) if part)
        (tmp_path / "jobs.yaml").write_text(f"base: demo\njobs:\n- {{{text}}}\n")
        with pytest.raises(SpecError) as caught:
            read_run(tmp_path / "jobs.yaml")
        mistake = next(one for one in caught.value.mistakes if one.location.endswith(f"jobs[0].{key}"))
        assert "must be" in mistake.sentence or "cannot be read" in mistake.sentence, (value, mistake)


def test_every_number_of_a_job_is_tried() -> None:
    from weftune.jobs.spec.schema import BOUNDS

    wanted = {".".join(map(str, loc)).replace("*", "q_proj") for loc in BOUNDS}
    in_lists = {"data.path.q_proj.weight", "betas.q_proj", "sweep.halving.at.q_proj"}
    assert wanted - in_lists <= NUMBERS.keys() | {f"base.rope_scaling.{key}" for key in ROPE_NUMBERS}


ROPE_NUMBERS = {
    "factor": ("linear", [0.5, 0, -1, 1e7]),
    "rope_theta": ("linear", [0, -1]),
    "original_max_position_embeddings": ("yarn", [0, -1, 1.5]),
    "attention_factor": ("yarn", [0, -1]),
    "beta_fast": ("yarn", [0, -1]),
    "beta_slow": ("yarn", [0, -1]),
    "mscale": ("yarn", [0, -1]),
    "mscale_all_dim": ("yarn", [0, -1]),
    "low_freq_factor": ("llama3", [0, -1]),
    "high_freq_factor": ("llama3", [0, -1]),
}
"""Every number of a rope scaling, with a type that has it, and what it must not be."""


@pytest.mark.parametrize("key", ROPE_NUMBERS)
def test_a_number_that_no_rope_scaling_can_have_is_refused_with_its_place(key: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    rope_type, values = ROPE_NUMBERS[key]
    given = {"rope_type": rope_type, "factor": 2}
    if rope_type == "llama3":
        given |= {"low_freq_factor": 1, "high_freq_factor": 4}
    for value in [*NEVER, *values]:
        text = ", ".join(f"{name}: {own}" for name, own in {**given, key: value}.items())
        (tmp_path / "jobs.yaml").write_text(
            f"base: {{model: demo, rope_scaling: {{{text}}}}}\njobs:\n- {{name: a, data: rows.jsonl}}\n"
        )
        with pytest.raises(SpecError) as caught:
            read_run(tmp_path / "jobs.yaml")
        mistake = next(one for one in caught.value.mistakes if one.location.endswith(f"rope_scaling.{key}"))
        assert "must be" in mistake.sentence or "cannot be read" in mistake.sentence, (value, mistake)


@pytest.mark.parametrize("value", [*NEVER, "-1", "1"])
def test_a_beta_that_no_job_can_have_is_refused(value: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    for betas in (f"[{value}, 0.9]", f"[0.9, {value}]"):
        (tmp_path / "jobs.yaml").write_text(
            f"base: demo\njobs:\n- {{name: a, data: rows.jsonl, betas: {betas}}}\n"
        )
        with pytest.raises(SpecError, match=r"jobs\.yaml:3 jobs\[0\]\.betas"):
            read_run(tmp_path / "jobs.yaml")
