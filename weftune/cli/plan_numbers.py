"""What `weftune plan --json` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weftune.jobs.store.scheduler import Admission
    from weftune.plan.outlook.ablate import Ablation
    from weftune.plan.outlook.forecast import Forecast
    from weftune.plan.outlook.one_device import SingleOutlook
    from weftune.plan.outlook.outlook import Outlook
    from weftune.plan.outlook.split import ShareOutlook
    from weftune.plan.outlook.streamed import StreamOutlook
    from weftune.plan.outlook.whole_run import JobTotal, WholeRun


def outlook_numbers(found: Outlook) -> dict[str, Any]:
    layout = found.layout
    return {
        "streamed": False,
        "stages": [
            {"layers": stage.stop - stage.start, "needs_bytes": need, "budget_bytes": budget}
            for stage, need, budget in zip(layout.stages, found.need_bytes, layout.budgets, strict=True)
        ],
        "groups": found.scheme.groups,
        "order": found.scheme.order,
    }


def share_numbers(found: ShareOutlook | None) -> dict[str, Any]:
    if found is None:
        return {"shares": None}
    return {
        "shares": [
            {
                "jobs": share.jobs,
                "predicted_seconds": share.seconds,
                "tokens_per_second": part.forecast.tokens_per_second,
                "needs_bytes": part.need_bytes[0],
                "budget_bytes": part.layout.budgets[0],
            }
            for share, part in zip(found.shares, found.parts, strict=True)
        ]
    }


def stream_numbers(found: StreamOutlook) -> dict[str, Any]:
    chosen, steps = found.chosen, found.forecast.steps
    return {
        "streamed": True,
        "stages": [
            {"layers": stage.stop - stage.start, "device": home, "resident": stays}
            for stage, home, stays in zip(
                chosen.streams.stages, chosen.streams.homes, chosen.streams.resident, strict=True
            )
        ],
        "needs_bytes": chosen.layout.need_bytes,
        "budget_bytes": chosen.layout.budgets,
        "mapping": chosen.mapping,
        "unhidden_seconds": chosen.unhidden / steps,
        "uploaded_bytes": chosen.uploaded_bytes // steps,
    }


def single_numbers(found: SingleOutlook) -> dict[str, Any]:
    choice = found.choice
    return {
        "streamed": True,
        "stages": [
            {"layers": stage.stop - stage.start, "resident": stage.resident} for stage in choice.cut.stages
        ],
        "slots": choice.cut.slots[0],
        "adapters_travel": choice.cut.travels,
        "inputs_offloaded": choice.cut.offloads,
        "weights_in_files": choice.mapped,
        "aboard": [job.name for job in found.jobs],
        "device_bytes": choice.device_bytes,
        "budget_bytes": found.case.device.budget,
        "host_bytes": choice.host_bytes,
        "round_seconds": choice.step_seconds,
        "unhidden_seconds": choice.unhidden * choice.step_seconds,
        "uploaded_bytes": found.uploaded_bytes,
        "why": choice.why,
    }


def run_numbers(run: WholeRun, totals: Mapping[str, JobTotal]) -> dict[str, Any]:
    """Seconds and bytes of the whole run, and of each job in it."""
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
    found: Outlook | StreamOutlook | SingleOutlook, admission: Admission, ablations: Sequence[Ablation]
) -> dict[str, Any]:
    return {
        "cluster": found.ground.cluster.name,
        "source": found.source,
        "capacity": found.forecast.capacity,
        "waiting": dict(admission.waiting),
        "too_large": dict(admission.too_large),
        "forecast": forecast_numbers(found.forecast),
        "alternatives": [forecast_numbers(one) for one in found.alternatives],
        "ablations": [
            {
                "mechanism": row.mechanism,
                "instead": row.instead,
                "added": row.added,
                "cost": row.cost,
                "step_seconds": row.forecast.step_seconds,
            }
            for row in ablations
        ],
    }


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
