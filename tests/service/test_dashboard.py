"""The dashboard in a real browser, in front of the real application and a real store."""

from __future__ import annotations

import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from tests.base.folders import word_tokenizer
from tests.base.packs import base_of
from tests.data import families
from tests.families import tiny
from tests.generate.test_answers import adapter_folder
from tests.plan.costs import CONFIG
from tests.service.browser import CHROMIUM, Browser, browser
from tests.service.site import Site, different_rows, rows, serving
from weftune.core.files import json_text
from weftune.jobs.store.status import State
from weftune.run.passes.adapted import AdaptedBase
from weftune.service.chat import ChatServer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

WIDTHS = (1280, 400)
PAGES = ("jobs", "device", "new", "chat")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A base of config.json and tokenizer only."""
    folder = tmp_path_factory.mktemp("dashboard") / "small-base"
    families.smollm2().save_pretrained(folder)
    (folder / "config.json").write_text(json_text(CONFIG))
    return str(folder)


@pytest.fixture
def site(tmp_path, base, monkeypatch) -> Iterator[Site]:
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path / "cache"))
    found = Site(tmp_path, base)
    yield found
    found.close()


@pytest.fixture
def page(site, tab) -> Iterator[Browser]:
    """The tab in front of the site's dashboard, not signed in."""
    with serving(site.app) as url:
        tab.console.clear()
        tab.requests.clear()
        tab.size(1280)
        tab.open(url)
        tab.evaluate("sessionStorage.clear()")
        tab.open(url + "/?again")
        yield tab
        assert [one for one in tab.requests if not one.startswith((url, "data:", f"blob:{url}"))] == []
        tab.open("about:blank")


def sign_in(page: Browser, site: Site, tenant: str = "acme") -> None:
    page.type("#key", site.keys[tenant])
    page.press("Enter")
    page.wait("document.querySelector('nav.tabs')")


def go(page: Browser, name: str) -> None:
    page.evaluate(f"location.hash = '#/{name}'")
    page.wait(f"document.querySelector('#content').dataset.key === {name!r}")


def busy_site(site: Site) -> dict[str, str]:
    """Fill the store with jobs in every state, of two tenants."""
    names = ("support", "sql", "legal")
    found = {name: site.add(name) for name in names} | {"theirs": site.add("theirs", "globex")}
    for name, until in (("support", 25), ("sql", 31), ("theirs", 9)):
        site.move(found[name], State.RUNNING)
        site.train(found[name], until)
    site.window({found["support"]: 260, found["sql"]: 180, found["theirs"]: 90})
    return found


def test_a_reader_signs_in_and_sees_the_curve_move(page, site):
    jobs = busy_site(site)
    page.type("#key", "tml-wft-wrong")
    page.press("Enter")
    page.wait("document.body.innerText.includes('This key is not valid')")
    sign_in(page, site)
    page.wait("document.querySelectorAll('table.live tbody tr').length === 3")
    assert "theirs" not in page.text()
    assert "25 of 40 steps" in page.text()
    curve = """[...document.querySelectorAll('#curves path.curve')]
        .find((one) => one.dataset.name === 'support')?.getAttribute('d')"""
    before = page.wait(curve)
    site.train(jobs["support"], 29)
    page.wait("document.body.innerText.includes('29 of 40 steps')")
    page.wait(f"{curve} !== {before!r}")
    assert page.wait(curve).count("L") == before.count("L") + 4
    assert [one for one in page.console if "401" not in one] == []


def test_a_sweep_has_a_page_with_its_trials_and_their_values(page, site):
    sweep, *trials = site.submit_sweep("triage", "learning_rate", [1e-4, 2e-4])
    for trial, until in zip(trials, (20, 30), strict=True):
        site.enter(trial)
        site.move(trial, State.RUNNING)
        site.train(trial, until)
    sign_in(page, site)
    page.evaluate(f"location.hash = '#/jobs/{sweep}'")
    page.wait("document.querySelectorAll('table.live tbody tr').length === 2")
    text = page.text()
    assert text.index("learning_rate 0.0002") < text.index("learning_rate 0.0001")
    assert "50 of 80 steps" in text
    losses = [site.training.job(trial).status.eval_loss for trial in trials]
    assert f"{min(losses):.4f}" in page.evaluate("document.querySelector('.tiles .value').textContent")
    for name in ("triage-0", "triage-1"):
        page.wait(f"document.querySelector('#curves path.curve[data-name={name}]')")
    assert page.console == []


