"""`weftune doctor`: show what this machine supports, which packages are missing, and how to install them."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weftune.cli.early import DeviceOption

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from weftune.core.device_class import DeviceClass
    from weftune.ops.lora.choice import ChoiceFile

GIB = 2**30
SCARCE_DISK = 2 * GIB
PYTHON = (3, 11)


class Verdict(StrEnum):
    OK = "ok"
    ABSENT = "absent"
    """Verdict on something that is missing but optional: training works without it."""
    MISSING = "missing"
    """Verdict on something that is missing and required: training does not work without it."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    verdict: Verdict
    finding: str
    remedy: str = ""
    """Command that installs the missing part, or a sentence that says how to get it."""


def doctor(
    profile: Annotated[
        bool, typer.Option("--profile", help="Measure passes over a base on this device, for predictions.")
    ] = False,
    base: Annotated[str, typer.Option(help="With --profile: the base, given as in a jobs file.")] = "demo",
    device: DeviceOption = None,
    output: Annotated[
        Path | None, typer.Option(help="With --profile: file to write. Default: a file in the cache.")
    ] = None,
) -> None:
    """Show what this machine can do, what is missing and how to get it."""
    if profile:
        from weftune.cli.profile import make_profile

        make_profile(base, device, output)
        return
    checks = list(run_checks())
    print_checks(checks)
    raise typer.Exit(exit_code(checks))


def run_checks() -> Iterator[Check]:
    yield python_check()
    yield from package_checks()
    yield from kind_checks()
    yield from device_checks()
    yield processor_check()
    yield memory_check()
    yield disk_check()
    yield demo_check()


def exit_code(checks: list[Check]) -> int:
    return int(any(check.verdict is Verdict.MISSING for check in checks))


