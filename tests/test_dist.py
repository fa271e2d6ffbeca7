"""The wheel that `make dist` builds works in a new environment, without the clone."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.outputs import jobs_folder, states

ROOT = Path(__file__).parents[1]


def run(*words, cwd):
    """A command that finds neither the clone nor what the tests have set."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the clone: building writes into the folder that is built."""
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "clone"
    copy.mkdir()
    shutil.copytree(ROOT / "weftune", copy / "weftune", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, copy, cwd=folder)
    assert len(list(folder.glob("weftune-*.tar.gz"))) == 1
    (found,) = folder.glob("weftune-*.whl")
    return found


def test_the_wheel_holds_every_file_of_the_package(wheel):
    listed = set(zipfile.ZipFile(wheel).namelist())
    ours = [path for path in (ROOT / "weftune").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    missing = [path for path in ours if str(path.relative_to(ROOT)) not in listed]
    assert missing == []
    assert not [name for name in listed if not name.startswith("weftune")], "and nothing beside it"


@pytest.mark.slow
def test_installed_from_the_wheel_doctor_and_training_work_without_the_clone(wheel, tmp_path):
    env = tmp_path / "env"
    run(sys.executable, "-m", "venv", "--without-pip", env, cwd=tmp_path)
    python = env / "bin" / "python"
    installing = ("install", "--quiet", "--no-compile", "--no-index", "--no-deps", wheel)
    run(sys.executable, "-m", "pip", "--python", python, *installing, cwd=tmp_path)
    # Torch and the others from here; lines of a .pth file come behind what is installed, and name no clone.
    (site,) = (env / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = "import weftune, importlib.metadata; print(weftune.__file__)"
    assert Path(run(python, "-c", code, cwd=tmp_path).strip()).is_relative_to(site)
    assert "weftune" in run(env / "bin" / "weftune", "--version", cwd=tmp_path)
    assert "torch" in run(env / "bin" / "weftune", "doctor", cwd=tmp_path).lower()
    folder = jobs_folder(tmp_path / "jobs", [{"name": "a", "steps": 2, "adapter": {"rank": 2}}])
    shown = run(env / "bin" / "weftune", "train", "jobs.yaml", "--device", "cpu", cwd=folder)
    assert states(folder / "out") == {"a": "succeeded"}
    assert "Report: " in shown
    assert (folder / "out" / "report.html").is_file()
    assert (folder / "out" / "a" / "adapter_model.safetensors").is_file()
