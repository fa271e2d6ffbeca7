"""Conversion of a request to a job of Weftune: OpenAI's hyperparameters and the keys under `weftune` become
keys of jobs.yaml. A client sends values only; all paths belong to files that the service has named."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weftune.core.bounds import format_value
from weftune.data.spec import EXACT_MATCH
from weftune.errors import Mistake, SpecError
from weftune.jobs.spec.keys import SECTIONS, nearest_word
from weftune.jobs.spec.layer import keys_from_keywords
from weftune.jobs.spec.spec import JobSpec
from weftune.jobs.sweeps.read import expand_sweep, trial_keys
from weftune.jobs.sweeps.spec import MAX_TRIALS, leaf_values, location_of
from weftune.objectives.spec import OBJECTIVES
from weftune.service.api.errors import ApiError, invalid_request
from weftune.service.api.schemas import DpoHyperparameters, Extension, Hyperparameters, JobRequest
from weftune.service.ids import new_id
from weftune.service.store.requests import Submission

AUTO_EPOCHS = 3
AUTO_BATCH = 16
AUTO_BETA = 0.1
REFUSED_KEYS: Mapping[str, frozenset[str]] = {
    "adapter": frozenset({"init_from"}),
    "objective": frozenset({"reward_funcs"}),
    "eval": frozenset({"path"}),
}
"""Maps each section of `weftune`, the part of a request with Weftune's own keys, to its refused keys: those
that name files or modules of the server in jobs.yaml."""
METHODS = {"supervised": "sft", "dpo": "dpo"}
"""Maps OpenAI's fine-tuning methods to Weftune's objectives."""
SWEEP_NAME = "sweep"
"""Name of a sweep for which the client has given no suffix. The names of the sweep's trials (its jobs) begin
with this name."""
SEARCHES = ("grid", "random")
DATA_KEYS = ("max_length", "train_on")
JOB_KEYS = (
    "priority", "steps", "schedule", "warmup", "weight_decay", "betas", "eps", "clip", "early_stop", "keep",
)  # fmt: skip
"""Keys under `weftune` in a request that have the same names in jobs.yaml."""


def body_hash(body: JobRequest) -> str:
    """Return the hash of a request to create a job, by which repeated requests are recognised."""
    text = json.dumps(body.model_dump(exclude_unset=True), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def refuse_unsupported(body: JobRequest) -> None:
    """Raise an error if the request asks for something that the service does not offer."""
    if body.integrations:
        raise invalid_request(
            "integrations: are not supported; follow the job's events, or download its metrics as CSV from "
            "result_files",
            param="integrations",
            code="integrations_unsupported",
        )
    if body.method is not None and body.method.type == "reinforcement":
        raise invalid_request(
            "method.type: reinforcement is not supported; write supervised or dpo",
            param="method.type",
            code="method_unsupported",
        )
    if body.method is not None and body.hyperparameters is not None:
        raise invalid_request("hyperparameters: leave it out beside method", param="hyperparameters")
    for name in METHODS:
        if body.method is not None and name != body.method.type and getattr(body.method, name) is not None:
            raise invalid_request(
                f"method.{name}: leave it out, the method is {body.method.type}", param=f"method.{name}"
            )


def job_keys(
    body: JobRequest,
    name: str,
    rows: int,
    training_path: str,
    validation_path: str | None = None,
    start: Mapping[str, Any] | None = None,
    metrics: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the job as keys of jobs.yaml, or raise the error for the first invalid value.

    `rows` is the number of training rows. `start`, if given, has the adapter keys of the finished job from
    which the new job starts, with that job's folder as `init_from`. `metrics` maps the names of the Python
    metrics that jobs may use to their functions, as in `ServiceSettings`.
    """
    refuse_unsupported(body)
    extension = body.weftune or Extension()
    objective = _read_objective(body, extension)
    kind = objective.get("kind", "sft")
    given = hyperparameters_of(body)
    keys: dict[str, Any] = {"name": name, "objective": objective}
    keys["data"] = {"path": training_path} | _given_values(extension, DATA_KEYS)
    keys["adapter"] = dict(_request_section(extension.adapter, "adapter"))
    if start is not None:
        keys["adapter"] = {**start, **keys["adapter"]}
    if given.n_epochs != "auto" and (extension.steps is not None or extension.epochs is not None):
        param = "weftune.epochs" if extension.steps is None else "weftune.steps"
        raise invalid_request(f"{param}: give it or n_epochs, not both", param=param)
    epochs = extension.epochs or (AUTO_EPOCHS if given.n_epochs == "auto" else given.n_epochs)
    if extension.steps is None:
        keys["epochs"] = epochs
    elif extension.epochs is not None:
        raise invalid_request("weftune.steps: give epochs or steps, not both", param="weftune.steps")
    keys["batch_size"] = auto_batch_size(rows) if given.batch_size == "auto" else given.batch_size
    keys["seed"] = secrets.randbelow(2**31) if body.seed is None else body.seed
    keys |= _given_values(extension, JOB_KEYS)
    keys |= _learning_rate(extension, given, kind)
    keys |= _evaluation(extension, validation_path, epochs, metrics or {})
    if epochs > 1 and extension.steps is None:
        keys["save_every"] = _epoch_fraction(epochs)
    validate_job(keys, body)
    if extension.sweep is not None:
        _refuse_server_keys(extension.sweep)
        keys["sweep"] = dict(extension.sweep)
    return keys


