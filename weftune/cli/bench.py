"""`weftune bench`: compare Weftune with other tools that do the same training, on this machine's GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from weftune.errors import UserError

WEFTUNE, FROZEN = "Weftune, together", "frozen base"
"""Names of the two rows with which a benchmark compares all other rows: Weftune, and the frozen base
alone."""


class BenchShape(StrEnum):
    SMALL = "1b"
    LARGE = "8b"


@dataclass(frozen=True, slots=True)
class BenchPart:
    """A benchmark of the package `weftune.bench`, and how `weftune bench` runs it."""

    title: str
    module: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchLine:
    """The result of a benchmark as a line of output. A benchmark that does not compare times has only a
    verdict."""

    title: str
    milliseconds: float | None = None
    ratio_to_frozen: float | None = None
    alternative: str = ""
    speedup: float | None = None
    """Time of the fastest alternative to Weftune, divided by Weftune's time. None if the benchmark does not
    compare times."""
    verdict: str = ""


def bench(
    shape: Annotated[
        BenchShape, typer.Option(help="Shape of the base: that of Llama 8B or TinyLlama 1.1B.")
    ] = (BenchShape.LARGE),
    quick: Annotated[
        bool, typer.Option("--quick", help="Run only the first part, which takes a minute or two.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a small model on which quality is compared.", show_default=False),
    ] = None,
    toy: Annotated[
        bool, typer.Option("--toy", help="Run tiny sizes on the CPU, to check that it runs.")
    ] = False,
) -> None:
    """Measure Weftune and the fastest alternatives on this machine's GPU."""
    if not toy:
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                "This machine has no CUDA device that torch can use, so there is nothing to measure."
            )
    lines, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(benchmark_parts(shape, quick, model)):
            found = run_part(part, Path(folder) / f"{number}.json", toy)
            if found is None:
                failed.append(part.title)
            else:
                lines.append(result_line(part, found))
    print_parts(lines, failed)
    if failed:
        raise typer.Exit(1)


def benchmark_parts(shape: BenchShape, quick: bool, model: Path | None) -> list[BenchPart]:
    base = ("--shape", shape.value)
    first = BenchPart("8 jobs, 1×1024 tokens each", "gpu_step", (*base, "--batch", "1x1024"))
    if quick:
        few = ("--baselines", "frozen,peft,peft-bf16", "--blocks", "3")
        return [BenchPart(first.title, first.module, (*first.options, *few))]
    alone = ("--jobs", "1", "--batch", "8x1024", "--baselines", "frozen,peft,peft-bf16,liger")
    quality = (
        [] if model is None else [BenchPart("quality", "gpu_quality", ("--model", str(model.absolute())))]
    )
    return [
        first,
        BenchPart("8 jobs, 4×64 tokens each", "gpu_step", (*base, "--batch", "4x64")),
        BenchPart("1 job, 8×1024 tokens", "gpu_step", (*base, *alone)),
        BenchPart("32 jobs, real lengths", "gpu_lengths", base),
        BenchPart("joins and leaves", "gpu_churn"),
        *quality,
    ]


def run_part(part: BenchPart, file: Path, toy: bool) -> Mapping[str, Any] | None:
    """Run a benchmark and return its numbers, or None if it failed. Its output goes to the terminal."""
    typer.echo(f"\n{part.title}")
    words = [*part.options, *(["--toy"] if toy else []), "--json", str(file)]
    module = f"weftune.bench.{part.module}"
    done = subprocess.run([sys.executable, "-m", module, *words], check=False)
    if done.returncode != 0 or not file.is_file():
        return None
    numbers: dict[str, Any] = json.loads(file.read_text())
    return numbers


def result_line(part: BenchPart, numbers: Mapping[str, Any]) -> BenchLine:
    if "rows" not in numbers:
        return BenchLine(part.title, verdict=numbers["verdict"])
    rows: Sequence[Mapping[str, Any]] = numbers["rows"]
    seconds = {row["name"]: row["seconds"] for row in rows if row["seconds"] is not None}
    if WEFTUNE not in seconds:
        return BenchLine(part.title, verdict=next(row["note"] for row in rows if row["name"] == WEFTUNE))
    rival = numbers["strongest"] or ""
    return BenchLine(
        part.title,
        milliseconds=seconds[WEFTUNE] * 1e3,
        ratio_to_frozen=seconds[WEFTUNE] / seconds[FROZEN] if FROZEN in seconds else None,
        alternative=rival,
        speedup=seconds[rival] / seconds[WEFTUNE] if rival else None,
    )


def print_parts(lines: Sequence[BenchLine], failed_parts: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("", "ms", "× frozen base", "strongest other way", "× Weftune"):
        table.add_column(title, justify="left" if title in ("", "strongest other way") else "right")
    for line in lines:
        milliseconds = "" if line.milliseconds is None else f"{line.milliseconds:,.1f}"
        over_frozen = "" if line.ratio_to_frozen is None else f"{line.ratio_to_frozen:.2f}"
        speedup = "" if line.speedup is None else f"{line.speedup:.2f}"
        table.add_row(line.title, milliseconds, over_frozen, line.alternative or line.verdict, speedup)
    console = Console()
    console.print()
    console.print(table)
    if compared := [line for line in lines if line.speedup is not None]:
        least = min(compared, key=lambda line: line.speedup or 0.0)
        console.print(
            f"\nOf the other ways, the strongest against Weftune is {least.alternative} with {least.title}: "
            f"it takes {least.speedup:.2f} × Weftune's time.",
            highlight=False,
        )
    for title in failed_parts:
        console.print(f"Failed: {title}; its output above gives the reason.", highlight=False)
