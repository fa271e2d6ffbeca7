from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from weftune.cli.doctor import (
    GIB,
    Check,
    Verdict,
    cache_check,
    class_check,
    exit_code,
    kernel_choice_check,
    package_check,
    package_checks,
    run_checks,
)
from weftune.cli.main import app
from weftune.core.device_class import CLASSES, OLDER
from weftune.ops.lora.choice import ChoiceFile, MeasuredPlan
from weftune.ops.lora.tiling import ProductPlan


def test_a_machine_that_can_train_gets_exit_code_0_and_a_row_for_everything() -> None:
    done = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.stdout
    assert "Training can run here." in done.stdout
    for name in ("Python", "torch", "transformers", "gguf", "wandb", "CPU cores", "memory", "cache", "demo"):
        assert name in done.stdout
    assert metadata.version("torch") in done.stdout


def test_a_missing_package_is_named_with_the_command_that_gets_it() -> None:
    check = package_check(Requirement("no-such-package>=1.5"))
    assert check == Check(
        "no-such-package", Verdict.MISSING, "not installed", 'pip install "no-such-package>=1.5"'
    )
    assert exit_code([check]) == 1


def test_a_package_out_of_range_is_missing_and_an_optional_one_only_absent() -> None:
    needed = package_check(Requirement("typer>=999"))
    assert needed.verdict is Verdict.MISSING
    assert needed.finding == f"{metadata.version('typer')}, but >=999 is needed"
    assert needed.remedy == 'pip install "typer>=999"'
    optional = package_check(Requirement("typer>=999"), optional=True)
    assert optional.verdict is Verdict.ABSENT
    assert exit_code([optional]) == 0


def test_every_row_that_lacks_something_a_command_can_get_says_how() -> None:
    for check in run_checks():
        assert check.verdict is Verdict.OK or check.remedy or check.name == "GPU"


def test_a_cache_without_room_says_where_else_to_put_it(tmp_path: Path) -> None:
    cache = tmp_path / "not" / "yet" / "there"
    assert cache_check(cache, 10 * GIB).verdict is Verdict.OK
    scarce = cache_check(cache, GIB)
    assert scarce.verdict is Verdict.ABSENT
    assert "WEFTUNE_CACHE" in scarce.remedy


def test_the_orders_known_of_a_gpu_are_counted_and_their_file_is_named(tmp_path: Path) -> None:
    file = ChoiceFile(tmp_path, "card", "9.0", "2.11", "3.6", "00")
    assert kernel_choice_check(file, 1).finding == f"0 shapes measured, in {file.path}"
    file.add(
        "a shape",
        MeasuredPlan(ProductPlan.wide_beside, {ProductPlan.wide_beside: 1.0}),
        (ProductPlan.wide_beside,),
    )
    check = kernel_choice_check(file, 1)
    assert (check.name, check.verdict) == ("GPU 1 orders", Verdict.OK)
    assert check.finding == f"1 shapes measured, in {file.path}"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_missing(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    check = cache_check(tmp_path / "cache", 10 * GIB)
    tmp_path.chmod(0o700)
    assert check.verdict is Verdict.MISSING


def test_run_from_its_folder_without_an_installation_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", nothing)
    (check,) = package_checks()
    assert (check.name, check.verdict) == ("weftune", Verdict.ABSENT)
    assert "not installed" in check.finding
    assert "pip install" in check.remedy
    assert exit_code([check]) == 0


@pytest.mark.parametrize("found", CLASSES, ids=lambda one: one.architecture)
def test_a_class_of_gpus_that_is_not_tested_is_named_with_the_command_that_tests_it(found):
    check = class_check(found, 1)
    assert check.name == "GPU 1 class"
    assert check.finding.startswith(f"{found.architecture}, {found.name}; ")
    assert (check.verdict is Verdict.OK) == ("have not been tested" not in check.finding) == found.is_tested
    assert ("`make smoke-gpu`" in check.remedy) == (not found.is_tested)


def test_a_gpu_without_kernels_is_said_to_be_slow_and_nothing_is_missing():
    check = class_check(OLDER, 0)
    assert check.verdict is Verdict.ABSENT
    assert "plain torch" in check.finding