def trials_of(submission: Submission, body: JobRequest) -> list[Submission]:
    """Return one submission for each trial (job) of a sweep, or an empty sequence if the job is not a sweep.
    Raise an error for the first invalid value in the sweep."""
    if body.weftune is None or body.weftune.sweep is None:
        return []
    if "eval" not in submission.job:
        raise invalid_request(
            "weftune.sweep: needs a validation_file, or weftune.eval such as {fraction: 0.1}, to know which "
            "trial is best",
            param="weftune.sweep",
            code="invalid_value",
        )
    keys = keys_from_keywords({**submission.job, "name": submission.suffix or SWEEP_NAME})
    sweep, _, mistakes = expand_sweep(keys, Path())
    if sweep is None:
        raise _translate_mistake(mistakes[0], body)
    trials = []
    for trial in sweep.trials:
        id = new_id("ftjob")
        job = {**trial_keys(sweep, trial).values, "name": id}
        trials.append(
            replace(
                submission,
                id=id,
                request=_trial_request(submission.request, job, trial.values),
                job=job,
                suffix=trial.name,
                idempotency_key=None,
                body_hash="",
                sweep=submission.id,
                trial=dict(trial.values),
            )
        )
    return trials


def _trial_request(
    request: Mapping[str, Any], job: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the request body with which a trial of a sweep could have been submitted as a job of its own:
    without the sweep, and with the trial's learning rate."""
    extension = {key: value for key, value in request["weftune"].items() if key != "sweep"}
    if "learning_rate" in values:
        extension["learning_rate"] = job["learning_rate"]
    return {**request, "weftune": extension}


def _refuse_server_keys(sweep: Mapping[str, Any]) -> None:
    """Refuse a sweep with an unsupported search, with values that name files or modules of the server, or
    with more values than trials. Other errors are found later, when the sweep is parsed."""
    search = sweep.get("search", SEARCHES[0])
    if search not in SEARCHES:
        reason = (
            "; a service makes all trials when a sweep is submitted, and tpe proposes them from the results "
            "of earlier ones: train this sweep with weftune train"
        )
        raise invalid_request(
            f"weftune.sweep.search: must be {' or '.join(SEARCHES)} over HTTP, got {format_value(search)}"
            + (reason if search == "tpe" else ""),
            param="weftune.sweep.search",
            code="invalid_value",
        )
    over = sweep.get("over")
    if not isinstance(over, Mapping):
        return
    count = sum(len(choices) if isinstance(choices, list) else 1 for choices in over.values())
    if count > MAX_TRIALS:
        param = "weftune.sweep.over"
        raise invalid_request(
            f"{param}: must hold at most {MAX_TRIALS:,} values, got {count:,}",
            param=param,
            code="invalid_value",
        )
    for key, choices in over.items():
        param = f"weftune.sweep.over.{key}"[:200]
        for choice in choices if isinstance(choices, list) else [choices]:
            for location, _ in leaf_values(location_of(str(key)), choice):
                section, name = (*map(str, location), "")[:2]
                if name in REFUSED_KEYS.get(section, ()):
                    raise invalid_request(
                        f"{param}: {section}.{name} is not taken over HTTP",
                        param=param,
                        code="unknown_parameter",
                    )


def hyperparameters_of(body: JobRequest) -> Hyperparameters:
    method = body.method
    chosen = None if method is None else method.dpo if method.type == "dpo" else method.supervised
    found = chosen.hyperparameters if chosen is not None else body.hyperparameters
    return found or Hyperparameters()


def auto_batch_size(rows: int) -> int:
    """Return the number of rows per step for `batch_size: auto`: 16, or fewer if an epoch would have less
    than 8 steps."""
    return max(1, min(AUTO_BATCH, rows // 8))


def _given_values(extension: Extension, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(extension, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _request_section(values: Mapping[str, Any] | None, section: str) -> Mapping[str, Any]:
    """Return the keys of one section of `weftune`, the part of a request with Weftune's own keys. Raise an
    error if a key names a file or module of the server."""
    refused = REFUSED_KEYS[section]
    for key in values or ():
        param = f"weftune.{section}.{key}"
        if key in refused:
            raise invalid_request(f"{param}: is not taken over HTTP", param=param, code="unknown_parameter")
        if key not in SECTIONS[section]:
            near = nearest_word(key, [one for one in SECTIONS[section] if one not in refused])
            hint = f"; did you mean {near}?" if near else ""
            raise invalid_request(
                f"{param[:200]}: is not known{hint}", param=param[:200], code="unknown_parameter"
            )
    return values or {}


def _read_objective(body: JobRequest, extension: Extension) -> dict[str, Any]:
    own = extension.objective
    keys: dict[str, Any] = {"kind": own} if isinstance(own, str) else dict(_request_section(own, "objective"))
    method = "" if body.method is None else body.method.type
    if method and keys.setdefault("kind", METHODS[method]) != METHODS[method]:
        raise invalid_request(
            f"weftune.objective: contradicts method.type, which is {method}; leave method out",
            param="weftune.objective",
        )
    found = hyperparameters_of(body)
    if isinstance(found, DpoHyperparameters):
        if "beta" in keys and found.beta != "auto":
            raise invalid_request("weftune.objective.beta: give it once", param="weftune.objective.beta")
        keys.setdefault("beta", AUTO_BETA if found.beta == "auto" else found.beta)
    return keys


def _learning_rate(extension: Extension, hyperparameters: Hyperparameters, kind: Any) -> dict[str, float]:
    """Return the learning rate that a request asks for. `learning_rate_multiplier` multiplies the default
    learning rate of the job's objective."""
    multiplier = hyperparameters.learning_rate_multiplier
    if extension.learning_rate is not None:
        if multiplier != "auto":
            param = "weftune.learning_rate"
            raise invalid_request(f"{param}: give it or learning_rate_multiplier, not both", param=param)
        return {"learning_rate": extension.learning_rate}
    if multiplier == "auto" or not isinstance(kind, str) or kind not in OBJECTIVES:
        return {}
    return {"learning_rate": OBJECTIVES[kind].learning_rate * multiplier}


def _evaluation(
    extension: Extension, path: str | None, epochs: float, metrics: Mapping[str, str]
) -> dict[str, Any]:
    own = dict(_request_section(extension.eval, "eval"))
    known = {EXACT_MATCH: EXACT_MATCH, **metrics}
    if (metric := own.get("metric")) is not None:
        if not isinstance(metric, str) or metric not in known:
            param = "weftune.eval.metric"
            raise invalid_request(
                f"{param}: must be {' or '.join(known)}, got {format_value(metric)}",
                param=param,
                code="invalid_value",
            )
        own["metric"] = known[metric]
    if path is not None:
        if own.get("fraction") is not None:
            param = "weftune.eval.fraction"
            raise invalid_request(f"{param}: leave it out beside validation_file", param=param)
        own["path"] = path
    if not own:
        return {}
    if "every" not in own and epochs > 1 and extension.steps is None:
        own["every"] = _epoch_fraction(epochs)
    return {"eval": own}


def _epoch_fraction(epochs: float) -> float:
    """Return the fraction of a job's training that one epoch takes. The fraction is rounded down so that
    evaluations are never more than an epoch apart."""
    return math.floor(1e9 / epochs) / 1e9


# -- mistakes -------------------------------------------------------------------------------------------


def validate_job(keys: Mapping[str, Any], body: JobRequest) -> JobSpec:
    """Return the job that the keys of jobs.yaml describe, or raise an error for its first invalid key. The
    error names the key that the client wrote."""
    try:
        return JobSpec(**keys)
    except SpecError as error:
        raise _translate_mistake(error.mistakes[0], body) from None


def _translate_mistake(mistake: Mistake, body: JobRequest) -> ApiError:
    section, _, rest = mistake.location.partition(".")
    method = "" if body.method is None else f"method.{body.method.type}."
    hyperparameters = f"{method}hyperparameters"
    names = {
        "epochs": f"{hyperparameters}.n_epochs",
        "batch_size": f"{hyperparameters}.batch_size",
        "seed": "seed",
        "name": "suffix",
    }
    if mistake.location == "data.path" or mistake.location == "eval.path":
        # The sentence would name the path of a file that has been deleted meanwhile.
        param = "training_file" if section == "data" else "validation_file"
        return invalid_request(f"{param}: the file has been deleted", param=param, code="file_not_found")
    if section == "learning_rate" and (body.weftune is None or body.weftune.learning_rate is None):
        names["learning_rate"] = f"{hyperparameters}.learning_rate_multiplier"
    if mistake.location == "objective.beta" and body.method is not None and body.method.dpo is not None:
        names["objective"], rest = f"{hyperparameters}.beta", ""
    if section == "data":
        section, rest = rest, ""
    if not section:
        # Values of a trial that are each valid and contradict each other.
        section = "sweep"
    param = names.get(section, f"weftune.{section}") + (f".{rest}" if rest else "")
    return invalid_request(f"{param[:200]}: {mistake.sentence}", param=param[:200], code="invalid_value")
