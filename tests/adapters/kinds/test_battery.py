"""What holds for every kind: among others as alone, a NaN at home, however the base lies, and when killed."""

from __future__ import annotations

import math
import signal
import time
from itertools import cycle, product

import pytest
import torch
from peft import PeftModel

from tests import bench
from tests.adapters.kinds.cases import (
    CONVERTED,
    NOT_MERGED,
    PRUNED,
    WITH_PEFT,
    WITHOUT_PEFT,
    case,
    job,
    samples,
    targets,
)
from tests.cases import slow_but
from tests.families import tiny
from tests.launches import Launch, deep_folder
from tests.outputs import assert_same_results, assert_whole, status
from weftune import Options
from weftune.base.shape import model_shape, site_modules
from weftune.run.events import Stepped
from weftune.trainer.export import read_finished_kind

KINDS = [kind for kind in (*WITH_PEFT, *CONVERTED, *WITHOUT_PEFT, *PRUNED) if kind not in ("layers", "plus")]
MERGED = [kind for kind in KINDS if kind not in (*WITHOUT_PEFT, *PRUNED, *NOT_MERGED)]
SHORT = {"steps": 4}
POISONED = 2


def equal(output, other, kind, close=1e-9):
    assert bench.losses(output, kind) == pytest.approx(bench.losses(other, kind), rel=close)
    mine, theirs = bench.adapter(output / kind), bench.adapter(other / kind)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (mine[name] - value).double().norm() <= 10 * close * max(value.double().norm().item(), 1.0)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The output of one job of every kind, trained in the same microbatches."""
    output = tmp_path_factory.mktemp("kinds") / "out"
    trainer = bench.trainer(
        bench.base("llama"),
        output,
        [job(kind, "llama", **SHORT) for kind in KINDS],
        options=Options(capacity=512),
    )
    trainer.run()
    shared = [len(set(one.jobs)) for run in trainer.programs for one in run.microbatches]
    assert max(shared) == len(KINDS)
    return output


@pytest.mark.parametrize("kind", KINDS)
def test_alone_it_learns_what_it_learns_among_the_others(kind, together, tmp_path):
    bench.train(bench.base("llama"), tmp_path / "out", [job(kind, "llama", **SHORT)])
    equal(tmp_path / "out", together, kind)


def test_in_bfloat16_every_kind_learns_beside_the_others(together, tmp_path):
    jobs = [job(kind, "llama", **SHORT) for kind in KINDS]
    bench.train(bench.base("llama", torch.bfloat16), tmp_path / "out", jobs, capacity=512)
    for kind in KINDS:
        assert bench.losses(tmp_path / "out", kind) == pytest.approx(bench.losses(together, kind), rel=0.02)


EVERY_THIRD = [tuple(KINDS)[first::3] for first in range(3)]


@pytest.mark.parametrize(
    "kinds",
    slow_but(
        [(kinds,) for kinds in (*EVERY_THIRD, *((one,) for one in KINDS))],
        [(kinds,) for kinds in EVERY_THIRD],
    ),
    ids=" ".join,
)
def test_its_nan_stays_with_it(kinds, together, tmp_path):
    """Of a kind alone, or of a third of all kinds at once: the other two thirds learn what they learned."""
    jobs = [job(kind, "llama", **SHORT) for kind in KINDS]
    trainer = bench.trainer(bench.base("llama"), tmp_path / "out", jobs, options=Options(capacity=512))

    def spoil(event):
        if isinstance(event, Stepped) and event.job in kinds and event.step == POISONED:
            executor = trainer.loop.executor
            executor.banks.attached[event.job].weights.fill_(math.nan)

    trainer.run(spoil)
    for kind in KINDS:
        if kind in kinds:
            assert status(tmp_path / "out")["jobs"][kind]["state"] == "failed"
        else:
            equal(tmp_path / "out", together, kind)


@pytest.mark.parametrize(
    ("kind", "family"),
    slow_but(product(MERGED, ("llama", "gpt2")), zip(MERGED, cycle(("gpt2", "llama")), strict=False)),
)
def test_merged_into_the_base_it_computes_the_same(kind, family, tmp_path):
    bench.train(bench.base(family), tmp_path / "out", [job(kind, family, learning_rate=0.05)])
    folder, merged = tmp_path / "out" / kind, tiny(family, torch.float64)
    read_finished_kind(folder).merge(folder, site_modules(merged), model_shape(merged, merged.dtype).sites)
    peft = PeftModel.from_pretrained(tiny(family, torch.float64), folder).double().eval()
    tokens = torch.tensor([samples(kind)[0][0]])
    with torch.no_grad():
        got, want = merged(input_ids=tokens).logits, peft(input_ids=tokens).logits
        plain = tiny(family, torch.float64)(input_ids=tokens).logits
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert (want - plain).abs().max() > 1e-3


# -- however the base lies ---------------------------------------------------------------------------------


FEW = {"targets": ["k_proj"], "layers": "1-2"}
"""What a kind with a value for every weight adapts: more would not fit where the base is streamed."""


def kind_jobs(family):
    few = dict.fromkeys(PRUNED, FEW)
    return [
        {
            "name": kind,
            "steps": 6,
            "seed": 2,
            "adapter": {**case(kind, family).adapter, **few.get(kind, {})},
            "batch_size": 3,
        }
        for kind in KINDS
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    folder = deep_folder(tmp_path_factory.mktemp("deep"), kind_jobs("llama"), "llama", learning_rate=2e-3)
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    assert targets("llama") == ["k_proj", "v_proj", "down_proj"]
    return folder


@pytest.mark.slow
def test_streamed_from_host_memory_it_is_the_same(place, forks):
    words = ("train", "jobs.yaml", "--device", "cpu", "--output", "streamed", "--gpu-memory", "700KiB")
    assert forks.weftune(*words, cwd=place) == 0
    assert "The base is streamed in" in " ".join(status(place / "streamed")["notes"])
    assert_same_results(place / "streamed", place / "undisturbed")


@pytest.mark.slow
def test_in_two_stages_it_is_the_same(place):
    assert Launch(place, "stages", 2).wait() == 0
    assert_whole(place / "stages")
    assert_same_results(place / "stages", place / "undisturbed")


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same(place, forks):
    forks.start("train", "jobs.yaml", "--output", "killed", cwd=place)
    log = place / "killed" / "metrics.jsonl"
    while forks.running():
        if log.exists() and log.read_text().count('"dora"') >= 2:
            forks.signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    assert forks.wait() == -signal.SIGKILL
    assert forks.weftune("train", "jobs.yaml", "--output", "killed", "--resume", cwd=place) == 0
    assert_same_results(place / "killed", place / "undisturbed")
