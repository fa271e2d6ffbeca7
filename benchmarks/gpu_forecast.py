"""Predicted beside measured time and memory of the windows of a run on a GPU; see forecast.py.

Kernels are compiled at their first use and a pass is captured when its size comes the second time. Windows in
which that happened are in the table and counted apart; such passes are not fitted to.

    python -m benchmarks.gpu_forecast [--shape 1b|8b | --base BASE] [--json FILE]
"""

from __future__ import annotations

from benchmarks.forecast import forecast, forecast_arguments
from weftune.bench.timing import bench_hardware

BAR = 0.10


def main() -> None:
    parser = forecast_arguments(__doc__ or "")
    parser.set_defaults(base="", shape="1b", scale=2, steps=4.0)
    options = parser.parse_args()
    hardware = bench_hardware(options.toy)
    if hardware is None:
        parser.error("no CUDA device that torch can use; --toy runs on the CPU")
    if options.base:
        options.shape = None
    forecast(options, hardware.device, BAR)


if __name__ == "__main__":
    main()
