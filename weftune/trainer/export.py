"""Exports of a finished job's adapter: an adapter for servers, or a merged model and its validation loss.

Shapes: L tokens of a sample, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from transformers import PreTrainedModel

from weftune.adapters.folder import CONFIG, JOB_FILE, WEIGHTS, check_adapter_folder, refuse_reward_model
from weftune.adapters.plain import PlainKind
from weftune.adapters.registry import kind_of_folder
from weftune.base.load import (
    base_quantisation,
    best_device,
    file_dtype,
    inspect,
    is_tower,
    load_plain,
    load_tokenizer,
    model_source,
)
from weftune.base.quant.linear import dequantise_linears
from weftune.base.shape import embedding_module, model_shape, site_modules
from weftune.base.spec import BaseSpec, Dtype
from weftune.base.weights import write_wrapper
from weftune.core.files import cache_folder, disk_errors, refuse_full_folder, set_file_modes
from weftune.data.prepare import prepare
from weftune.data.samples import Samples
from weftune.data.spec import EvalSpec
from weftune.errors import AdapterError, BaseModelError, OutputError, UserError
from weftune.jobs.store.job_file import read_job_file, recorded_data

Into = Literal["dequantised", "original"]
INTO: tuple[Into, ...] = get_args(Into)
"""Kinds of weights into which an adapter on a quantised base can be merged: the original weights, or the
dequantised ones."""


def write_portable(folder: Path, target_folder: Path) -> int:
    """Write a copy of the adapter in `folder` that servers can load: its scale is multiplied into the
    weights, and all linears have the same rank. Return that rank."""
    kind = read_finished_kind(folder)
    refuse_outside_links(folder)
    with new_folder(target_folder):
        rank = kind.portable(folder, target_folder)
        copy_tokenizer(folder, target_folder)
    return rank


def write_merged(
    folder: Path,
    base: BaseSpec,
    target_folder: Path,
    dtype: Dtype | None = None,
    merge_mode: Into = "dequantised",
) -> torch.dtype:
    """Write the base with the adapter of `folder` merged into its weights, as a plain model folder. Return
    the dtype of the weights: that of the base's files unless `dtype` is given. If the base is the text tower
    of a multimodal model, the whole model is written."""
    read_finished_kind(folder)
    refuse_outside_links(folder)
    with new_folder(target_folder):
        model = merged_model(folder, base, dtype, merge_mode)
        if is_tower(model) and base_quantisation(base, in_files_only=True):
            raise BaseModelError(
                f"{base.model} sees images too and is stored quantised, so it cannot be written as a plain "
                "model: serve the adapter beside it."
            )
        if not copy_tokenizer(folder, target_folder):
            load_tokenizer(base).save_pretrained(target_folder)
        if is_tower(model):
            write_wrapper(model, base, model_source(base), target_folder)
        else:
            fix_generation_config(model)
            model.save_pretrained(target_folder)
    return model.dtype


def merged_model(folder: Path, base: BaseSpec, dtype: Dtype | None, merge_mode: Into) -> PreTrainedModel:
    """Return the base model, unquantised, with the adapter merged in. For a quantised base, `merge_mode` says
    whether the original or the dequantised weights are used."""
    kept = dtype or cast(Dtype, str(file_dtype(base)).removeprefix("torch."))
    original = merge_mode == "original"
    if original and base_quantisation(base, in_files_only=True):
        raise BaseModelError(
            f"{base.model} is stored quantised, and what it was made of is not known: merge into the "
            "dequantised weights."
        )
    source = replace(base, dtype=kept, quantize=None if original else base.quantize)
    model = load_plain(source, torch.device("cpu"))
    dequantise_linears(model)
    kind = read_finished_kind(folder)
    modules = site_modules(model) | embedding_module(model)
    kind.merge(folder, modules, model_shape(model, model.dtype).sites)
    return model


def read_finished_kind(folder: Path) -> PlainKind:
    check_adapter_folder(folder)
    refuse_reward_model(
        folder,
        "whose scalar head neither a merged model nor a portable adapter has; load it on its base with "
        "PEFT's AutoPeftModelForSequenceClassification and num_labels=1",
    )
    return kind_of_folder(folder)


def refuse_outside_links(folder: Path) -> None:
    """Raise an error if the folder contains links that lead out of it, since the export would contain copies
    of other files."""
    root = folder.resolve()
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and path.is_file() and not path.resolve().is_relative_to(root):
            raise AdapterError(
                f"{path} is a link that leads out of its folder, so nothing is exported; if you trust it, "
                "put the file itself in its place."
            )


@contextmanager
def new_folder(target_folder: Path) -> Iterator[None]:
    """Return a context manager that creates `target_folder`, which must be new or empty, and empties the
    folder again if writing inside the context fails."""
    if target_folder.is_symlink():
        raise OutputError(f"{target_folder} is a link; name a folder that is new or empty.")
    refuse_full_folder(target_folder)
    try:
        target_folder.mkdir(parents=True, exist_ok=True)
        with disk_errors():
            yield
            set_file_modes(target_folder)
    except BaseException as error:
        for path in target_folder.iterdir() if target_folder.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if isinstance(error, OSError):
            raise OutputError(f"{target_folder} cannot be written: {error}") from error
        raise


def copy_tokenizer(folder: Path, target_folder: Path) -> bool:
    """Copy all files of `folder` to `target_folder`, except job.yaml and the files of the adapter. Return
    whether a tokenizer is among the copied files."""
    for path in folder.iterdir():
        if path.is_file() and path.name not in {CONFIG, WEIGHTS, JOB_FILE} and not path.name.startswith("."):
            shutil.copyfile(path, target_folder / path.name)
    return (target_folder / "tokenizer_config.json").is_file()


def fix_generation_config(model: PreTrainedModel) -> None:
    """Set `do_sample` if the generation config has sampling settings without it, since transformers refuses
    to save such a config."""
    settings = model.generation_config
    if settings is None:
        return
    try:
        settings.validate(strict=True)
    except ValueError:
        settings.do_sample = True


# -- the loss of a merged adapter --------------------------------------------------------------------------


def merged_losses(folder: Path, base: BaseSpec, dtype: Dtype | None = None) -> dict[str, float]:
    """Return the mean loss per supervised token on the job's held-out rows, for each kind of weights into
    which the adapter can be merged. The dict is empty if the rows are not known."""
    samples = evaluation_rows(folder, base)
    if samples is None:
        return {}
    losses: dict[str, float] = {}
    for into in INTO:
        model, device = merged_model(folder, base, dtype, into), best_device()
        torch.nn.Module.to(model, device)
        losses[into] = mean_loss(model.eval(), samples, device)
    return losses


def evaluation_rows(folder: Path, base: BaseSpec) -> Samples | None:
    """Return the rows that the job in `folder` was evaluated on; None if they are unknown or have changed."""
    file = read_job_file(folder)
    record: Mapping[str, Any] = {} if file is None else file.values
    job, known = record.get("job") or {}, (record.get("data") or {}).get("evaluation_fingerprint")
    if known is None or not job.get("data", {}).get("path"):
        return None
    try:
        data, held_out = recorded_data(record), EvalSpec(**job["eval"])
        cache, context = cache_folder() / "tokens", inspect(base).context
        samples = prepare(data, held_out, load_tokenizer(base), cache, context=context).evaluation
    except (UserError, TypeError, KeyError, OSError):
        return None
    return samples if samples is not None and samples.fingerprint == known else None


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
