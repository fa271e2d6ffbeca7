"""The dashboard in a real browser, in front of a whole service that trains."""

from __future__ import annotations

import tarfile
import time

import pytest

from tests.service.browser import CHROMIUM, browser
from tests.service.whole import Whole, rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
PATIENCE = 120.0
CURVE = "document.querySelector('#curves path.curve, .chart path.curve')?.getAttribute('d')"


@pytest.fixture
def whole(tmp_path):
    found = Whole(tmp_path)
    yield found
    found.kill()


@pytest.fixture
def page(tmp_path):
    with browser(tmp_path / "profile") as found:
        yield found


def submit(page, file, suffix, epochs):
    """Submit a job by the form, and return its id."""
    page.evaluate("location.hash = '#/new'")
    page.wait("document.querySelector('#training_file')")
    page.choose_file("#training_file", file)
    page.type("#suffix", suffix)
    page.type("#rank", "4")
    page.type("#n_epochs", str(epochs))
    page.click("#job-form button[type=submit]")
    page.wait("document.querySelector('.plan')", PATIENCE)
    page.click(".plan button.primary")
    page.wait("location.hash.startsWith('#/jobs/ftjob-')", PATIENCE)
    return page.evaluate("location.hash").rpartition("/")[2]


def test_a_reader_trains_watches_pauses_resumes_downloads_and_chats(whole, page, tmp_path):
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    few.write_bytes(rows())
    many.write_bytes(100 * rows())
    page.size(1280)
    page.open(whole.url)
    page.type("#key", whole.key)
    page.press("Enter")
    page.wait("document.querySelector('nav.tabs')")
    done, long = submit(page, few, "short", 2), submit(page, many, "long", 50)
    # The curve moves while the job trains.
    before = page.wait(CURVE, PATIENCE)
    page.wait(f"{CURVE} !== {before!r}", PATIENCE)
    page.evaluate("location.hash = '#/jobs'")
    state = "document.querySelector('tr[data-key=\"%s\"] .state')?.innerText"
    page.wait(f"{state % done} === 'succeeded'", PATIENCE)
    row = f'tr[data-key="{long}"]'
    for verb, reached in (("pause", "paused"), ("resume", "running")):
        page.click(f'{row} [data-verb="{verb}"]')
        page.wait(f"{state % long} === {reached!r}", PATIENCE)
    for width in (1280, 400):
        page.size(width)
        for name in ("jobs", f"jobs/{long}", "device"):
            page.evaluate(f"location.hash = '#/{name}'")
            time.sleep(1.0)
            assert page.overflow() == [], f"{name} at {width}"
            page.picture(tmp_path / f"{name.partition('/')[0]}-{width}-{len(name)}.png")
    page.wait("document.querySelector('.lanes')", PATIENCE)
    page.evaluate("location.hash = '#/jobs'")
    page.size(1280)
    page.save_downloads_in(tmp_path / "downloads")
    page.click(f'tr[data-key="{done}"] [data-verb="download"]')
    archive = tmp_path / "downloads" / f"{done}.tar"
    whole.until(archive.exists)
    with tarfile.open(archive) as found:
        assert f"{done}/adapter_model.safetensors" in found.getnames()
    # The finished adapter and the base answer while the long job trains.
    page.click(f'tr[data-key="{done}"] a.button')
    page.wait("document.querySelectorAll('.choice[aria-pressed=true]').length === 2", PATIENCE)
    page.type("#max_tokens", "8")
    page.type("#prompt", "w10 w50")
    page.press("Enter")
    page.wait("document.querySelectorAll('.answer small').length === 2", PATIENCE)
    page.picture(tmp_path / "chat-1280.png")
    page.size(400)
    time.sleep(0.5)
    assert page.overflow() == []
    page.picture(tmp_path / "chat-400.png")
    page.size(1280)
    page.evaluate("location.hash = '#/jobs'")
    page.wait(f"{state % long} === 'running'", PATIENCE)
    for _ in range(2):
        page.click(f'{row} [data-verb="cancel"]')
    page.wait(f"{state % long} === 'cancelled'", PATIENCE)
    assert page.console == []