@pytest.mark.slow
def test_script_in_names_reasons_logs_and_settings_is_only_text(page, site):
    """Row 25 of the faults."""
    job = site.add(HOSTILE, reason=HOSTILE)
    site.log(job, HOSTILE, "warn")
    failed = site.add("bad")
    site.move(failed, State.FAILED, HOSTILE, error={"code": "x", "message": HOSTILE, "param": None})
    running = site.add(HOSTILE[:60])
    site.move(running, State.RUNNING)
    site.train(running, 20)
    site.window({running: 300})
    sign_in(page, site)
    page.wait("document.querySelectorAll('table.live tbody tr').length === 3")
    assert HOSTILE in page.text()
    for name in (f"jobs/{job}", f"jobs/{failed}", f"jobs/{running}", "device", "chat", "new"):
        go(page, name)
        time.sleep(0.3)
        assert page.evaluate("document.title.endsWith('Weftune service')")
        assert page.evaluate("document.querySelectorAll('img, #app script').length") == 0
    go(page, f"jobs/{job}")
    page.wait("document.querySelector('.log')?.innerText.includes('<img src=x')")
    assert page.console == []


@pytest.mark.slow
def test_the_policy_refuses_scripts_and_styles_that_are_not_the_services_own(page, site):
    import urllib.request

    url = page.evaluate("location.origin")
    with urllib.request.urlopen(url) as answer:
        policy = answer.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
    script = "const one = document.createElement('script'); one.textContent = 'document.title = 2';"
    page.evaluate(f"(() => {{ {script} document.body.append(one); }})()")
    page.wait("true")
    assert page.evaluate("document.title") == "Weftune service"
    assert any("Content Security Policy" in one or "violates" in one for one in page.console)


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_the_screen(page, site, width):
    jobs = busy_site(site)
    long = site.add("a-name-without-any-place-to-break-" + "x" * 30, reason="it waits " + "y" * 80)
    site.log(long, "z" * 200)
    page.size(width)
    assert page.overflow() == []
    sign_in(page, site)
    for name in (*PAGES, f"jobs/{jobs['support']}", f"jobs/{long}", "jobs/unknown"):
        go(page, name)
        time.sleep(0.4)
        assert page.overflow() == [], name
    assert [one for one in page.console if "404" not in one] == []


@pytest.mark.slow
def test_a_job_is_submitted_by_form_after_its_rows_have_been_corrected(page, site, tmp_path):
    running = site.add("beside")
    site.move(running, State.RUNNING)
    sign_in(page, site)
    go(page, "new")
    bad, good = tmp_path / "tickets.jsonl", tmp_path / "corrected.jsonl"
    bad.write_text(rows(2) + '{"messages": [{"role": "user"}]}\n' + rows(2), encoding="utf-8")
    good.write_text(rows(24), encoding="utf-8")
    page.click("#job-form button[type=submit]")
    page.wait("document.querySelector('#problem')?.innerText.includes('Choose a file')")
    page.choose_file("#training_file", bad)
    page.click("#job-form button[type=submit]")
    page.wait("document.querySelector('#problem')?.innerText.includes('Line 3:')")
    page.choose_file("#training_file", good)
    page.type("#suffix", "corrected")
    page.type("#rank", "8")
    page.type("#n_epochs", "2")
    page.click("#job-form button[type=submit]")
    page.wait("document.querySelector('.plan')", 90)
    assert "It starts at the next window." in page.text()
    assert "Beside 1 job that runs now." in page.text()
    assert len(site.requests.submissions("acme")) == 1, "a plan submits nothing"
    page.click(".plan button.primary")
    page.wait("location.hash.startsWith('#/jobs/ftjob-')")
    page.wait("document.querySelector('.job-head')?.innerText.includes('corrected')")
    newest = site.requests.submissions("acme")[0]
    assert (newest.suffix, newest.job["adapter"], newest.job["epochs"]) == ("corrected", {"rank": 8}, 2)


