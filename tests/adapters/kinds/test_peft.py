"""PEFT is the oracle of every kind that it has: trained beside all others, a job equals PEFT alone."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel

from tests import bench, oracle
from tests.adapters.kinds.cases import CONVERTED, NOT_NEUTRAL, WITH_PEFT, by_peft, job, samples, write_start
from tests.cases import slow_but
from tests.families import tiny

FAMILIES = slow_but(["llama", "gpt2", "qwen2"], ["llama", "gpt2"])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_beside_all_others_equals_peft_alone(family, tmp_path):
    model = tiny(family, torch.float64)
    starts = {kind: write_start(tmp_path / f"start-{kind}", model, kind, family) for kind in WITH_PEFT}
    jobs = [job(kind, family, starts[kind]) for kind in WITH_PEFT]
    bench.train(bench.base(family), tmp_path / "out", jobs, capacity=512)
    for kind in WITH_PEFT:
        got = bench.trained(tmp_path / "out", kind, bench.adapter(starts[kind]))
        oracle.assert_equal_float64(got, by_peft(kind, family, starts[kind]))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_loads_what_was_trained_and_computes_the_same(family, tmp_path):
    """Also where it starts by itself: neutral, or as PEFT draws it."""
    rows = bench.rows(samples("held out"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    jobs = [
        job(kind, family, eval={"path": str(tmp_path / "rows.jsonl")}) for kind in (*WITH_PEFT, *CONVERTED)
    ]
    bench.train(bench.base(family), tmp_path / "out", jobs)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    plain = oracle.mean_loss(tiny(family, torch.float64), samples("held out"))
    for kind in (*WITH_PEFT, *CONVERTED):
        model = PeftModel.from_pretrained(tiny(family, torch.float64), tmp_path / "out" / kind)
        first, *_, last = [one["eval_loss"] for one in lines if one["job"] == kind and "eval_loss" in one]
        neutral = first == pytest.approx(plain, rel=1e-9)
        assert neutral is (kind not in NOT_NEUTRAL), f"{kind} at its start"
        assert last == pytest.approx(oracle.mean_loss(model.double().eval(), samples("held out")), rel=1e-6)
        assert abs(last - first) > 1e-6
