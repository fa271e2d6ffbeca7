"""Predicted choices for a 70B base on several clusters: `python -m benchmarks.plan_clusters`.

All times come from data sheets. Nothing is measured, and no machine with several GPUs has been used.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import replace
from pathlib import Path

from weftune.cli import early
from weftune.launch.choice import choose_planned_layout
from weftune.launch.plan_case import PlanCase, read_case
from weftune.plan.cost.cluster import parse_cluster

EXAMPLE = Path(__file__).parents[1] / "examples" / "plan" / "70b.yaml"
CASES = (("8xH100", 8), ("8xH100", 1), ("4xA100-80G", 8), ("8xL40S:pcie", 8), ("2xRTX4090", 8))
"""Clusters, each with the number of jobs of the example that run there."""


def read_example(cluster: str, jobs: int) -> PlanCase:
    run = early.read_jobs_file(EXAMPLE)
    options = early.read_options(
        device=None, memory=None, gpu_memory=None, pipeline=None, replicas=1, gpus=None
    )
    run = replace(run, jobs=run.jobs[:jobs])
    return read_case(run, parse_cluster(cluster), options, on_this_machine=False)


def main() -> None:
    print("| cluster | jobs | options | tokens/s | idle | needs | limited by | the next | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for cluster, jobs in CASES:
        case = read_example(cluster, jobs)
        began = time.process_time()
        choice = choose_planned_layout(case)
        seconds = time.process_time() - began
        if not choice.candidates:
            round_tokens = sum(job.batch_tokens for job in choice.attached_jobs)
            speed = round_tokens / (choice.round_seconds or 1.0)
            print(
                f"| {cluster} | {jobs} | streamed over {choice.layout.workers} | {speed:,.0f} | "
                f"{choice.waiting_fraction:.0%} | {choice.peak_device_bytes / 2**30:.1f} GiB | memory | | "
                f"{seconds:.1f} |"
            )
            continue
        best, *others = choice.candidates
        following = f"{others[0].division.flags}: {others[0].tokens_per_second:,.0f}" if others else ""
        print(
            f"| {cluster} | {jobs} | {best.division.flags} | {best.tokens_per_second:,.0f} | "
            f"{best.idle_fraction:.1%} | {best.needs_bytes / 2**30:.1f} GiB | {best.limited_by} | "
            f"{following} | {seconds:.1f} |"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    gc.disable()
    main()
