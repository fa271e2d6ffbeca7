"""Logging of metrics to TensorBoard, Weights & Biases or MLflow, with one run per job, grouped by the
output's name."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_args

from weftune.errors import MissingPackage, SpecError
from weftune.jobs.spec.spec import Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient

Spec = Mapping[str, Any]

_NOT_METRICS = ("job", "step", "time")
_LONGEST_PARAMETER = 500
"""Maximum length, in characters, of a parameter's value that MLflow accepts."""


class JobLogger(Protocol):
    """A logger that sends the metrics of one job to one tracker."""

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Loggers:
    """All loggers of a run. A logger that fails is dropped with a note, and training continues without it."""

    def __init__(
        self, logger_factories: Mapping[str, Callable[[str, Spec], JobLogger]], jobs: Mapping[str, Spec]
    ) -> None:
        self._openers = dict(logger_factories)
        self._jobs = jobs
        self._open: dict[tuple[str, str], JobLogger] = {}
        self.notes: list[str] = []

    def log(self, line: Mapping[str, Any]) -> None:
        """Log one line of metrics.jsonl to all trackers. Values that are not finite numbers are omitted."""
        if not self._openers:
            return
        values = {
            key: float(value)
            for key, value in line.items()
            if key not in _NOT_METRICS and isinstance(value, int | float) and math.isfinite(value)
        }
        job = str(line["job"])
        for name in tuple(self._openers):
            self._open_logger(name, partial(self._log_values, name, job, line["step"], line["time"], values))

    def close(self) -> None:
        for (name, _), logger in self._open.items():
            self._open_logger(name, logger.close)
        self._open.clear()

    def _log_values(self, name: str, job: str, step: int, time: float, values: Mapping[str, float]) -> None:
        if (name, job) not in self._open:
            self._open[name, job] = self._openers[name](job, self._jobs.get(job, {}))
        self._open[name, job].log(step, time, values)

    def _open_logger(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            # A tracker only observes: its errors must not stop training.
            if self._openers.pop(name, None) is not None:
                self.notes.append(f"{name} was given up: {type(error).__name__}: {error}")


def open_loggers(names: Sequence[str], output: Path, jobs: Mapping[str, Spec]) -> Loggers:
    """Open a logger per job for each tracker that `report_to` in the jobs file names. `jobs` maps each job's
    name to its spec."""
    check_trackers(names)
    openers: dict[str, Callable[[str, Spec], JobLogger]] = {}
    if "tensorboard" in names:
        openers["tensorboard"] = lambda job, spec: TensorboardLogger(output / "tensorboard" / job)
    if "wandb" in names:
        openers["wandb"] = lambda job, spec: WandbLogger(output.resolve(), job, spec)
    if "mlflow" in names:
        openers["mlflow"] = _mlflow_client(output)
    return Loggers(openers, jobs)


def check_trackers(names: Sequence[str]) -> None:
    """Raise an error if a tracker that `report_to` in the jobs file names cannot be used. Nothing is
    written."""
    for name in names:
        if name not in get_args(Tracker):
            raise SpecError(f"report_to: {name!r} is not known; write tensorboard, wandb or mlflow.")
        if find_spec(name) is None:
            raise MissingPackage(f"report_to: {name} is not installed; run `pip install 'weftune[{name}]'`.")
    if "wandb" in names and os.environ.get("WANDB_MODE", "online") == "online":
        _log_in_to_wandb()


class TensorboardLogger:
    """A logger that writes event files for TensorBoard with tensorboard's own writer, since torch's writer
    would import torch."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._session, self._summary = Event, SessionLog, Summary
        self._writer = EventFileWriter(str(folder))
        self._fresh = True

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        if self._fresh:
            # Steps that a killed run had logged beyond its checkpoint are repeated: the old ones are void.
            start = self._session(status=self._session.START)
            self._writer.add_event(self._event(wall_time=time, step=step, session_log=start))
            self._fresh = False
        points = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._writer.add_event(self._event(wall_time=time, step=step, summary=self._summary(value=points)))

    def close(self) -> None:
        self._writer.close()


def _log_in_to_wandb() -> None:
    """Log in to Weights & Biases. The login takes place before the run starts, since wandb may ask for a key,
    and so that errors are reported at once."""
    import wandb

    try:
        wandb.login()
    except wandb.errors.Error as error:
        sentence = f"report_to: wandb: {error} For runs without an account set WANDB_MODE=offline."
        raise SpecError(sentence) from error


class WandbLogger:
    """A logger for Weights & Biases. The run id is derived from the output folder and the job, so that a
    resumed job continues its run in Weights & Biases."""

    def __init__(self, output: Path, job: str, spec: Spec) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "weftune"),
            group=output.name,
            name=job,
            id=hashlib.sha256(f"{output}\n{job}".encode()).hexdigest()[:16],
            dir=str(output),
            config=dict(spec),
            resume="allow",
            reinit="create_new",
        )

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _mlflow_client(output: Path) -> Callable[[str, Spec], JobLogger]:
    from mlflow import MlflowClient

    folder = output.resolve()
    elsewhere = bool(os.environ.get("MLFLOW_TRACKING_URI"))
    client = MlflowClient(tracking_uri=None if elsewhere else f"sqlite:///{folder / 'mlflow.db'}")
    found = client.get_experiment_by_name(folder.name)
    artifacts = None if elsewhere else (folder / "mlartifacts").as_uri()
    experiment = found.experiment_id if found else client.create_experiment(folder.name, artifacts)
    return lambda job, spec: MlflowLogger(client, experiment, job, spec)


class MlflowLogger:
    """A logger to the MLflow experiment with the name of the output folder. By default, the experiment is in
    the folder's mlflow.db."""

    def __init__(self, client: MlflowClient, experiment: str, job: str, spec: Spec) -> None:
        self._client = client
        self._run_id = client.create_run(experiment, run_name=job).info.run_id
        for key, value in spec.items():
            client.log_param(self._run_id, key, str(value)[:_LONGEST_PARAMETER])

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        moment = round(1000 * time)
        metrics = [Metric(key, value, moment, step) for key, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
