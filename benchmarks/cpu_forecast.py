"""Predicted beside measured time and memory of the windows of a run on the CPU; see forecast.py.

python -m benchmarks.cpu_forecast [--base BASE | --shape SHAPE] [--json FILE]
"""

from __future__ import annotations

import torch

from benchmarks.forecast import forecast, forecast_arguments

BAR = 0.15


def main() -> None:
    forecast(forecast_arguments(__doc__ or "").parse_args(), torch.device("cpu"), BAR)


if __name__ == "__main__":
    main()
