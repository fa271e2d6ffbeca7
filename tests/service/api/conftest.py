"""One HTTP process for most tests of a file; tests that change its settings start their own."""

from __future__ import annotations

import pytest

from tests.service.api.running import Training, rows, start_service


@pytest.fixture(scope="session")
def service(tmp_path_factory):
    running = start_service(tmp_path_factory.mktemp("service"))
    yield running
    running.stop()


@pytest.fixture
def training(service):
    opened = Training.open(service.settings)
    yield opened
    opened.close()


@pytest.fixture
def client(service):
    return service.client()


@pytest.fixture
def file(client):
    return client.files.create(file=("rows.jsonl", rows()), purpose="fine-tune")


@pytest.fixture
def job(client, file):
    return client.fine_tuning.jobs.create(model="demo", training_file=file.id, suffix="support")
