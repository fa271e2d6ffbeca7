"""The validation loss of an adapter that was trained on a quantised base, merged into that base's dequantised
weights and into the original ones.

Shapes: L tokens of a sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from weftune.base.load import best_device, inspect, load_tokenizer
from weftune.base.spec import BaseSpec, Dtype
from weftune.core.files import cache_folder
from weftune.data.prepare import prepare
from weftune.data.samples import Samples
from weftune.data.spec import DataSpec, EvalSpec, Source
from weftune.errors import UserError
from weftune.jobs.store.job_file import read_job_file
from weftune.trainer.export import INTO, merged_model


def merged_losses(folder: Path, base: BaseSpec, dtype: Dtype | None = None) -> dict[str, float]:
    """Return a mapping from what the adapter was merged into to the mean loss per supervised token of the
    rows that the job was evaluated on; empty if those are no longer known."""
    samples = evaluation_rows(folder, base)
    if samples is None:
        return {}
    found: dict[str, float] = {}
    for into in INTO:
        model, device = merged_model(folder, base, dtype, into), best_device()
        torch.nn.Module.to(model, device)
        found[into] = mean_loss(model.eval(), samples, device)
    return found


def evaluation_rows(folder: Path, base: BaseSpec) -> Samples | None:
    """Return the rows that the job in `folder` was evaluated on; None if they are unknown or have changed."""
    file = read_job_file(folder)
    record: Mapping[str, Any] = {} if file is None else file.values
    job, known = record.get("job") or {}, (record.get("data") or {}).get("evaluation_fingerprint")
    if known is None or not job.get("data", {}).get("path"):
        return None
    try:
        data, held_out = _data_spec(job["data"]), EvalSpec(**job["eval"])
        cache, context = cache_folder() / "tokens", inspect(base).context
        samples = prepare(data, held_out, load_tokenizer(base), cache, context=context).evaluation
    except (UserError, TypeError, KeyError, OSError):
        return None
    return samples if samples is not None and samples.fingerprint == known else None


def _data_spec(values: Mapping[str, Any]) -> DataSpec:
    path = values["path"]
    sources = path if isinstance(path, str) else tuple(Source(**source) for source in path)
    return DataSpec(**{**values, "path": sources})


@torch.no_grad()
def mean_loss(model: PreTrainedModel, samples: Samples, device: torch.device) -> float:
    total, count = 0.0, 0
    for number in range(len(samples)):
        tokens, mask = samples.tokens_and_mask(number)
        tokens_L = torch.as_tensor(tokens.astype("int64"), device=device)
        supervised_L = torch.as_tensor(mask.copy(), device=device)[1:]
        logits_LV = model(tokens_L[None], use_cache=False).logits[0, :-1][supervised_L]
        targets = tokens_L[1:][supervised_L]
        total += torch.nn.functional.cross_entropy(logits_LV.float(), targets, reduction="sum").item()
        count += len(targets)
    return total / max(1, count)
