"""The suite runs in environments that hold plugins of pytest which it does not use."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_benchmark_plugin_that_warns_of_xdist_is_not_loaded(tmp_path):
    """As pytest-benchmark up to version 5.1 does: it warns when it is configured, and warnings are errors."""
    (tmp_path / "warning_plugin.py").write_text(
        "import warnings\ndef pytest_configure(config):\n    warnings.warn('xdist plugin is active')\n"
    )
    installed = tmp_path / "pytest_benchmark-5.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest-benchmark\nVersion: 5.1.0\n")
    (installed / "entry_points.txt").write_text("[pytest11]\nbenchmark = warning_plugin\n")
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    words = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(tmp_path / "test_it.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "1 passed" in ended.stdout, ended.stdout + ended.stderr
