"""A kind from a package of somebody else: installed, it trains beside ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import bench
from tests.cases import slow_but
from tests.launches import deep_folder
from tests.outputs import states
from weftune.adapters.folder import read_config

EXAMPLE = Path(__file__).parents[3] / "examples" / "new_kind"
GUIDE = Path(__file__).parents[3] / "docs" / "new-kind.md"
JOBS = [
    {"name": "bits", "steps": 5, "adapter": {"kind": "bitfit", "targets": ["q_proj", "fc2"]}},
    {"name": "lora", "steps": 5, "adapter": {"rank": 3}},
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder that the example was installed in."""
    folder, source = (tmp_path_factory.mktemp(name) for name in ("installed", "source"))
    # Building leaves things beside the source.
    shutil.copytree(EXAMPLE, source, dirs_exist_ok=True)
    words = ("install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder))
    subprocess.run([sys.executable, "-m", "pip", *words, str(source)], check=True, timeout=120)
    return folder


@pytest.fixture
def weftune(forks) -> Callable[..., str]:
    """The command where the packages of a folder are installed: what it prints."""

    def run(installed: Path, place: Path, *words: str, code: int = 0) -> str:
        ended = forks.weftune(*words, cwd=place, installed=installed)
        printed = (place / "log").read_text()
        assert ended == code, printed
        return printed

    return run


@pytest.mark.slow
def test_it_trains_beside_lora_and_is_merged(installed, weftune, tmp_path):
    place = deep_folder(tmp_path, JOBS)
    weftune(installed, place, "train", "jobs.yaml", "--output", "both")
    assert states(place / "both") == {"bits": "succeeded", "lora": "succeeded"}
    assert read_config(place / "both" / "bits")["weftune_kind"] == "bitfit"
    found = bench.adapter(place / "both" / "bits")
    assert {name.rpartition(".")[2] for name in found} == {"u"}
    assert all(bool(value.any()) for value in found.values())
    weftune(installed, place, "export", "both/bits", "--merged", "merged")
    _assert_added(place / "model", place / "merged", found)


def _assert_added(before: Path, after: Path, found: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import load_file

    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    for name, u_N in found.items():
        bias = name.removeprefix("base_model.model.").removesuffix(".u") + ".bias"
        torch.testing.assert_close(new[bias], old[bias] + u_N)


@pytest.fixture
def broken(installed, tmp_path) -> Callable[[str, str], Path]:
    """A copy of what was installed in which a file of the package has other contents."""

    def copied(file: str, text: str) -> Path:
        folder = shutil.copytree(installed, tmp_path / "broken")
        (folder / "weftune_bitfit" / file).write_text(text)
        return folder

    return copied


UNDEFINED = """
from dataclasses import dataclass
from weftune.adapters.target import TargetSpec

@dataclass(frozen=True, slots=True, kw_only=True)
class BitFitSpec(TargetSpec):
    size: "Undefined" = 1
"""


BROKEN = [
    ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found'; repair it"),
    ("raise RuntimeError('one line\\nanother')", "RuntimeError: one line; repair it"),
    ("BitFitSpec = 3", "TypeError: weftune_bitfit.spec:BitFitSpec is no class that extends TargetSpec"),
    (UNDEFINED, "NameError: name 'Undefined' is not defined"),
]


@pytest.mark.parametrize(("text", "reason"), slow_but(BROKEN, BROKEN[:1]))
def test_a_package_that_fails_breaks_no_other_kind_and_is_told_when_it_is_asked_for(
    broken, weftune, tmp_path, text, reason
):
    folder, place = broken("spec.py", text), deep_folder(tmp_path, JOBS)
    told = " ".join(weftune(folder, place, "plan", "jobs.yaml", code=2).split())
    assert "Traceback" not in told
    assert f"bitfit is a kind that does not work: the package weftune-bitfit cannot be used: {reason}" in told
    (place / "jobs.yaml").write_text((place / "jobs.yaml").read_text().replace("bitfit", "ia3"))
    assert "bits" in weftune(folder, place, "plan", "jobs.yaml")


@pytest.mark.slow
def test_a_kind_whose_code_fails_is_told_when_it_is_trained(broken, weftune, tmp_path):
    folder, place = broken("apply.py", "import nowhere_to_be_found"), deep_folder(tmp_path, JOBS)
    told = " ".join(weftune(folder, place, "train", "jobs.yaml", code=2).split())
    assert "Traceback" not in told
    assert (
        "adapter.kind: bitfit is a kind that does not work: the package weftune_bitfit cannot be used" in told
    )


@pytest.mark.slow
def test_the_doctor_and_an_export_tell_of_a_package_that_fails(broken, weftune, tmp_path):
    folder, place = broken("spec.py", "import nowhere_to_be_found"), deep_folder(tmp_path, JOBS)
    told = " ".join(weftune(folder, place, "doctor").split())
    assert "kind bitfit" in told
    assert "pip install --upgrade weftune-bitfit" in told
    (place / "adapter").mkdir()
    (place / "adapter" / "adapter_config.json").write_text('{"weftune_kind": "bitfit"}')
    (place / "adapter" / "adapter_model.safetensors").touch()
    told = " ".join(weftune(folder, place, "export", "adapter", "--portable", code=2).split())
    assert "adapter cannot be read: bitfit is a kind that does not work: the package weftune-bitfit" in told


def test_the_guide_shows_the_very_files_and_they_are_short():
    text, lines = GUIDE.read_text(), 0
    for path in ("weftune_bitfit/spec.py", "weftune_bitfit/apply.py", "pyproject.toml"):
        source = (EXAMPLE / path).read_text()
        assert source.strip() in text, path
        lines += len(source.splitlines())
    assert lines < 60
