"""The numbers that `weftune plan --json` writes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from weftune.cli.plan_predict import Plan, device_needs_bytes
from weftune.launch.plan_sweeps import sweep_numbers
from weftune.plan.layout.division import SHOWN, Candidate
from weftune.plan.outlook.forecast import Forecast, Prediction, shared_groups
from weftune.plan.outlook.streamed import StreamOutlook


def plan_numbers(plan: Plan) -> dict[str, Any]:
    run, totals, outlook = plan.run, plan.case.totals, plan.outlook
    numbers = (
        _resident_numbers(outlook) if isinstance(outlook, Prediction) else _streamed_numbers(outlook, plan)
    )
    if isinstance(outlook, Prediction):
        numbers["shares"] = (
            None
            if plan.shares is None
            else [
                {
                    "jobs": share.jobs,
                    "predicted_seconds": share.seconds,
                    "tokens_per_second": part.forecast.tokens_per_second,
                    "needs_bytes": part.window.prediction.peak_bytes,
                    "budget_bytes": part.choice.memory.budget_bytes,
                }
                for share, part in zip(plan.shares.shares, plan.shares.parts, strict=True)
            ]
        )
    return {
        **numbers,
        "candidates": [_candidate_numbers(one) for one in plan.choice.candidates[:SHOWN]],
        "cluster": plan.case.cluster.name,
        "train": plan.flags,
        "source": plan.source,
        "capacity": plan.forecast.capacity,
        "forecast": _forecast_numbers(plan.forecast),
        "alternatives": [_forecast_numbers(one) for one in outlook.alternatives],
        "waiting": dict(plan.admission.wait_reasons),
        "too_large": dict(plan.admission.misfit_reasons),
        "ablations": [
            {
                "mechanism": row.mechanism,
                "instead": row.alternative,
                "added": row.is_added,
                "cost": row.relative_cost,
                "step_seconds": row.forecast.step_seconds,
                "measured_step_seconds": row.measured_step_seconds,
            }
            for row in plan.ablations
        ],
        "measured_step_seconds": plan.measured_step_seconds,
        "run": {
            "seconds": run.seconds,
            "needs_bytes": run.need_bytes,
            "budget_bytes": run.budget_bytes,
            "jobs": {
                name: {"steps": totals[name].steps, "ends": ends, "state_bytes": totals[name].state_bytes}
                for name, ends in run.end_seconds.items()
            },
        },
        "first_window": plan.window.numbers,
        **(sweep_numbers(run, plan.case.sweeps, totals) if plan.case.sweeps else {}),
    }


def _resident_numbers(prediction: Prediction) -> dict[str, Any]:
    memory = prediction.choice.memory
    return {
        "streamed": False,
        "stages": [
            {"layers": stage.layer_count, "needs_bytes": need, "budget_bytes": memory.budget_bytes}
            for stage, need in zip(
                prediction.choice.layout.stages, device_needs_bytes(prediction), strict=True
            )
        ],
        "groups": shared_groups(prediction.program),
        "order": "1F1B" if prediction.choice.layout.is_pipeline else "rounds",
        "aboard": list(prediction.window.shapes),
        "optimizer_offloaded": prediction.choice.layout.offloads_optimizer,
        "host_bytes": prediction.choice.host_bytes,
        "why": prediction.choice.reason,
    }


def _streamed_numbers(outlook: StreamOutlook, plan: Plan) -> dict[str, Any]:
    choice, layout, budget = outlook.choice, outlook.choice.layout, outlook.case.device.budget_bytes
    devices = outlook.forecast.devices
    return {
        "streamed": True,
        "stages": [
            {"layers": stage.layer_count, "resident": stage.is_resident}
            | ({"device": home * layout.shards} if devices > 1 else {})
            for stage, home in zip(layout.stages, layout.stage_workers, strict=True)
        ],
        "slots": max(layout.slot_counts),
        "adapters_travel": layout.adapters_travel,
        "inputs_offloaded": layout.offloads_inputs,
        "weights_in_files": choice.reads_weight_files,
        "aboard": list(plan.window.shapes),
        "device_bytes": choice.peak_device_bytes,
        "needs_bytes": (choice.peak_device_bytes,) * devices,
        "budget_bytes": [budget] * devices if devices > 1 else budget,
        "host_bytes": choice.host_bytes,
        "round_seconds": choice.round_seconds,
        "unhidden_seconds": choice.waiting_fraction * outlook.forecast.seconds,
        "uploaded_bytes": outlook.uploaded_bytes,
        "why": choice.reason,
    }


def _candidate_numbers(candidate: Candidate) -> dict[str, Any]:
    return {
        **asdict(candidate.division),
        "capacity": candidate.capacity,
        "tokens_per_second": candidate.tokens_per_second,
        "needs_bytes": candidate.needs_bytes,
        "idle_share": candidate.idle_fraction,
        "limited_by": candidate.limited_by,
    }


def _forecast_numbers(forecast: Forecast) -> dict[str, Any]:
    return {
        "way": forecast.name,
        "step_seconds": forecast.step_seconds,
        "tokens_per_second": forecast.tokens_per_second,
        "bubbles": forecast.bubbles,
        "microbatches": forecast.microbatches,
        "capacity": forecast.capacity,
        "peak_bytes": forecast.peaks,
        "fits": forecast.fits,
    }
