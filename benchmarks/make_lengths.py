"""Writes lengths.json: token counts of real samples, for machines that do not have the datasets.

Rows are rendered and counted as a job would, with the tokenizer and chat template of SmolLM2-135M-Instruct;
the counts are spread evenly over each file.

    python -m benchmarks.make_lengths [--data FOLDER]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from weftune.base.load import load_tokenizer
from weftune.base.spec import DEMO, BaseSpec
from weftune.bench.gpu_lengths import FILE
from weftune.data.prepare import prepare
from weftune.data.spec import DataSpec

DATASETS = {
    "gsm8k": "gsm8k_train",
    "openbookqa": "openbookqa_train",
    "sst2": "sst2_train7k",
    "rte": "rte_train",
}
SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"
COUNT = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=SHARED_DATA, help="the folder of the JSONL files")
    options = parser.parse_args()
    tokenizer = load_tokenizer(BaseSpec(model=DEMO))
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for name, file in DATASETS.items():
            spec = DataSpec(path=str(options.data / f"{file}.jsonl"))
            lengths = prepare(spec, None, tokenizer, Path(cache)).train.lengths
            found[name] = lengths[np.linspace(0, len(lengths) - 1, COUNT).astype(int)].tolist()
            print(f"{name:<12}{len(lengths):6} samples, mean {lengths.mean():6.1f}, longest {lengths.max()}")
    FILE.write_text(
        "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}\n"
    )


if __name__ == "__main__":
    main()
