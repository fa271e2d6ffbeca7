"""Draw docs/pictures/dashboard-*.png from a filled store: `python -m tests.service.pictures`."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from tests.service.browser import Browser, browser
from tests.service.site import Site, different_rows, serving
from weftune.jobs.store.status import State
from weftune.jobs.sweeps.halving import LEFT

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
SHOWN = (
    ("jobs", 1280),
    ("jobs", 400),
    ("job", 1280),
    ("sweep", 1280),
    ("sweep", 400),
    ("device", 1280),
    ("device", 400),
    ("new", 1280),
    ("new-sweep", 1280),
    ("new-sweep", 400),
)


def fill(site: Site) -> tuple[str, str]:
    """Fill the store, and return the job and the sweep that have pictures of their own."""
    done, failed = site.add("support-en", steps=60), site.add("legal-wide", steps=80)
    running, small = site.add("support-de", steps=60), site.add("sql-small", steps=80)
    theirs = [site.add("theirs", "globex", steps=90, priority=1) for _ in range(2)]
    for job in (done, failed, running, small, theirs[0]):
        site.move(job, State.RUNNING, started_at=time.time() - 1273)
    site.checkpoint(running, 20)
    site.train(failed, 12)
    problem = "the loss of step 13 is not finite; lower the learning rate"
    error = {"code": "training_failed", "message": problem, "param": None}
    site.move(failed, State.FAILED, problem, error=error)
    site.succeed(done)
    site.train(running, 34)
    site.train(small, 51)
    site.train(theirs[0], 12)
    site.add("legal-dpo", steps=240, priority=1, reason="3.1 GiB more than the 11.2 GiB that are free")
    site.add("nightly", steps=400, reason="it waits behind legal-dpo, which comes first")
    for text in (
        "The rows were checked: 3,200 rows, 612,480 tokens.",
        "Admitted beside 3 other jobs.",
        "Checkpoint created at step 20",
    ):
        site.log(running, text)
    site.log(running, "Out of memory with 2048 tokens per microbatch: continuing with 1024.", "warn")
    sweep, *trials = site.submit_sweep("triage", "learning_rate", [5e-5, 1e-4, 2e-4, 4e-4])
    for trial in trials:
        site.enter(trial, 40)
        site.move(trial, State.RUNNING, started_at=time.time() - 420)
        site.train(trial, 10)
    rows_of = site.training.jobs_by_id(trials)
    ranked = sorted(trials, key=lambda trial: rows_of[trial].status.eval_loss or 0.0)
    for trial, step in zip(ranked[:2], (34, 31), strict=True):
        site.train(trial, step)
    for trial in ranked[2:]:
        site.move(trial, State.CANCELLED, f"{LEFT} 10")
    site.window({running: 260, small: 180, theirs[0]: 120})
    return running, sweep


def fill_form(page: Browser, folder: Path, **values: str) -> None:
    file = folder / "tickets.jsonl"
    file.write_text(different_rows(400), encoding="utf-8")
    page.choose_file("#training_file", file)
    for name, text in {"suffix": "support-fr", "n_epochs": "3", **values}.items():
        page.type(f"#{name}", text)
    # An earlier plan disappears as soon as the next one is requested.
    page.click("#job-form button[type=submit]")
    page.wait("document.querySelector('.plan') || document.querySelector('#problem')", 90)


def take(page: Browser, name: str, width: int, scheme: str = "light") -> None:
    page.size(width, 600)
    page.scheme(scheme)
    time.sleep(0.6)
    ending = "-dark" if scheme == "dark" else ""
    path = PICTURES / f"dashboard-{name}-{width}{ending}.png"
    page.picture(path)
    # A palette of 256 colours is as good for a page of flat colours, and a third of the size.
    with Image.open(path) as found:
        flat = found.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    flat.save(path, optimize=True)
    assert page.overflow() == [], f"{name} at {width}: {page.overflow()}"


def main() -> None:
    with TemporaryDirectory() as folder, browser(Path(folder, "profile")) as page:
        site = Site(Path(folder))
        job, sweep = fill(site)
        with serving(site.app) as url:
            page.size(1280)
            page.open(url)
            page.type("#key", site.keys["acme"])
            page.press("Enter")
            page.wait("document.querySelector('table.live')")
            hashes = {"job": f"jobs/{job}", "sweep": f"jobs/{sweep}", "new-sweep": "new"}
            for name, width in SHOWN:
                page.evaluate(f"location.hash = '#/{hashes.get(name, name)}'")
                if name == "new":
                    fill_form(page, Path(folder))
                if (name, width) == ("new-sweep", 1280):
                    fill_form(page, Path(folder), learning_rate="1e-4, 4e-4", rank="8, 64", rungs="0.25, 0.5")
                take(page, name, width)
            page.evaluate("location.hash = '#/jobs'")
            take(page, "jobs", 1280, "dark")
            page.evaluate("location.hash = '#/device'")
            take(page, "device", 1280, "dark")
        assert page.console == [], page.console
        site.close()


if __name__ == "__main__":
    main()
