"""What the training tests share: tiny bases with a tokenizer, random rows, and running jobs on them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import weftune.base.model
from benchmarks.recorder import Recorder
from tests.families import VOCABULARY, tiny
from tests.oracle import Sample, Trained
from weftune import JobSpec, Options, Result
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import A, weight_names
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.data.samples import SampleOrder
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import new_training

CPU = torch.device("cpu")
CHECKED: set[tuple[str, torch.dtype, int]] = set()
"""Families, dtypes and seeds of which a tiny base has been checked."""
SHARED = Path(__file__).parents[2] / "shared"
STORIES = Path(os.environ.get("WEFTUNE_STORIES", SHARED / "models" / "stories15m"))
"""A real small model; the variable points to a copy of it where there is no shared folder."""


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, VOCABULARY))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def base(family: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0) -> Base:
    """A tiny base. Of equal ones only the first is checked: its check takes longer than to make another."""
    spec = BaseSpec(model=f"tiny/{family}", dtype=str(dtype).removeprefix("torch."))
    with pytest.MonkeyPatch.context() as patch:
        if (family, dtype, seed) in CHECKED:
            patch.setattr(weftune.base.model, "check_packing", lambda *_: None)
        made = Base.from_model(tiny(family, dtype, seed), spec, CPU)
    CHECKED.add((family, dtype, seed))
    return made


def samples(count: int, seed: int = 0, shortest: int = 4, longest: int = 20) -> list[Sample]:
    """Random tokens, the first third of each sample not supervised."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(rng.integers(shortest, longest + 1))
        tokens = rng.integers(4, VOCABULARY, length).tolist()
        made.append((tokens, [i >= max(1, length // 3) for i in range(length)]))
    return made


def questions(count: int, characters: int = 160) -> list[dict[str, str]]:
    """Real short texts; tests that use them skip where the shared data is absent."""
    lines = (SHARED / "data" / "gsm8k_train.jsonl").read_text().split("\n")[:count]
    return [{"text": json.loads(line)["messages"][0]["content"][:characters]} for line in lines]


def rows(made: Sequence[Sample]) -> list[dict[str, Any]]:
    return [
        {"input_ids": tokens, "labels": [t if m else -100 for t, m in zip(tokens, mask, strict=True)]}
        for tokens, mask in made
    ]


def batches(made: Sequence[Sample], batch_size: int, seed: int, steps: int) -> list[list[Sample]]:
    order = SampleOrder(len(made), batch_size, seed)
    return [[made[i] for i in order.batch(step)] for step in range(1, steps + 1)]


def trainer(model: Base, output: Path, jobs: Sequence[JobSpec], **keys: Any) -> Recorder:
    made = Recorder(model, output=output, tokenizer=tokenizer(), **keys)
    for job in jobs:
        made.add(job)
    return made


def train(model: Base, output: Path, jobs: Sequence[JobSpec], **options: Any) -> dict[str, Result]:
    return trainer(model, output, jobs, options=Options(**options)).run()


def losses(output: Path, job: str) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["job"] == job and "loss" in line]


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def start(model: Base, job: JobSpec) -> dict[str, torch.Tensor]:
    """The weights a job begins with, under PEFT's names."""
    training = new_training(
        JobAdapter(job.name, job.adapter, job.seed), Recipe(1), model.shape.sites, model.dtype, CPU
    )
    named = {}
    for (site, name), value in training.layout.parameter_views(training.master).items():
        a_name, b_name = weight_names(site)
        named[a_name if name == A else b_name] = value if name == A else value.T
    return named


def trained(output: Path, job: str, start: Mapping[str, torch.Tensor]) -> Trained:
    return Trained(losses(output, job), dict(start), adapter(output / job))
