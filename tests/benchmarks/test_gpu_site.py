"""The benchmark of one site as far as it goes without a GPU: its launches in Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import gpu_site, site_sweep
from benchmarks.site_case import SiteAdapters, SiteCase, made_up_case
from benchmarks.site_floor import ROUTES, Need, Rates, Timed, beside_floors, needs
from tests.interpreter import interpret

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for a GPU")

EIGHT = SiteAdapters("8 x r16", (16,) * 8)
H200 = Rates(operations=800e6, bytes=4.2e6)
SMALL = SiteAdapters("small", (2, 20), rows=40)


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> SiteCase:
    interpret(monkeypatch)
    return made_up_case(SMALL, 32, 48, 2, torch.device("cpu"), torch.float32)


def test_a_launch_needs_its_bytes_or_its_arithmetic_whichever_takes_longer() -> None:
    assert Need(bytes=8.4e6, operations=800e6).at(H200) == 2.0
    assert Need(bytes=4.2e6, operations=2400e6).at(H200) == 3.0


def test_floors_are_those_of_the_bytes_that_were_reckoned_by_hand() -> None:
    """8192 × 4096 values of 16 bits are 67 MB, 16 µs; a product of 4096 × 4096 takes 344 µs."""
    floors = {name: need.at(H200) for name, need in needs(EIGHT, 4096, 4096, shares=16).items()}
    x = 2 * 8192 * 4096 / 4.2e6
    for name in ("down", "ds, dB", "dA"):
        assert x < floors[name] < 1.2 * x, name
    for name in ("up", "add dx"):
        assert 3 * x < floors[name] < 3.2 * x, name
    assert floors["copy of x"] == pytest.approx(2 * x)
    assert floors["y = xWt"] == pytest.approx(2 * 8192 * 4096**2 / 800e6)
    assert floors["sum of ds"] == pytest.approx((16 * 4 + 2) * 8192 * 16 / 4.2e6)
    assert floors["y = xWt"] < floors["y fused"] < 1.01 * floors["y = xWt"]


def test_of_small_ranks_only_their_own_count() -> None:
    mixed, largest = (SiteAdapters("", ranks) for ranks in ((8, 64), (64, 64)))
    less, more = (needs(adapters, 4096, 4096, shares=32)["sum of ds"] for adapters in (mixed, largest))
    assert less.bytes == pytest.approx(more.bytes * 36 / 64)


def test_every_launch_runs_and_has_a_floor(case: SiteCase) -> None:
    steps = gpu_site.launches(case)
    for step in steps.values():
        step(1)
    assert set(steps) <= set(needs(SMALL, 32, 48, case.shares))
    assert {"sum of ds", *ROUTES["wide"], *ROUTES["wide, beside"]} <= set(steps)


def test_an_order_is_the_sum_of_its_launches_where_all_were_measured() -> None:
    measured = dict.fromkeys(ROUTES["fused"], 2.0)
    needed = dict.fromkeys(ROUTES["fused"], Need(bytes=4.2e6))
    found = beside_floors(measured, needed, H200)
    assert found.pop("all of fused") == Timed(12.0, 6.0)
    assert found == dict.fromkeys(measured, Timed(2.0, 1.0))


@pytest.mark.slow
def test_the_report_has_measured_and_floor_of_every_launch(
    case: SiteCase, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Only the clock and the place are not those of a GPU."""

    def once(steps: Mapping[str, Callable[[int], object]], turns: int) -> dict[str, float]:
        for step in steps.values():
            step(turns - 1)
        return dict.fromkeys(steps, 5.0)

    monkeypatch.setattr(gpu_site, "microseconds", once)
    monkeypatch.setattr(gpu_site, "SHAPES", ((32, 48),))
    here = partial(made_up_case, turns=2, device=torch.device("cpu"), dtype=torch.float32)
    monkeypatch.setattr(gpu_site, "site_case", here)
    found = gpu_site.report([SMALL], wants_breakdown=True)["32 -> 48"]
    assert found["rates"]["terabytes/s"] == pytest.approx(2 * 40 * 32 * 4 / 5.0 / 1e6)
    assert found["small"]["launches"]["down"]["measured"] == 5.0
    assert found["small"]["launches"]["all of wide"]["measured"] == 40.0
    said = capsys.readouterr().out
    assert f"down 5.0/{found['small']['launches']['down']['floor']:.1f}" in said


def test_a_kernel_that_is_not_swept_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_site", "--sweep", "--kernels", "ds_db,dq"])
    with pytest.raises(SystemExit, match="2"):
        gpu_site.main()
    assert "dq is none of y, dx, ds_db, down, dA" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "option"), [("down", None), ("ds_db", "columns 256 rows 64 warps 8 stages 2 piece 1024")]
)
def test_a_sweep_tries_every_option_of_the_kernel_that_was_asked_for(
    kernel: str, option: str | None, case: SiteCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the clock is not that of a GPU."""

    def once(steps: Mapping[str, Callable[[int], object]], turns: int, replays: int) -> dict[str, float]:
        for step in steps.values():
            step(0)
        return dict.fromkeys(steps, float(replays))

    monkeypatch.setattr(site_sweep, "microseconds", once)
    monkeypatch.setattr(site_sweep, "site_case", lambda adapters, features, outputs: case)
    found = site_sweep.sweep(SMALL, ((32, 48),), [kernel], seconds=600.0)
    tried = found["small"]["32 -> 48"]
    assert set(tried) == {kernel}
    assert option is None or option in tried[kernel]
    assert set(tried[kernel]) == {name for name, _ in site_sweep.KERNELS[kernel]()}
