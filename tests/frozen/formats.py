"""The files that users read, as data: the keys and types of what a run writes and of `plan --json`.

`python -m tests.frozen.formats` records them anew in formats.json; nothing may vanish or change its type
unannounced. A new key may come.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tests.frozen import runs

FILE = Path(__file__).parent / "formats.json"
EVERY = "*"
"""Stands for every key of a mapping whose keys are names."""
NAMED = ("jobs",)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
CONFIG_KEYS = (
    "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "target_modules",
    "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias", "modules_to_save", "fan_in_fan_out",
    "init_lora_weights", "inference_mode",
)  # fmt: skip
"""Of adapter_config.json, what PEFT and vLLM compute with; what a later PEFT adds is its own affair."""
PLANS = {
    "one device": ("--cluster", "H200"),
    "streamed": ("--cluster", "H200", "--gpu-memory", "12GiB"),
    "pipeline": ("--cluster", "2xH200", "--gpu-memory", "14GiB"),
    "streamed by two": ("--cluster", "2xH200", "--gpu-memory", "6GiB"),
    "a share each": ("--cluster", "2xA100-80G", "--gpus", "2"),
}
"""Words of `weftune plan` for every way to run the base of `CONFIG`, whose weights are 15 GiB."""


def kind_of(value: Any) -> Any:
    """The types in a JSON value; of a list, those of all its elements together."""
    match value:
        case dict():
            return {key: named(below) if key in NAMED else kind_of(below) for key, below in value.items()}
        case list():
            return [merged(map(kind_of, value))]
        case None:
            return "null"
    return type(value).__name__


def named(value: Any) -> Any:
    """As `kind_of`, of a mapping by name: all its values together."""
    return {EVERY: merged(map(kind_of, value.values()))} if isinstance(value, dict) else kind_of(value)


def merged(kinds: Iterable[Any]) -> Any:
    """One kind for several values; types that differ stand side by side."""
    whole: Any = None
    for kind in kinds:
        if whole is None or whole == kind:
            whole = kind
        elif isinstance(whole, dict) and isinstance(kind, dict):
            keys = [*whole, *(key for key in kind if key not in whole)]
            whole = {key: merged(one[key] for one in (whole, kind) if key in one) for key in keys}
        elif isinstance(whole, list) and isinstance(kind, list):
            whole = [merged(one for one in (*whole, *kind) if one is not None)]
        else:
            words = {word for one in (whole, kind) for word in str(one).split(" or ")}
            whole = " or ".join(sorted(words))
    return whole


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(output: Path) -> dict[str, Any]:
    """By kind of line: what of it the line alone has."""
    found = lines(output / "metrics.jsonl")
    kinds = {"step": "loss", "evaluation": "eval_loss"}
    assert all(sum(key in line for key in kinds.values()) == 1 for line in found), "a new kind of line"
    return {name: merged(kind_of(line) for line in found if key in line) for name, key in kinds.items()}


def tensors(path: Path) -> dict[str, list[Any]]:
    """Name → type and shape."""
    with safe_open(path, "pt") as file:
        return {
            name: [file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()]
            for name in sorted(file.keys())
        }


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def checkpoint(output: Path, job: str) -> dict[str, Any]:
    (newest, *_) = sorted((output / job / "checkpoints").glob("step-*"), reverse=True)
    return {
        "files": files(newest),
        "state": kind_of(json.loads((newest / "state.json").read_text())),
        "tensors": tensors(newest / "tensors.safetensors"),
    }


def adapter(output: Path, job: str) -> dict[str, Any]:
    folder = output / job
    config = json.loads((folder / "adapter_config.json").read_text())
    return {
        "files": files(folder),
        "config": {key: config[key] for key in CONFIG_KEYS},
        "tensors": tensors(folder / "adapter_model.safetensors"),
    }


def written(output: Path) -> dict[str, Any]:
    """What the run of `runs` writes into `output`."""
    runs.interrupt(output)
    found: dict[str, Any] = {"checkpoint": {job.name: checkpoint(output, job.name) for job in runs.jobs()}}
    runs.resume(output)
    return found | {
        "metrics.jsonl": metrics(output),
        "windows.jsonl": merged(map(kind_of, lines(output / "windows.jsonl"))),
        "status.json": kind_of(json.loads((output / "status.json").read_text())),
        "adapter": {job.name: adapter(output, job.name) for job in runs.jobs()},
    }


def plan_folder(folder: Path) -> Path:
    """A base of config.json and tokenizer only, and a jobs file."""
    from tests.base.folders import word_tokenizer

    word_tokenizer().save_pretrained(folder / "base")
    (folder / "base" / "config.json").write_text(json.dumps(CONFIG))
    row = json.dumps({"text": " ".join(["w7"] * 300)}) + "\n"
    (folder / "rows.jsonl").write_text(row * 40)
    jobs = [f"  - {{name: {name}, data: rows.jsonl, adapter: {{rank: {rank}}}}}" for name, rank in
            (("small", 8), ("large", 64))]  # fmt: skip
    (folder / "jobs.yaml").write_text("\n".join(["base: ./base", "jobs:", *jobs, ""]))
    return folder


def planned(folder: Path, way: str) -> Any:
    """`plan --json` for one way to run, in this process."""
    from weftune.cli.main import app

    file = folder / f"{way}.json"
    with suppress(SystemExit):
        app(["plan", str(folder / "jobs.yaml"), *PLANS[way], "--json", str(file)], standalone_mode=False)
    return kind_of(json.loads(file.read_text()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        here = Path(made)
        folder = plan_folder(here)
        recorded = written(here / "out") | {"plan --json": {way: planned(folder, way) for way in PLANS}}
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")
    sys.stdout.write(f"{FILE}\n")