@pytest.mark.slow
def test_a_sweep_is_submitted_by_form_after_its_plan_has_listed_the_trials(page, site, tmp_path):
    sign_in(page, site)
    go(page, "new")
    file = tmp_path / "tickets.jsonl"
    file.write_text(different_rows(40), encoding="utf-8")
    page.choose_file("#training_file", file)
    page.type("#suffix", "sql")
    page.type("#rungs", "0.5")
    for rates, problem in {
        "2e-4": "Rungs compare the trials of a sweep",
        "2e-4, fast": "Learning rate must be a number, got fast",
        "2e-4, 2e-4": "is already there",
    }.items():
        page.type("#learning_rate", rates)
        page.click("#job-form button[type=submit]")
        page.wait(f"document.querySelector('#problem')?.innerText.includes({problem!r})")
    page.type("#learning_rate", "2e-4, 1e-3")
    page.type("#rank", "4, 8")
    page.click("#job-form button[type=submit]")
    page.wait("document.querySelector('.plan')", 90)
    text = page.text()
    assert "4 trials start at the next window." in text
    assert "Of 4 trials, 2 continue after step" in text
    assert "compared on 10 % of the rows" in text
    names = page.evaluate("[...document.querySelectorAll('.plan tbody th')].map((one) => one.innerText)")
    assert names[1].split("\n") == ["sql-r4-lr1e-3", "adapter.rank 4, learning_rate 0.001"]
    assert site.requests.submissions("acme") == [], "a plan submits nothing"
    page.size(400)
    assert page.overflow() == []
    page.click(".plan button.primary")
    page.wait("location.hash.startsWith('#/jobs/ftjob-')")
    page.wait("document.querySelectorAll('table.live tbody tr').length === 4")
    *trials, sweep = site.requests.submissions("acme")
    assert sweep.job["sweep"]["halving"] == {"at": [0.5], "keep": 0.5}
    assert sweep.job["eval"]["fraction"] == 0.1
    assert [(one.job["adapter"]["rank"], one.job["learning_rate"]) for one in trials] == [
        (8, 1e-3), (8, 2e-4), (4, 1e-3), (4, 2e-4),
    ]  # fmt: skip
    assert [one for one in page.console if "400" not in one] == []


@pytest.mark.slow
def test_a_job_is_paused_resumed_cancelled_and_downloaded(page, site, tmp_path):
    job, done = site.add("support"), site.add("done")
    for one in (job, done):
        site.move(one, State.RUNNING)
    site.train(job, 10)
    site.succeed(done)
    sign_in(page, site)
    row = f'tr[data-key="{job}"]'
    state = f"document.querySelector('{row} .state')?.innerText"

    def command() -> Any:
        found = site.requests.commands_after(0)
        return found[-1].verb if found else None

    page.click(f'{row} [data-verb="pause"]')
    wait_for(lambda: command() == "pause")
    site.move(job, State.PAUSED, "paused on request at step 10")
    page.wait(f"{state} === 'paused'")
    assert "Paused on request at step 10" in page.text()
    page.click(f'{row} [data-verb="resume"]')
    wait_for(lambda: command() == "resume")
    site.move(job, State.QUEUED)
    page.wait(f"{state} === 'queued'")
    page.click(f'{row} [data-verb="cancel"]')
    page.wait(f"document.querySelector('{row} [data-verb=cancel]').innerText === 'Really cancel?'")
    assert command() == "resume", "one click cancels nothing"
    page.press("Escape")
    page.wait(f"document.querySelector('{row} [data-verb=cancel]').innerText === 'Cancel'")
    for _ in range(2):
        page.click(f'{row} [data-verb="cancel"]')
    wait_for(lambda: command() == "cancel")
    site.move(job, State.CANCELLED)
    page.wait(f"{state} === 'cancelled'")
    downloads = tmp_path / "downloads"
    page.save_downloads_in(downloads)
    page.click(f'tr[data-key="{done}"] [data-verb="download"]')
    archive = downloads / f"{done}.tar"
    wait_for(archive.exists)
    with tarfile.open(archive) as found:
        assert f"{done}/adapter_model.safetensors" in found.getnames()
    assert page.console == []


