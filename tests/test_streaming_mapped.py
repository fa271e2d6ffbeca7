"""A host too small for the layers that the device does not hold: they stay in their files, and it is said."""

import os
from functools import partial

import pytest
import torch

from tests import bench
from tests.outputs import assert_same_results, status
from tests.plan.stream_cases import base, job
from tests.run.models import deep
from weftune import JobSpec, Options
from weftune.base.spec import BaseSpec
from weftune.errors import BaseModelError, HostTooSmall
from weftune.plan.layout.choose import Machine, choose_layout
from weftune.trainer.machine import file_stream_device

GPU = 480 << 10
"""Too little for a base of 282 KiB, two adapters and their passes."""
HOST = 20 << 10
"""Less than a layer takes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("mapped")
    deep("opt", torch.float64).save_pretrained(found, max_shard_size="60KB")
    return found


def trainer(folder, output, dtype="float64", **options):
    jobs = [
        JobSpec(
            name=name,
            steps=8,
            batch_size=2,
            learning_rate=1e-2,
            seed=seed,
            data=bench.rows(bench.samples(12, seed=seed)),
            adapter={"rank": 2, "dropout": 0.1},
            eval={"fraction": 0.2, "every": 4},
        )
        for seed, name in enumerate("ab")
    ]
    spec = BaseSpec(model=str(folder), dtype=dtype)
    return bench.trainer(spec, output, jobs, options=Options(device="cpu", **options))


def notes(output):
    return " ".join(status(output)["notes"])


@pytest.fixture
def small_host(monkeypatch):
    """No test can take the machine's memory away."""
    monkeypatch.setattr("weftune.trainer.machine.host_budget", lambda deterministic: HOST)


@pytest.mark.slow
def test_they_train_to_the_same_and_it_is_said(folder, tmp_path, small_host):
    trainer(folder, tmp_path / "whole").run()
    results = trainer(folder, tmp_path / "mapped", gpu_memory=GPU).run()
    assert all(result.state == "succeeded" for result in results.values())
    assert_same_results(tmp_path / "mapped", tmp_path / "whole")
    told = notes(tmp_path / "mapped")
    assert "weights are read from their files in every step, since the host has 20480 bytes for a run" in told
    assert "GiB came from the files of the base; training waited for the host in" in told


@pytest.mark.slow
def test_while_the_host_has_room_they_are_kept_there(folder, tmp_path):
    trainer(folder, tmp_path / "kept", gpu_memory=GPU).run()
    told = notes(tmp_path / "kept")
    assert "streamed in" in told
    assert "came from the host" in told
    assert "files" not in told


def test_files_of_another_dtype_are_told_beside_what_the_host_lacks(folder, tmp_path, small_host):
    with pytest.raises(HostTooSmall) as told:
        trainer(folder, tmp_path / "other", dtype="float32", gpu_memory=GPU // 2).run()
    first, second = str(told.value).splitlines()
    assert first.startswith("the host needs ")
    assert "20480 bytes of its memory are available" in first
    assert f"The weights of {folder} cannot be read from their files in every step: " in second
    assert "is stored as F64 and the run computes in F32; set the base's dtype to that of its files" in second


def test_a_file_that_is_cut_off_is_told_before_anything_is_loaded(tmp_path, small_host):
    deep("opt", torch.float64).save_pretrained(tmp_path / "model")
    whole = tmp_path / "model" / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(HostTooSmall, match="file not fully covered"):
        trainer(tmp_path / "model", tmp_path / "out", gpu_memory=GPU).run()
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_file_that_changes_under_way_ends_the_run_with_a_sentence_and_nothing_is_lost(
    folder, tmp_path, small_host
):
    trainer(folder, tmp_path / "whole").run()
    shard = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    written = shard.stat().st_mtime_ns

    def touch(_event):
        os.utime(shard, ns=(written, written + 10**9))

    try:
        with pytest.raises(BaseModelError, match=r"has changed while weights .* resume the run: .*resume"):
            trainer(folder, tmp_path / "mapped", gpu_memory=GPU).run(touch)
    finally:
        os.utime(shard, ns=(written, written))
    results = trainer(folder, tmp_path / "mapped", gpu_memory=GPU, resume=True).run()
    assert all(result.state == "succeeded" for result in results.values())
    assert_same_results(tmp_path / "mapped", tmp_path / "whole")


def test_fewer_jobs_at_once_are_better_than_weights_in_files():
    """The host holds the layers and the state of one job, but not of two; no file is looked at."""
    jobs = [job(name, trainable=400_000, longest=8) for name in "ab"]
    nowhere = BaseSpec(model="/nowhere/at/all", dtype="float32")

    def found(host):
        return choose_layout(
            base(8),
            jobs,
            Machine(
                on_gpu=False,
                budget_bytes=1 << 40,
                stream_budget_bytes=4_000_000,
                host_budget_bytes=host,
                capacity=64,
                make_file_device=partial(file_stream_device, nowhere, bench.CPU),
            ),
        )

    choice = found(13_000_000)
    assert choice.is_streamed
    assert not choice.reads_weight_files
    assert choice.layout.adapters_travel
    assert choice.host_bytes <= 13_000_000
    with pytest.raises(HostTooSmall, match="There is no folder /nowhere/at/all"):
        found(8_000_000)
