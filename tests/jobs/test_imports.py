from __future__ import annotations

import subprocess
import sys


def test_jobs_never_import_torch() -> None:
    script = """
import importlib, pkgutil, sys
import weftune.jobs, weftune.adapters.kinds, weftune.cli.main
for module in pkgutil.iter_modules(weftune.jobs.__path__):
    importlib.import_module(f"weftune.jobs.{module.name}")
heavy = {"torch", "transformers", "datasets", "peft", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True)
