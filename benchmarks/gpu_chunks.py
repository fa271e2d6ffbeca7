"""One long sample per step on one GPU: in chunks that reuse keys and values, whole, and in tiles of rows.

    python -m benchmarks.gpu_chunks [--shape 1b] [--layers N] [--length 32768] [--chunks 16384,8192,4096]
                                    [--rank R] [--steps N] [--toy] [--json FILE]

`whole` keeps all activations of a pass over the whole sample. `tiles` keeps as much, but computes the layers
in tiles of 8192 rows, as runs do on one device. Chunks keep all activations of all chunks, and are meant for
pipelines; on one device the table says what they cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

from benchmarks.long_samples import GIB, TILE_ROWS, LongStep, timed
from weftune.bench.baselines import BaselineWork
from weftune.bench.gpu_step import attach_jobs
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, build, toy_size
from weftune.bench.timing import bench_hardware, measure_or_explain
from weftune.bench.weftune_side import AttachedJobs, resident_jobs
from weftune.plan.program.program import NOTHING, Program, Recompute
from weftune.plan.window.orders import Work, chunked_multi_job, cut_long_samples
from weftune.plan.window.pace import guess_pace, pace_prices


def in_chunks(program: Program, rows: int) -> Program:
    """Return the same batches with samples in chunks of at most `rows` rows."""
    work = cut_long_samples(Work(program.capacity, program.microbatches, program.batches), rows)
    prices = pace_prices(work.microbatches, [guess_pace(1)])
    return chunked_multi_job(work, 1, prices, program.capacity)


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SIZES, default="1b")
    parser.add_argument("--layers", type=int, help="keep only so many layers")
    parser.add_argument("--length", type=int, default=32768, help="tokens of the sample")
    parser.add_argument("--chunks", default="16384,8192,4096", help="rows per chunk, separated by commas")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help="timed steps after one more")
    parser.add_argument("--toy", action="store_true", help="a tiny base on the CPU, to try the script")
    options = parser.parse_args()
    if (hardware := bench_hardware(options.toy)) is None:
        parser.error("no GPU is found here; --toy runs on the CPU")
    size = SIZES[options.shape]
    size = replace(size, layers=options.layers or size.layers, context=max(size.context, options.length))
    size = replace(toy_size(size), context=size.context) if options.toy else size
    work = BaselineWork(jobs=1, batch=1, length=options.length, rank=options.rank)
    attached: AttachedJobs = resident_jobs(build(size, hardware), hardware.device)
    attach_jobs(attached, size, work)

    def step(rows: int | None) -> None:
        program = attached.plan(1, options.length)
        attached.run(program if rows is None else in_chunks(program, rows))

    cases: dict[str, tuple[Recompute, Callable[[], None]]] = {
        "whole": (NOTHING, partial(step, None)),
        "tiles": (Recompute(recomputes_outputs=True, tile_rows=TILE_ROWS), partial(step, None)),
    }
    for rows in map(int, options.chunks.split(",")):
        cases[f"chunks of {rows:,} rows"] = NOTHING, partial(step, rows)
    found: list[LongStep] = []
    for name, (recompute, run) in cases.items():
        attached.recompute = recompute
        measure = partial(timed, run, hardware, options.steps)
        found.append(LongStep(name, options.length, measure_or_explain(measure, hardware)))
        print(found[-1].line(), flush=True)
    whole = found[0].measured
    for row in found[1:]:
        if row.measured.seconds is not None and whole.seconds is not None:
            more = ((row.measured.peak_bytes or 0) - (whole.peak_bytes or 0)) / GIB
            print(f"{row.name:24} {row.measured.seconds / whole.seconds:6.3f} of the time, {more:+7.2f} GiB")
    finish({"size": asdict(size), "steps": [asdict(row) for row in found]}, options.json)


if __name__ == "__main__":
    main()
