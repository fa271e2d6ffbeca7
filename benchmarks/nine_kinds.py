"""Jobs of all kinds in the same microbatches on the demo base: each against its solo run, and against PEFT.

Every job trains on the same rows, in float32 on the CPU. Compared are the losses of all steps: the largest
difference between the job together and alone, and between the job and PEFT where that has the kind, over
the loss where that is above 1. PEFT starts from the very adapter that the job starts from, as Weftune saves
it, and pads its batches.

    python -m benchmarks.nine_kinds [--steps 4] [--batch-size 2] [--kinds lora,dora,…] [--model FOLDER]
        [--rows FILE] [--json FILE]
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from benchmarks.cpu_quickstart import JOBS as QUICKSTART
from benchmarks.cpu_quickstart import padded
from benchmarks.folder import read_lines
from benchmarks.recorder import Recorder
from weftune.adapters.folder import WEIGHTS
from weftune.adapters.kind import JobAdapter
from weftune.adapters.kinds import KINDS
from weftune.adapters.registry import get_kind
from weftune.base.load import load_base, load_plain, load_tokenizer
from weftune.base.model import Base
from weftune.base.spec import DEMO, BaseSpec
from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned
from weftune.core.files import cache_folder
from weftune.jobs.spec.spec import JobSpec
from weftune.plan.program.program import Program
from weftune.run.training.schedule import learning_rate
from weftune.run.training.state import new_training
from weftune.trainer.job import PreparedJob, prepare_job

CPU = torch.device("cpu")
ROWS = QUICKSTART.parent / "openbookqa.jsonl"
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"rank": 8},
    "dora": {"rank": 8},
    "vera": {"rank": 64},
    # The exact SVD of all linears takes minutes here, and PEFT makes it again.
    "pissa": {"rank": 8, "targets": ["k_proj", "v_proj"]},
    "ia3": {},
    "bottleneck": {"size": 32},
    "prompt": {"num_virtual_tokens": 8},
    "prefix": {"num_virtual_tokens": 8},
    "diff": {"targets": ["v_proj"]},
}
CLOSE = 1e-5
KINDS_SHARED, SHARE_BAR = 3, 0.8


@dataclass(frozen=True, slots=True)
class Compared:
    kind: str
    losses: Sequence[float]
    solo: float
    """The largest difference from the solo run."""
    peft: float | None
    """And from PEFT; None where it has no such kind."""


def train(
    base: Base, tokenizer: Any, jobs: Sequence[JobSpec]
) -> tuple[dict[str, list[float]], list[Program]]:
    """The losses of every job, and what was run."""
    with tempfile.TemporaryDirectory() as name:
        trainer = Recorder(base, output=Path(name) / "out", tokenizer=tokenizer)
        for job in jobs:
            trainer.add(job)
        ended = trainer.run()
        assert all(one.state == "succeeded" for one in ended.values()), ended
        lines = [one for one in read_lines(Path(name) / "out" / "metrics.jsonl") if "loss" in one]
    return {
        job.name: [one["loss"] for one in lines if one["job"] == job.name] for job in jobs
    }, trainer.programs


def share_of_mixed(programs: Sequence[Program]) -> float:
    """Of the microbatches that train: those that hold three kinds or more. Jobs are called as their kinds."""
    kinds = [len(set(one.jobs)) for program in programs for one in program.microbatches]
    return sum(count >= KINDS_SHARED for count in kinds) / len(kinds)


def write_start(folder: Path, base: Base, job: PreparedJob) -> Path:
    """The adapter that the job starts from, as PEFT takes it."""
    spec = job.spec.adapter
    adapter = JobAdapter(job.name, spec, job.spec.seed)
    begun = new_training(adapter, job.recipe, base.shape.sites, base.dtype, CPU, frozen=base.weight_reader())
    kind = get_kind(spec.kind)
    kind.save(folder, spec, begun.layout.parameter_views(begun.master), base.shape.sites, DEMO)
    return folder


def peft_model(plain: PreTrainedModel, base: Base, job: PreparedJob, folder: Path) -> nn.Module:
    model, adapter = copy.deepcopy(plain), job.spec.adapter
    if adapter.kind == "pissa":
        # PEFT changes the base, so that there is nothing to start from but its own decomposition.
        rank, alpha = adapter.rank, int(adapter.alpha)  # type: ignore[attr-defined]
        targets = list(adapter.targets)
        config = LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="pissa", target_modules=targets)
        return get_peft_model(model, config)
    start = write_start(folder / job.name, base, job)
    # `PeftModel.from_pretrained` gives virtual tokens for inference only.
    config = PeftConfig.from_pretrained(str(start))
    config.inference_mode, config.base_model_name_or_path = False, None
    made = get_peft_model(model, config)
    set_peft_model_state_dict(made, load_file(start / WEIGHTS))
    return made


def with_peft(model: nn.Module, job: PreparedJob) -> list[float]:
    model.eval()
    trainable = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(
        trainable, lr=job.recipe.learning_rate, weight_decay=job.recipe.weight_decay
    )
    losses = []
    for step in range(1, job.recipe.steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(job.recipe, step)
        ids, present, labels = padded(job, step)
        loss = model(input_ids=ids, attention_mask=present, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trainable, job.recipe.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def apart(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(one - other) / max(1.0, abs(other)) for one, other in zip(mine, theirs, strict=True))


def job_of(kind: str, rows: Path, steps: int, batch_size: int) -> JobSpec:
    adapter = {"kind": kind, **ADAPTERS[kind]}
    return JobSpec(
        name=kind, data=str(rows), adapter=adapter, steps=steps, batch_size=batch_size, learning_rate=1e-3
    )


def in_peft(kind: str) -> bool:
    return KINDS[kind].peft_type is not None


def compare(spec: BaseSpec, jobs: Sequence[JobSpec]) -> tuple[list[Compared], float]:
    """Every job together, alone and by PEFT; and the share of microbatches with three kinds or more."""
    base, plain, tokenizer = load_base(spec, CPU), load_plain(spec, CPU), load_tokenizer(spec)
    together, programs = train(base, tokenizer, jobs)
    found = []
    for job in jobs:
        solo, _ = train(base, tokenizer, [job])
        by_peft = None
        if in_peft(job.name):
            ready = prepare_job(job, 0, tokenizer, base.shape, cache_folder() / "tokens")
            with tempfile.TemporaryDirectory() as folder:
                by_peft = with_peft(peft_model(plain, base, ready, Path(folder)), ready)
        mine = together[job.name]
        other = None if by_peft is None else apart(mine, by_peft)
        found.append(Compared(job.name, mine, apart(mine, solo[job.name]), other))
        print(json.dumps(asdict(found[-1])), flush=True)
    return found, share_of_mixed(programs)


def main() -> None:
    parser = arguments(__doc__ or "")
    known = [kind for kind in ADAPTERS if kind in KINDS]
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(known), help=f"some of {','.join(known)}")
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--rows", type=Path, default=ROWS)
    options = parser.parse_args()
    jobs = [
        job_of(kind, options.rows, options.steps, options.batch_size) for kind in options.kinds.split(",")
    ]
    found, share = compare(BaseSpec(model=options.model, dtype="float32"), jobs)
    rows = [
        (one.kind, f"{one.losses[0]:.4f} → {one.losses[-1]:.4f}", f"{one.solo:.1e}", _told(one.peft))
        for one in found
    ]
    print("\n" + aligned(("kind", "loss", "from its solo run", "from PEFT"), rows))
    verdict = "reached" if share >= SHARE_BAR else "missed"
    print(
        f"{share:.0%} of the microbatches hold {KINDS_SHARED} kinds or more (bar {SHARE_BAR:.0%}: {verdict})"
    )
    close = all(max(one.solo, one.peft or 0.0) <= CLOSE for one in found)
    print(f"differences of losses are {'' if close else 'not '}all within {CLOSE:g}")
    finish({"share": share, "kinds": [asdict(one) for one in found]}, options.json)


def _told(value: float | None) -> str:
    return "PEFT has none" if value is None else f"{value:.1e}"


if __name__ == "__main__":
    main()