def print_checks(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {Verdict.OK: "green", Verdict.ABSENT: "yellow", Verdict.MISSING: "bold red"}
    table = Table(box=None, pad_edge=False)
    for title in ("", "verdict", "found", "how to get it"):
        table.add_column(title, overflow="fold")
    for check in checks:
        verdict = Text(check.verdict, style=colours[check.verdict])
        table.add_row(Text(check.name), verdict, Text(check.finding), Text(check.remedy))
    console = Console()
    console.print(table)
    lacking = [check.name for check in checks if check.verdict is Verdict.MISSING]
    ending = f"Training cannot run: {', '.join(lacking)} missing." if lacking else "Training can run here."
    console.print(f"\n{ending}", highlight=False)


def python_check() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info >= PYTHON:
        return Check("Python", Verdict.OK, found)
    return Check("Python", Verdict.MISSING, found, f"install Python {PYTHON[0]}.{PYTHON[1]} or newer")


def package_checks() -> Iterator[Check]:
    """Yield a check for every package in Weftune's own metadata, required ones before optional ones."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Check("packaging", Verdict.MISSING, "", "pip install packaging")
        return
    try:
        lines = metadata.requires("weftune") or []
    except metadata.PackageNotFoundError:
        found = "not installed, but run from its folder: what it needs is not known"
        yield Check("weftune", Verdict.ABSENT, found, "pip install --editable . in its folder")
        return
    requirements = [Requirement(line) for line in lines]
    extras = ("", "gpu", "demo", "tensorboard", "wandb", "mlflow")
    checked_names: set[str] = set()
    for extra in extras:
        for package in requirements:
            applies = package.marker is None or package.marker.evaluate({"extra": extra})
            if applies and package.name not in checked_names:
                checked_names.add(package.name)
                yield package_check(package, optional=package.marker is not None)


def package_check(requirement: Requirement, optional: bool = False) -> Check:
    lacking = Verdict.ABSENT if optional else Verdict.MISSING
    mend = f'pip install "{requirement.name}{requirement.specifier}"'
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Check(requirement.name, lacking, "not installed", mend)
    if not requirement.specifier.contains(found, prereleases=True):
        return Check(requirement.name, lacking, f"{found}, but {requirement.specifier} is needed", mend)
    return Check(requirement.name, Verdict.OK, found)


def kind_checks() -> Iterator[Check]:
    """Yield a check for each adapter kind that another package provides and that cannot be used."""
    from weftune.adapters.kinds import BROKEN

    for name, broken in BROKEN.items():
        yield Check(f"kind {name}", Verdict.ABSENT, broken.problem, broken.repair_command)


def device_checks() -> Iterator[Check]:
    try:
        import torch
    except Exception as error:  # a torch whose libraries do not load raises far more than ImportError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield Check("torch loads", Verdict.MISSING, reason, 'pip install --force-reinstall "torch>=2.11"')
        return
    if not torch.cuda.is_available():
        has_driver = shutil.which("nvidia-smi") is not None
        mend = "install a torch build for this machine's CUDA (pytorch.org tells which)" if has_driver else ""
        yield Check("GPU", Verdict.ABSENT, "no CUDA device that torch can use; jobs train on the CPU", mend)
        return
    from weftune.core.device_class import get_device_class

    for index in range(torch.cuda.device_count()):
        yield gpu_check(torch, index)
        yield class_check(get_device_class(torch.device("cuda", index)), index)
        if importlib.util.find_spec("triton") is not None:
            from weftune.ops.lora.choice import choice_file

            if (file := choice_file(torch.device("cuda", index))) is not None:
                yield kernel_choice_check(file, index)
    has_varlen = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    mend = "" if has_varlen else 'pip install "torch>=2.11"'
    verdict = Verdict.OK if has_varlen else Verdict.ABSENT
    yield Check("varlen attention", verdict, "in torch" if has_varlen else "not in this torch", mend)


def gpu_check(torch: Any, index: int) -> Check:
    card = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    # Without emulation: a card that only emulates bfloat16 trains slower in it than in float32.
    has_bf16 = torch.version.hip is not None or (card.major, card.minor) >= (8, 0)
    found = (
        f"{card.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, capability {card.major}.{card.minor}, "
        f"{'bfloat16' if has_bf16 else 'no bfloat16'}"
    )
    mend = "" if has_bf16 else "write base: {model: ..., dtype: float32}"
    return Check(f"GPU {index}", Verdict.OK, found, mend)


def class_check(device_class: DeviceClass, index: int) -> Check:
    """Return a check that reports the device class (group of GPU models) for which kernels are selected, and
    whether the kernels have been tested on a GPU of this class."""
    from weftune.core.device_class import TEST_COMMAND

    name = f"GPU {index} class"
    if not device_class.has_kernels:
        finding = (
            f"{device_class.name}: no kernels for it; everything is computed by plain torch, which is slower"
        )
        return Check(name, Verdict.ABSENT, finding)
    selected = f"{device_class.architecture}, {device_class.name}"
    if device_class.is_tested:
        return Check(name, Verdict.OK, f"{selected}; kernels are tested on such a GPU")
    finding = f"{selected}; kernels compile for it, but have not been tested on such a GPU"
    return Check(name, Verdict.ABSENT, finding, f"to test them, run `{TEST_COMMAND}` in a clone of Weftune")


def kernel_choice_check(file: ChoiceFile, index: int) -> Check:
    """Return a check that reports for how many shapes of linears the fastest sequence of kernels has already
    been measured and saved, so that training need not measure it."""
    return Check(f"GPU {index} orders", Verdict.OK, f"{len(file.read())} shapes measured, in {file.path}")


def processor_check() -> Check:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    return Check("CPU cores", Verdict.OK, f"{usable}" if usable == total else f"{usable} of {total}")


def memory_check() -> Check:
    try:
        import psutil
    except ImportError:
        return Check("memory", Verdict.ABSENT, "cannot be read without psutil", "pip install psutil")
    memory = psutil.virtual_memory()
    return Check("memory", Verdict.OK, f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free")


def disk_check() -> Check:
    from weftune.core.files import cache_folder

    cache = cache_folder()
    return cache_check(cache, shutil.disk_usage(_nearest_existing(cache)).free)


def cache_check(cache: Path, free_bytes: int) -> Check:
    found = f"{cache}, {free_bytes / GIB:.1f} GiB free"
    if not os.access(_nearest_existing(cache), os.W_OK):
        mend = "set WEFTUNE_CACHE to a folder that can be written"
        return Check("cache", Verdict.MISSING, f"{found}, not writable", mend)
    if free_bytes < SCARCE_DISK:
        return Check("cache", Verdict.ABSENT, found, "set WEFTUNE_CACHE to a folder on a disk with more room")
    return Check("cache", Verdict.OK, found)


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def demo_check() -> Check:
    try:
        from weftune.base.load import DEMO_INSTALL, DEMO_PACKAGE
    except ImportError as error:
        return Check("demo weights", Verdict.ABSENT, f"cannot tell: {error}")
    if importlib.util.find_spec(DEMO_PACKAGE) is None:
        return Check("demo weights", Verdict.ABSENT, "not installed", DEMO_INSTALL)
    return Check("demo weights", Verdict.OK, "SmolLM2-135M-Instruct")
