"""Every test has a cache of its own kind and never reaches for a network."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """Token caches of tests stay out of the user's."""
    before = os.environ.get("WEFT_CACHE")
    os.environ["WEFT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["WEFT_CACHE"]
    else:
        os.environ["WEFT_CACHE"] = before


@pytest.fixture(scope="session")
def forks(_cache):
    """Real `weft` processes; see tests/forks.py."""
    from tests.forks import Forks

    with Forks() as made:
        yield made