@pytest.mark.slow
def test_the_page_works_by_keyboard_and_keeps_the_focus_while_it_changes(page, site):
    jobs = busy_site(site)
    sign_in(page, site)
    page.wait("document.querySelector('table.live')")
    focused = "(document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText)"
    seen = []
    for _ in range(12):
        page.press("Tab")
        seen.append(page.evaluate(focused))
    tabs = ["Jobs", "Device", "New job", "Chat"]
    assert [one for one in seen if one in tabs] == tabs
    pauses = [one for one in seen if one.startswith("Pause")]
    assert pauses
    page.evaluate("document.querySelector('[aria-label=\"Pause support\"]').focus()")
    site.train(jobs["support"], 33)
    page.wait("document.body.innerText.includes('33 of 40 steps')")
    assert page.evaluate(focused) == "Pause support"
    page.press("Enter")
    wait_for(lambda: [one.verb for one in site.requests.commands_after(0)] == ["pause"])


@pytest.mark.slow
def test_a_waiting_job_says_why_and_the_last_window_who_shares_it(page, site):
    jobs = busy_site(site)
    sign_in(page, site)
    go(page, "device")
    page.wait("document.querySelector('.lanes')")
    text = page.text()
    assert "other tenants" in text
    assert "theirs" not in text
    assert "NEXT" in text.upper()
    bars = page.evaluate("[...document.querySelectorAll('.lane svg')].map((one) => one.children.length)")
    assert bars == [24, 24], "planned and measured"
    site.window({jobs["sql"]: 10}, passes=5)
    page.wait("document.querySelector('.lane svg').children.length === 5")


@pytest.mark.slow
def test_a_revoked_key_leads_back_to_the_sign_in(page, site):
    busy_site(site)
    sign_in(page, site)
    page.wait("document.querySelector('table.live')")
    site.settings.keys.unlink()
    page.click('[data-verb="pause"]')
    page.wait("document.querySelector('#key') && document.body.innerText.includes('has been revoked')")
    assert page.evaluate("sessionStorage.length") == 0


@pytest.fixture
def chatting(site) -> Iterator[None]:
    """A chat server of a tiny base with random weights, as in a training process that is idle."""
    site.settings.jobs.mkdir(parents=True, exist_ok=True)
    ended = threading.Event()
    base = AdaptedBase(base_of(tiny("llama", torch.float32)))
    with closing(
        ChatServer(base, word_tokenizer(), site.settings.jobs, site.settings.chat_socket, 1 << 20, 1 << 20)
    ) as server:

        def work() -> None:
            while not ended.is_set():
                if not server.take_turn():
                    server.wait(0.05)

        thread = threading.Thread(target=work)
        thread.start()
        yield
        ended.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_adapters_are_compared_in_a_chat(page, site, chatting, width):
    jobs = [site.add(name) for name in ("first", "second")]
    for seed, job in enumerate(jobs):
        site.move(job, State.RUNNING)
        site.succeed(job)
        adapter_folder(site.settings.jobs / job, seed)
    page.size(width)
    sign_in(page, site)
    # With the curves come the losses, by which rows of a narrow screen become higher.
    page.wait("document.querySelectorAll('#curves path.curve').length >= 4")
    page.click(f'tr[data-key="{jobs[0]}"] a.button')
    page.wait("document.querySelectorAll('.choice[aria-pressed=true]').length === 2")
    page.click('.choice[aria-pressed="false"]')
    page.type("#max_tokens", "8")
    page.type("#prompt", "w10 w20")
    page.press("Enter")
    page.wait("document.querySelectorAll('.answer small').length === 3")
    said = page.evaluate("[...document.querySelectorAll('.said')].map((one) => one.innerText)")
    assert len(set(said)) == 3, "the base and two adapters"
    assert all(len(text.split()) >= 2 for text in said)
    page.type("#prompt", "w30")
    page.press("Enter")
    page.wait("document.querySelectorAll('.answer small').length === 6")
    assert page.overflow() == []
    assert page.console == []
    page.click('[data-act="forget"]')
    page.wait("document.querySelectorAll('.turn').length === 0")


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
