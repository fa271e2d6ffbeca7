"""Creation of the `Trainer` of a run from the run's specification."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weftune.jobs.spec.spec import RunSpec
from weftune.trainer.journal import View
from weftune.trainer.options import Options
from weftune.trainer.trainer import Trainer


def make_trainer(
    run: RunSpec,
    *,
    output: str | Path | None = None,
    max_steps: int | None = None,
    options: Options | None = None,
    view: View | None = None,
) -> Trainer:
    options = options or Options()
    if run.deterministic:
        options = replace(options, deterministic=True)
    trainer = Trainer(
        run.base,
        output=output or run.output,
        max_steps=max_steps,
        report_to=run.report_to,
        options=options,
        view=view,
        place=run.locate,
    )
    for job in run.jobs:
        trainer.add(job)
    for sweep in run.sweeps:
        trainer.add_sweep(sweep)
    return trainer
