"""Log-probabilities of the reference policies of attached jobs: read from disk, or collected from Score
passes (forward passes that return each sample's log-probability).

They are kept in two files. One is in the cache of tokenised samples, for all jobs with the same samples and
the same reference policy. The other is among the job's checkpoints: a job that resumes reads it even if the
adapter that it started from has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weftune.adapters.folder import CONFIG, WEIGHTS
from weftune.base.model import Base
from weftune.core.shapes import layer_number
from weftune.data.references import read_references, reference_key, write_references
from weftune.errors import OutputError
from weftune.run.events import Scored
from weftune.trainer.job import PreparedJob

COPY_FILE = "references"
"""Name of the file, in the folder of a job's checkpoints, that holds the job's reference
log-probabilities."""
PROBED_ROWS = 64
"""Number of rows of a weight that are hashed to identify a base, in addition to its name."""


@dataclass(slots=True)
class _Unscored:
    """Reference log-probabilities of one set of samples, some of which are still to be computed, and the jobs
    that wait for them."""

    key: str
    """Hash of the samples and the base, by which files of reference log-probabilities are recognised."""
    logprobs: NDArray[np.float64]
    """Log-probability of each sample under the reference policy. NaN for samples that are not scored yet."""
    shared_file: Path | None
    """File of the log-probabilities that all jobs with the same samples and reference policy share. None if
    the adapter of the reference policy is not known."""
    copies: dict[str, Path] = field(default_factory=dict)
    """Maps each waiting job to the file of its log-probabilities in the folder of its checkpoints."""

    def files(self) -> Iterator[Path]:
        if self.shared_file is not None:
            yield self.shared_file
        if self.is_complete():
            yield from self.copies.values()

    def is_complete(self) -> bool:
        return not np.isnan(self.logprobs).any()


class References:
    def __init__(self, base: Base, folder: Path, show_note: Callable[[str], None]) -> None:
        """Create the reference log-probabilities of a run, none of which are known yet. `folder` is the cache
        of tokenised samples, and `show_note` is called with sentences for the user."""
        self._base, self._folder, self._note = base, folder, show_note
        self._base_key = ""
        """Hash that identifies the base model. It is computed when a job first needs it; empty before."""
        self._unscored_samples: dict[str, _Unscored] = {}
        """Maps a hash of samples and reference policy to the log-probabilities that attached jobs wait for.
        Jobs with the same hash share them."""

    def add_job(
        self, job: PreparedJob, checkpoints: Path, start_folder: Path | None, has_begun: bool
    ) -> PreparedJob | None:
        """Return a job that is about to be attached. If its reference log-probabilities are on disk, the job
        has them; otherwise it waits until Score passes have computed them. Return None if they are lost,
        since the job has made steps and its adapter is no longer the one that it started from. `start_folder`
        is the folder of the adapter that the job starts from, or None if the job starts from none or reads
        its adapter from a checkpoint. `has_begun` says whether the job has made a step."""
        data = job.reference_data
        if data is None or job.data.train.references is not None:
            return job
        copy, count = checkpoints / COPY_FILE, sum(map(len, data.parts))
        key = self._reference_key(job)
        if (found := read_references(copy, key, count)) is not None:
            return job.with_references(found)
        from_adapter = job.reference_adapter is not None
        if from_adapter and has_begun:
            return None
        is_known = start_folder is not None or not from_adapter
        policy = _policy_key(job, key, start_folder) if is_known else job.name
        shared = self._folder / f"references-{policy}" if is_known else None
        if policy not in self._unscored_samples:
            logprobs = None if shared is None else read_references(shared, key, count)
            self._unscored_samples[policy] = _Unscored(
                key, np.full(count, np.nan) if logprobs is None else logprobs, shared
            )
        waiting = self._unscored_samples[policy]
        waiting.copies[job.name] = copy
        if not waiting.is_complete():
            return job
        self._write_files(waiting)
        self.remove_job(job.name)
        return job.with_references(waiting.logprobs)

    def _reference_key(self, job: PreparedJob) -> str:
        self._base_key = self._base_key or _base_key(self._base)
        data = job.reference_data
        assert data is not None
        samples = [[part.fingerprint, part.rows_before, part.first_position] for part in data.parts]
        return reference_key(samples, self._base_key, str(self._base.dtype))

    def remove_job(self, job: str) -> None:
        """Forget a job that is detached, and drop log-probabilities for which no other job waits from
        memory."""
        for policy, one in list(self._unscored_samples.items()):
            one.copies.pop(job, None)
            if not one.copies:
                del self._unscored_samples[policy]

    def pending_scores(self) -> dict[str, NDArray[np.int64]]:
        """Return a map from each waiting job to the samples that it scores. If several jobs wait for the same
        log-probabilities, one job scores all samples and the other jobs score none."""
        samples: dict[str, NDArray[np.int64]] = {}
        for one in self._unscored_samples.values():
            first, *others = one.copies
            samples[first] = np.flatnonzero(np.isnan(one.logprobs))
            samples |= dict.fromkeys(others, np.empty(0, dtype=np.int64))
        return samples

    def record_scores(self, scores: Scored) -> None:
        for one in self._unscored_samples.values():
            if scores.job in one.copies:
                one.logprobs[list(scores.samples)] = scores.logprobs

    def finish_window(self) -> Mapping[str, NDArray[np.float64]]:
        """Write the log-probabilities that Score passes have computed to disk, and return them for each job
        that has now got all it waited for."""
        logprobs: dict[str, NDArray[np.float64]] = {}
        for policy, one in list(self._unscored_samples.items()):
            self._write_files(one)
            if one.is_complete():
                logprobs |= dict.fromkeys(one.copies, one.logprobs)
                del self._unscored_samples[policy]
        return logprobs

    def _write_files(self, waiting: _Unscored) -> None:
        """Write reference log-probabilities to their files. Errors are not raised, since training continues
        without the files; only a resumed run must compute the log-probabilities again."""
        for path in waiting.files():
            try:
                write_references(path, waiting.key, waiting.logprobs)
            except OutputError as error:
                self._note(f"warning: {error}; a resumed run scores these samples again.")


def _base_key(base: Base) -> str:
    """Return a hash that identifies the base model: its name and settings, its weight files, and rows of a
    weight of its first layer, which the first worker holds in every layout."""
    site = next(site.name for site in base.whole_sites if layer_number(site.name) == 0)
    matrix_NK = base.weight_reader()(site)
    chosen = matrix_NK[:: max(1, len(matrix_NK) // PROBED_ROWS)][:PROBED_ROWS]
    probe = hashlib.sha256(chosen.detach().double().cpu().contiguous().numpy().tobytes()).hexdigest()
    folder = Path(base.spec.model).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    stats = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return reference_key(base.spec.record(), stats, probe)


def _policy_key(job: PreparedJob, key: str, start_folder: Path | None) -> str:
    """Return a hash of the reference policy and its samples: `key`, which identifies the samples and the
    base, and the files and settings of the starting adapter."""
    if start_folder is None:
        return reference_key(key)
    files = [hashlib.sha256((start_folder / name).read_bytes()).hexdigest() for name in (CONFIG, WEIGHTS)]
    return reference_key(key, files, repr(replace(job.spec.adapter, init_from=None)))
