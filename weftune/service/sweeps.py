"""Sweeps in the training process of a service. The trials of a sweep are jobs of a tenant, and the sweep's
decisions about them are events of the sweep's own job."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from weftune.errors import OutputError, SpecError
from weftune.jobs.spec.spec import JobSpec
from weftune.jobs.sweeps.read import read_sweep
from weftune.jobs.sweeps.record import SWEEP_FILE, SweepRecord, read_record
from weftune.jobs.sweeps.running import RunningSweep
from weftune.jobs.sweeps.spec import Sweep, Trial
from weftune.service.job_store import ServiceJobStore
from weftune.service.store.requests import Submission


class ServiceSweep(RunningSweep):
    """A sweep of a service. The adapters of its best trials stay in the folders of the trials' jobs."""

    def __init__(self, submission: Submission, trials: Sequence[Submission], store: ServiceJobStore) -> None:
        spec, faults = read_sweep(submission.job)
        assert spec is not None, f"the sweep was checked when it was submitted: {faults}"
        jobs: dict[str, JobSpec] = {}
        for one in trials:
            # The file of an ended trial may have been deleted; its job is not needed then.
            with suppress(SpecError):
                jobs[one.id] = JobSpec(**{**one.job, "name": one.id})
        self._service_store = store
        self._event_count = 0
        """Number of the sweep's decisions for which this process has stored events."""
        self._names = {one.id: one.suffix or one.id for one in trials}
        sweep = Sweep(submission.id, spec, tuple(Trial(one.id, one.trial or {}) for one in trials))
        super().__init__(sweep, store, jobs, self._add_note)
        store.keep_ended(self._names)
        self.show = self._add_events

    def _add_note(self, sentence: str) -> None:
        self._service_store.add_sweep_event(self.sweep.name, sentence)

    def _add_events(self, record: SweepRecord) -> None:
        """Store an event for each decision of the sweep about which trials continue. The database ignores
        events of decisions that are already stored."""
        for number, decision in enumerate(record.decisions[self._event_count :], self._event_count + 1):
            kept = ", ".join(self._names[name] for name in decision.kept)
            many = f"{len(decision.kept)} of {decision.began} trials continue"
            self._service_store.add_sweep_event(
                self.sweep.name, f"Step {decision.step}: {many}: {kept}", decision=number
            )
        self._event_count = len(record.decisions)

    def _keep_winners(self, winners: tuple[str, ...]) -> None:
        sentence = "The sweep has ended, and no trial has finished"
        if winners:
            names = ", ".join(self._names[name] for name in winners)
            sentence = f"The sweep has ended; best: {names}"
        self._service_store.add_sweep_event(self.sweep.name, sentence, decision=0)

    def _store_record(self, record: SweepRecord) -> None:
        # This ends a process that has lost its lease, so that it overwrites no later record. Events of the
        # end are written before the record, after which the sweep is forgotten.
        self._service_store.flush()
        super()._store_record(record)

    @property
    def has_ended(self) -> bool:
        """Whether the sweep has ended and its final record is on disk."""
        return self._written is not None and has_ended(self._written)


def has_ended(record: SweepRecord) -> bool:
    """Return whether a sweep has ended: all trials have ended, and its best trials are known if any has
    finished."""
    states = {trial.state for trial in record.trials}
    return states <= {"left", "failed", "finished"} and ("finished" not in states or bool(record.best))


def unfinished_sweeps(store: ServiceJobStore) -> list[str]:
    """Return the ids of sweeps whose file sweep.json exists and does not say that the sweep has ended."""
    found = []
    for path in sorted(store.output.glob(f"*/{SWEEP_FILE}")):
        record = None
        with suppress(OutputError):
            record = read_record(path.parent)
        if record is None or not has_ended(record):
            found.append(path.parent.name)
    return found
