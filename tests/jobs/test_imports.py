from __future__ import annotations

import subprocess
import sys


def test_jobs_never_import_torch() -> None:
    script = """
import importlib, pkgutil, sys
import weft.jobs, weft.adapters.kinds, weft.cli.main
for module in pkgutil.iter_modules(weft.jobs.__path__):
    importlib.import_module(f"weft.jobs.{module.name}")
heavy = {"torch", "transformers", "datasets", "peft", "plotly", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True)
