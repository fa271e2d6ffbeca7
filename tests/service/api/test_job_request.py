"""Keys of a request that would let a client name something of the server are refused before they are read."""

from __future__ import annotations

import pytest

from weftune.jobs.spec.keys import SECTIONS
from weftune.service.api.errors import ApiError
from weftune.service.api.job_request import REFUSED_KEYS, job_keys
from weftune.service.api.schemas import JobRequest

NAMING = {
    "adapter": {"init_from": "/etc"},
    "eval": {"path": "/etc/passwd", "metric": "/tmp/own.py:run"},
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
        "eval": {"fraction", "every", "generate"},
        "objective": {
            "kind", "beta", "loss_type", "label_smoothing", "cpo_alpha", "simpo_gamma",
            "desirable_weight", "undesirable_weight", "center_rewards_coefficient",
        },
    }  # fmt: skip
    for section, known in values.items():
        assert set(SECTIONS[section]) - REFUSED_KEYS[section] <= known
