"""What `weftune train` predicts of its windows beside what it measures, while jobs come and go.

Jobs with samples of different lengths, ranks and batch sizes start, join and leave; every window's time and
peak memory is predicted before it runs. The first is predicted from the device's profile alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from weftune.adapters.lora.spec import LoraSpec
from weftune.base.load import load_base, load_tokenizer
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, build
from weftune.bench.table import aligned
from weftune.bench.timing import Hardware
from weftune.data.spec import EvalSpec
from weftune.jobs.spec.spec import JobSpec
from weftune.plan.cost.profile import write_profile
from weftune.report.effort import COLUMNS, error_sentences, prediction_errors, window_rows
from weftune.report.read import read_run
from weftune.run.events import Evaluated, Stepped
from weftune.run.profile import measure_profile
from weftune.trainer.options import Options
from weftune.trainer.trainer import Trainer

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories15m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A job of the benchmark."""

    name: str
    joins: int
    """At this step of the first job."""
    steps: int
    batch_size: int
    rank: int
    least: int
    most: int
    """Tokens of its samples lie between."""
    evaluates: bool = False
    """Whether it has held-out samples."""


PLANS = (
    Plan(name="short", joins=0, steps=64, batch_size=8, rank=8, least=16, most=48),
    Plan(name="long", joins=0, steps=28, batch_size=2, rank=16, least=128, most=240),
    Plan(name="evaluated", joins=8, steps=32, batch_size=4, rank=8, least=32, most=96, evaluates=True),
    Plan(name="wide", joins=16, steps=20, batch_size=4, rank=64, least=48, most=160),
    Plan(name="late", joins=32, steps=24, batch_size=6, rank=16, least=24, most=200),
)


def spec(plan: Plan, folder: Path, vocabulary: int, scale: int, steps: float) -> JobSpec:
    """Its rows written out as tokens, so that lengths are what the plan says."""
    drawn = random.Random(plan.name)
    path = folder / f"{plan.name}.jsonl"
    with path.open("w") as stream:
        for _ in range(64):
            length = scale * drawn.randint(plan.least, plan.most)
            tokens = [drawn.randrange(3, vocabulary) for _ in range(length)]
            prompt = length // 4
            stream.write(
                json.dumps({"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]}) + "\n"
            )
    return JobSpec(
        name=plan.name,
        data=str(path),
        eval=EvalSpec(fraction=0.1, every=0.25) if plan.evaluates else None,
        adapter=LoraSpec(rank=plan.rank, alpha=2.0 * plan.rank),
        steps=max(4, int(steps * plan.steps)),
        batch_size=plan.batch_size,
    )


def run(base: Base, tokenizer: Any, scale: int, steps: float, options: Options, folder: Path) -> None:
    """Train all plans, in `out` of the folder."""
    vocabulary = min(base.shape.vocabulary, len(tokenizer))
    specs = {plan.name: spec(plan, folder, vocabulary, scale, steps) for plan in PLANS}
    waiting = [plan for plan in PLANS if plan.joins]
    trainer = Trainer(base, output=folder / "out", tokenizer=tokenizer, options=options)
    for plan in PLANS:
        if not plan.joins:
            trainer.add(specs[plan.name])

    def join(event: Stepped | Evaluated) -> None:
        due = [plan for plan in waiting if event.step >= steps * plan.joins]
        if event.job == PLANS[0].name:
            for plan in due:
                waiting.remove(plan)
                trainer.add(specs[plan.name])

    results = trainer.run(join)
    assert all(result.state == "succeeded" for result in results.values()), results


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """For a base of random weights: rows come as tokens, so that it only has to be saved."""
    words = {f"<{number}>": number for number in range(size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<0>")), eos_token="<1>", pad_token="<2>"
    )


def opened(asked: argparse.Namespace, device: torch.device) -> tuple[Base, Any]:
    if asked.shape or asked.toy:
        size = SIZES["toy" if asked.toy else asked.shape]
        hardware = Hardware(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        base = Base.from_model(build(size, hardware), BaseSpec(model=f"random {size.name}"), device)
        return base, word_tokenizer(1000)
    wanted = BaseSpec(model=asked.base)
    return load_base(wanted, device), load_tokenizer(wanted)


def fresh(device: torch.device) -> None:
    """Forget the peak of measuring the profile: the run's own is compared."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def forecast(asked: argparse.Namespace, device: torch.device, bar: float) -> None:
    base, tokenizer = opened(asked, device)
    steps = 0.25 if asked.toy else asked.steps
    with tempfile.TemporaryDirectory(prefix="weftune-forecast-") as folder:
        profile = None if asked.no_profile else Path(folder) / "profile.json"
        if profile is not None:
            made = measure_profile(base.model.config, base.shape, base.spec.model, device, lambda *_: None)
            write_profile(profile, made)
            fresh(device)
            print(f"The profile took {made.seconds:.1f} s.\n")
        options = Options(capacity=asked.capacity, profile=profile)
        run(base, tokenizer, asked.scale, steps, options, Path(folder))
        windows = read_run(Path(folder) / "out").windows
    print(aligned(COLUMNS, window_rows(windows)), "\n")
    for sentence in error_sentences(windows):
        print(sentence)
    changed, unsettled = (
        prediction_errors(windows, includes_compilation=False),
        prediction_errors(windows, includes_compilation=True),
    )
    reached = all(error is not None and error <= bar for error in (changed.seconds, changed.peak))
    print(f"The bar is {bar:.0%}, for time and for memory: {'kept' if reached else 'not kept'}.")
    numbers = {
        "base": base.spec.model,
        "bar": bar,
        "kept": reached,
        "changed": asdict(changed),
        "unsettled": asdict(unsettled),
        "windows": [asdict(window) for window in windows],
    }
    finish(numbers, asked.json)


def forecast_arguments(description: str) -> argparse.ArgumentParser:
    parser = arguments(description)
    parser.add_argument("--base", default=str(STORIES), help="a base as jobs files name it")
    parser.add_argument("--shape", choices=list(SIZES), help="random weights of this shape instead")
    parser.add_argument("--scale", type=int, default=1, help="all samples so many times as long")
    parser.add_argument("--steps", type=float, default=1.0, help="every job so many times as long")
    parser.add_argument("--capacity", type=int, help="tokens of a microbatch, at most")
    parser.add_argument("--no-profile", action="store_true", help="predict from the run's own passes alone")
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU: does it run at all")
    return parser
