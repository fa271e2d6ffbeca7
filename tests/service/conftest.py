"""Stores on real SQLite files and on a real PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import PipedFork
from tests.service import postgres
from tests.service.stores import settings_in
from weftune.service import preparer
from weftune.service.settings import ServiceSettings


@pytest.fixture(scope="session", autouse=True)
def forked_preparers() -> Iterator[None]:
    """Applications in the test's own process fork what checks their files, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparer, "start_server", PipedFork)
        yield


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    if reason := postgres.missing():
        pytest.skip(reason)
    with postgres.server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> ServiceSettings:
    """The settings of a service whose tables do not exist yet."""
    if request.param == "sqlite":
        return settings_in(tmp_path)
    return settings_in(tmp_path, request.getfixturevalue("postgres_server").new_database())


@pytest.fixture
def sqlite_settings(tmp_path: Path) -> ServiceSettings:
    return settings_in(tmp_path)
