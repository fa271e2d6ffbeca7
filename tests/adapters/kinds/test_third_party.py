"""A kind from a package of somebody else: installed, it trains beside ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import bench
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


def weftune(installed, place, *words) -> str:
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", "weftune", *words],
        cwd=place,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_it_trains_beside_lora_and_is_merged(installed, tmp_path):
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


def test_the_guide_shows_the_very_files_and_they_are_short():
    text, lines = GUIDE.read_text(), 0
    for path in ("weftune_bitfit/spec.py", "weftune_bitfit/apply.py", "pyproject.toml"):
        source = (EXAMPLE / path).read_text()
        assert source.strip() in text, path
        lines += len(source.splitlines())
    assert lines < 60
