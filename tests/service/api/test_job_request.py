"""Keys of a request that would let a client name something of the server are refused before they are read."""

from __future__ import annotations

import pytest

from weftune.jobs.spec.keys import SECTIONS
from weftune.service.api.errors import ApiError
from weftune.service.api.job_request import REFUSED_KEYS, job_keys
from weftune.service.api.schemas import JobRequest

NAMING = {
    "adapter": {"init_from": "/etc"},
    "eval": {"path": "/etc/passwd"},
}
"""Maps each section to its keys that name files, folders or code, with a harmful value."""


def request(extension: dict[str, object]) -> JobRequest:
    return JobRequest(model="demo", training_file="file-a", weftune=extension)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("section", "key"), [(section, key) for section, values in NAMING.items() for key in values]
)
def test_a_key_that_names_something_of_the_server_is_refused(section, key, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    own = request({section: {key: NAMING[section][key]}})
    with pytest.raises(ApiError) as refused:
        job_keys(own, "job", 1, str(tmp_path / "rows.jsonl"))
    assert refused.value.status_code == 400
    assert refused.value.param == f"weftune.{section}.{key}"
    assert key in REFUSED_KEYS[section]


def test_every_key_of_a_section_is_known_to_be_a_value_or_refused():
    """A new key of jobs.yaml has to be judged here before clients may send it."""
    values = {
        # Of metrics, only the names are taken that the operator has registered.
        "eval": {"fraction", "every", "generate", "metric"},
        "objective": {
            "kind", "beta", "loss_type", "label_smoothing", "cpo_alpha", "simpo_gamma",
            "desirable_weight", "undesirable_weight", "center_rewards_coefficient",
        },
    }  # fmt: skip
    for section, known in values.items():
        assert set(SECTIONS[section]) - REFUSED_KEYS[section] <= known


GENERATE = {"prompts": 2, "max_new_tokens": 4}


def test_only_metrics_that_the_operator_has_registered_are_taken_by_name(tmp_path):
    rows, code = tmp_path / "rows.jsonl", tmp_path / "scores.py"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    code.write_text("def length(completion, expected, row):\n    return len(completion)\n")
    registered = {"length": f"{code}:length"}

    def metric_of(metric):
        own = request({"eval": {"fraction": 0.5, "generate": GENERATE, "metric": metric}})
        return job_keys(own, "job", 1, str(rows), metrics=registered)["eval"]["metric"]

    assert metric_of("length") == f"{code}:length"
    assert metric_of("exact_match") == "exact_match"
    for metric in (f"{code}:length", "/tmp/own.py:run", "lenght", "", 3, ["length"]):
        with pytest.raises(ApiError) as refused:
            metric_of(metric)
        assert refused.value.param == "weftune.eval.metric"
        assert "must be exact_match or length, got" in str(refused.value)
