"""The numbers that `weftune plan --json` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weftune.cli.plan_machine import train_flags
from weftune.plan.outlook.forecast import shared_groups

if TYPE_CHECKING:
    from weftune.cli.plan import Wanted
    from weftune.plan.layout.choose import Choice
    from weftune.plan.outlook.forecast import Ablation, Forecast, Prediction
    from weftune.plan.outlook.promise import FirstWindow
    from weftune.plan.outlook.shares import ShareOutlook
    from weftune.plan.outlook.streamed import StreamOutlook
    from weftune.plan.outlook.whole_run import JobTotal, WholeRun


def resident_numbers(found: Prediction) -> dict[str, Any]:
    memory = found.choice.memory
    return {
        "streamed": False,
        "stages": [
            {"layers": stage.count, "needs_bytes": need, "budget_bytes": memory.budget}
            for stage, need in zip(found.choice.layout.stages, stage_needs(found), strict=True)
        ],
        "groups": shared_groups(found.program),
        "order": "1F1B" if found.choice.layout.pipelined else "rounds",
        "aboard": list(found.window.shapes),
        "optimizer_offloaded": found.choice.layout.optimizer_offloaded,
        "host_bytes": found.choice.host_bytes,
        "why": found.choice.why,
    }


def stage_needs(found: Prediction) -> list[int]:
    """Return the bytes on each device with full microbatches; every job's adapter is counted on each."""
    memory, program = found.choice.memory, found.program
    needs = memory.worker_needs(list(found.window.shapes.values()), program.capacity, program.recompute)
    return [need.total(memory.fit) for need in needs]


def share_numbers(found: ShareOutlook) -> dict[str, Any]:
    return {
        "shares": [
            {
                "jobs": share.jobs,
                "predicted_seconds": share.seconds,
                "tokens_per_second": part.forecast.tokens_per_second,
                "needs_bytes": part.window.promise.peak_bytes,
                "budget_bytes": part.choice.memory.budget,
            }
            for share, part in zip(found.shares, found.parts, strict=True)
        ]
    }


def stream_numbers(found: StreamOutlook, window: FirstWindow) -> dict[str, Any]:
    choice, layout, budget = found.choice, found.choice.layout, found.case.device.budget
    homes = [{"device": home} if found.workers > 1 else {} for home in layout.homes]
    return {
        "streamed": True,
        "stages": [
            {"layers": stage.count, "resident": stage.resident} | home
            for stage, home in zip(layout.stages, homes, strict=True)
        ],
        "slots": max(layout.slots),
        "adapters_travel": layout.travels,
        "inputs_offloaded": layout.offloads,
        "weights_in_files": choice.mapped,
        "aboard": list(window.shapes),
        "device_bytes": choice.bytes,
        "needs_bytes": (choice.bytes,) * found.workers,
        "budget_bytes": [budget] * found.workers if found.workers > 1 else budget,
        "host_bytes": choice.host_bytes,
        "round_seconds": choice.seconds,
        "unhidden_seconds": choice.unhidden * found.forecast.seconds,
        "uploaded_bytes": found.uploaded_bytes,
        "why": choice.why,
        "first_window": window.numbers,
    }


def run_numbers(run: WholeRun, totals: Mapping[str, JobTotal]) -> dict[str, Any]:
    """Return seconds and bytes of the whole run, and of each job in it."""
    return {
        "run": {
            "seconds": run.seconds,
            "needs_bytes": run.need_bytes,
            "budget_bytes": run.budget_bytes,
            "jobs": {
                name: {"steps": totals[name].steps, "ends": ends, "state_bytes": totals[name].state_bytes}
                for name, ends in run.ends.items()
            },
        }
    }


def common_numbers(
    wanted: Wanted, choice: Choice, forecast: Forecast, alternatives: Sequence[Forecast], source: str
) -> dict[str, Any]:
    return {
        "cluster": wanted.cluster.name,
        "train": train_flags(wanted, choice),
        "source": source,
        "capacity": forecast.capacity,
        "forecast": forecast_numbers(forecast),
        "alternatives": [forecast_numbers(one) for one in alternatives],
    }


def ablation_numbers(rows: Sequence[Ablation]) -> list[dict[str, Any]]:
    return [
        {
            "mechanism": row.mechanism,
            "instead": row.instead,
            "added": row.added,
            "cost": row.cost,
            "step_seconds": row.forecast.step_seconds,
        }
        for row in rows
    ]


def forecast_numbers(one: Forecast) -> Mapping[str, Any]:
    return {
        "way": one.name,
        "step_seconds": one.step_seconds,
        "tokens_per_second": one.tokens_per_second,
        "bubbles": one.bubbles,
        "microbatches": one.microbatches,
        "capacity": one.capacity,
        "peak_bytes": one.peaks,
        "fits": one.fits,
    }
