"""Forks of one pytest report what one process would, and none of them dies in silence."""

import os
import subprocess
import sys

from tests.test_house import ROOT

TESTS = {
    "a": "def test_good(): pass\ndef test_bad():\n    print('seen')\n    assert 1 == 2",
    "b": "import os\ndef test_well(): pass\ndef test_dies(): os._exit(0)\ndef test_never(): pass",
    "c": "import os, pathlib, pytest\n"
    "@pytest.fixture(scope='module')\ndef held():\n    yield\n    assert False, 'torn down'\n"
    "def test_holds(held): pass\n"
    "@pytest.mark.timed\ndef test_last(): pathlib.Path('last').write_text(' '.join(os.listdir('ended')))\n"
    "def test_other(held): pass",
    "conftest": "import os, pathlib\nend = pathlib.Path('ended'); end.mkdir(exist_ok=True)\n"
    "def pytest_runtest_teardown(item): (end / item.name).touch()",
}
PROGRAM = """
import sys, pytest
sys.path.insert(0, sys.argv[1])
from tests import side_by_side
# These tests need nothing of Weftune.
side_by_side.prepare = side_by_side.start_server = side_by_side.start_demo_conversion = lambda *_: None
sys.exit(pytest.main(sys.argv[2:], [side_by_side]))
"""


def test_a_run_in_forks_fails_where_one_process_would_and_tells_who_died(tmp_path):
    for name, text in TESTS.items():
        (tmp_path / f"{'' if name == 'conftest' else 'test_'}{name}.py").write_text(text + "\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = timed\n")
    words = ("-p", "no:cacheprovider", "--processes", "2", "-q", "-rA", ".")
    command = [sys.executable, "-c", PROGRAM, str(ROOT), *words]
    # Nor anything of the plugins of pytest that are installed.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    for line in ("PASSED test_a.py::test_good", "FAILED test_a.py::test_bad - assert 1 == 2", "seen"):
        assert line in ended.stdout
    for line in ("FAILED test_b.py::test_dies - The process", "ERROR test_c.py::test_other - AssertionError"):
        assert line in ended.stdout
    assert "2 failed, 5 passed, 1 error" in ended.stdout
    assert set((tmp_path / "last").read_text().split()) == {
        "test_good", "test_bad", "test_well", "test_holds", "test_other",
    }, "one that looks at a clock runs behind all others"  # fmt: skip
