"""Every test has a cache of its own kind and never reaches for a network."""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import is_hypothesis_test, settings

from tests.cases import asks_for_every_case, fewer_examples
from weftune.core.files import cache_folder

HERE = Path(__file__).parent

# A machine with a GPU may lack the packages of the extra `serve`.
collect_ignore = [] if find_spec("sqlalchemy") else ["service"]

# How long an example takes says nothing of the code on a machine that does other things, too.
settings.register_profile("weftune", deadline=None)
settings.load_profile("weftune")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Workers on a CPU exchange tensors by NCCL's rules, so that an order which would hang with NCCL fails here.
os.environ.setdefault("WEFTUNE_NCCL_RULES", "1")
# Torch looks for it once, at the first product on a GPU: tests of deterministic runs may come later.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Torch's allocator on ARM takes a GiB of addresses ahead, which no limit of tests/forks.py would count.
os.environ.setdefault("MIMALLOC_ARENA_RESERVE", "0")


def pytest_configure(config):
    """Triton settles at its first import whether its own functions can be interpreted, and peft imports it.

    The switch is off again when this returns: a test that wants kernels on the CPU asks for them. Who only
    hands out tests to others waits for no imports.
    """
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch

    if torch.cuda.is_available() or find_spec("triton") is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import_module("triton")


def pytest_ignore_collect(collection_path, config):
    """Where tests of one mark are asked for, files that do not have it are not even imported."""
    mark = config.option.markexpr.split(" and not ")[0]
    if mark not in ("gpu", "smoke", "timed") or collection_path.suffix != ".py":
        return None
    return f"pytest.mark.{mark}" not in collection_path.read_text() or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Whole runs, in files beside this one, come first: a long file at the end would keep one worker waiting.

    Random tests try a part of their examples; whole, which `make test-slow` asks for, they are slow.
    """
    items.sort(key=lambda item: item.path.parent != HERE)
    functions = set()
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            if asks_for_every_case():
                item.add_marker(pytest.mark.slow)
            else:
                functions.add(getattr(item.obj, "__func__", item.obj))
    for function in functions:
        # Hypothesis has no other way to change what a test has asked for than the one of its own plugin.
        asked = function._hypothesis_internal_use_settings
        fewer = settings(asked, max_examples=fewer_examples(asked.max_examples))
        function._hypothesis_internal_use_settings = fewer


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session):
    """Token caches of tests stay out of the user's, from which they have the demo base, if it is there."""
    demo = cache_folder() / "demo"
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, pytest.MonkeyPatch.context() as patch:
        if demo.is_dir():
            Path(folder, "demo").symlink_to(demo)
        patch.setenv("WEFTUNE_CACHE", folder)
        return (yield)


@pytest.fixture(scope="session")
def forks():
    """Real `weftune` processes; see tests/forks.py."""
    from tests.forks import Forks

    return Forks()


@pytest.fixture(scope="session")
def trained_deep(tmp_path_factory, forks):
    """Four jobs on a model of four layers; `undisturbed` is what one process makes of them. To be copied.

    The first process of tests that asks for it trains them for all processes of the run.
    """
    from filelock import FileLock

    from tests.launches import deep_folder
    from tests.outputs import FOUR_JOBS

    folder = tmp_path_factory.getbasetemp() / "deep"
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            made = deep_folder(tmp_path_factory.mktemp("made"), FOUR_JOBS)
            assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=made) == 0
            made.rename(folder)
    return folder
