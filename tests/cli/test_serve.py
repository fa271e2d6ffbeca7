"""`weftune serve` refuses what cannot be served in one sentence, before anything is started."""

from __future__ import annotations

import json
import socket
import stat

import pytest
from typer.testing import CliRunner

from weftune.base.spec import BaseSpec
from weftune.cli import serve as command
from weftune.cli.main import app
from weftune.errors import MissingPackage, UserError
from weftune.service.settings import CLAIM, Envelope, Quotas, ServiceSettings, claim_store, refuse_other_base


def run(*arguments):
    return CliRunner().invoke(app, ["serve", "--check", *map(str, arguments)])


def test_check_says_where_the_service_would_be_and_creates_a_private_store(tmp_path):
    found = run("--base", "demo", "--store", tmp_path / "store", "--port", 18231)
    assert found.exit_code == 0, found.exception
    assert "http://127.0.0.1:18231" in found.output
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert json.loads((tmp_path / "store" / CLAIM).read_text())["base"]["model"] == "demo"


def test_a_store_of_another_base_is_refused(tmp_path):
    settings = ServiceSettings(base=BaseSpec(model="demo"), store=tmp_path)
    claim_store(settings)
    refuse_other_base(settings)
    other = ServiceSettings(base=BaseSpec(model="demo", quantize="nf4"), store=tmp_path)
    with pytest.raises(UserError, match=r"belongs to the base .*SmolLM2.* choose another --store"):
        refuse_other_base(other)


def test_a_damaged_record_of_the_base_is_a_sentence(tmp_path):
    (tmp_path / CLAIM).write_text("{")
    with pytest.raises(UserError, match="cannot be read; put back a copy"):
        refuse_other_base(ServiceSettings(base=BaseSpec(model="demo"), store=tmp_path))


def test_a_taken_port_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = run("--base", "demo", "--store", tmp_path / "store", "--port", port)
    assert isinstance(found.exception, UserError)
    assert str(found.exception) == (
        f"cannot listen on 127.0.0.1:{port}: another program listens there; choose another --port, or stop it"
    )
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_of_this_machine_is_refused(host, tmp_path):
    found = run("--base", "demo", "--store", tmp_path, "--host", host)
    assert isinstance(found.exception, UserError)


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setattr(command, "PACKAGES", ("json", "no_such_package"))
    with pytest.raises(MissingPackage) as error:
        command.refuse_missing_packages()
    assert str(error.value) == "weftune serve needs no_such_package: pip install 'weftune[serve]'"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64xrank16", Envelope(jobs=64, rank=16)),
        ("8xrank4x2048", Envelope(jobs=8, rank=4, sample_tokens=2048)),
    ],
)
def test_the_expected_jobs_are_read(text, expected):
    assert command.read_envelope(text) == expected


@pytest.mark.parametrize("text", ["", "64", "0xrank16", "64xrank0", "64xr16", "64xrank16x0", "-1xrank16"])
def test_expected_jobs_that_cannot_be_read_are_refused(text):
    with pytest.raises(UserError, match="write how many jobs of which rank, such as 64xrank16"):
        command.read_envelope(text)


def test_the_base_is_a_name_or_a_mapping():
    assert command.read_base("demo").model == "demo"
    assert command.read_base("{model: demo, quantize: nf4}").quantize == "nf4"
    with pytest.raises(UserError):
        command.read_base("{model: demo, quantise: nf4}")
    with pytest.raises(UserError):
        command.read_base("{model")


def test_quotas_are_read_by_name():
    found = command.read_quotas(["running_jobs=4", "stored_bytes=2GiB", "queued_jobs=none"])
    assert found == Quotas(running_jobs=4, stored_bytes=2 << 30, queued_jobs=None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runing_jobs=4", "did you mean running_jobs"),
        ("running_jobs=0", "at least 1"),
        ("running_jobs=-1", "at least 1"),
        ("running_jobs=many", "write a number"),
        ("running_jobs", "write a number"),
        ("file_bytes=none", "needs a number"),
    ],
)
def test_quotas_that_cannot_be_read_are_refused(text, expected):
    with pytest.raises(UserError, match=expected):
        command.read_quotas([text])


def test_metrics_are_imported_and_known_by_the_name_of_their_function(tmp_path, monkeypatch):
    (tmp_path / "scores.py").write_text(
        "def length(completion, expected, row):\n    return len(completion)\n"
    )
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    monkeypatch.chdir(tmp_path)
    assert command.read_metrics(["scores.py:length"]) == {"length": f"{tmp_path / 'scores.py'}:length"}
    for texts, expected in {
        ("scores.py:length", "scores.py:length"): "there is a metric length already",
        ("scores.py:width",): "holds no function width",
        ("scores.py:tokens",): "already the name of a column",
        ("broken.py:length",): "cannot be imported: ModuleNotFoundError",
        ("other.py:length",): "other.py",
        ("length",): "FILE.py:FUNCTION",
        ("exact_match",): "leave it out",
    }.items():
        with pytest.raises(UserError, match=expected):
            command.read_metrics(texts)
