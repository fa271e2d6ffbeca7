"""Nothing that users rely on has vanished: commands and options, names from Python, keys of a jobs file."""

import json

from tests.frozen.surface import FILE, surface

RECORDED, NOW = json.loads(FILE.read_text()), surface()


def test_every_command_still_has_its_options():
    for verb, options in RECORDED["commands"].items():
        assert set(options) <= set(NOW["commands"][verb]), verb


def test_every_name_from_python_still_takes_its_arguments():
    for name, arguments in RECORDED["python"].items():
        assert set(arguments.split(", ")) <= set(NOW["python"][name].split(", ")), name


def test_every_key_of_a_job_is_still_one():
    assert len(RECORDED["keys"]) > 30
    assert set(RECORDED["keys"]) <= set(NOW["keys"])
