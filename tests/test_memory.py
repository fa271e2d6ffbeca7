"""Jobs wait until they fit; a pass that does not fit is made again in halves; nobody is lost."""

import json
import random
import shutil

import pytest
import torch
from transformers import OPTConfig

from tests import bench
from tests.base.folders import word_tokenizer
from tests.cases import slow_but
from tests.families import COMMON, randomised
from tests.outputs import assert_same_results, assert_whole, jobs_folder, lines, status
from weftune import JobSpec, Options
from weftune.core.shapes import JobShape
from weftune.ops import adamw
from weftune.plan.cost.memory import MemoryModel
from weftune.run.events import Stepped

RANK = 4


def job(name, tokens=20, **keys):
    rows = bench.rows(bench.samples(12, seed=len(name), longest=tokens))
    settings = {
        "steps": 6,
        "batch_size": 4,
        "learning_rate": 1e-2,
        "adapter": {"rank": RANK},
        "save_every": 2,
    }
    return JobSpec(name=name, data=rows, **settings | keys)


def budget_for(base, jobs, capacity, taken=0):
    """What so many jobs of `job`'s size and a microbatch of `capacity` tokens take, and half a job more."""
    trainable = sum(RANK * (site.in_features + site.out_features) for site in base.shape.sites)
    shapes = [JobShape(str(n), 0, n, trainable, capacity) for n in range(jobs)]
    memory = MemoryModel(base.shape, 0, taken)
    return memory.peak_bytes(shapes, capacity) + memory.state_bytes(shapes[:1]) // 2


@pytest.fixture
def settled(monkeypatch):
    """What the process holds is not the same twice; a budget to the byte wants it left out."""
    monkeypatch.setattr("weftune.trainer.machine.bytes_before_base", lambda device: 0)


def test_jobs_that_do_not_fit_wait_with_the_reason_by_priority_then_file_order(tmp_path, settled):
    base = bench.base()
    jobs = [job("first"), job("second"), job("third"), job("urgent", priority=5, steps=3)]
    trainer = bench.trainer(base, tmp_path / "out", jobs, options=Options(memory=budget_for(base, 2, 20)))
    reasons = {}

    def callback(event):
        for name, found in status(tmp_path / "out")["jobs"].items():
            if found["state"] == "queued":
                reasons.setdefault(name, found["reason"])

    trainer.run(callback)
    order = list(dict.fromkeys(line["job"] for line in lines(tmp_path / "out")))
    assert set(order[:2]) == {"urgent", "first"}
    assert order[2:] == ["second", "third"]
    assert reasons.keys() == {"second", "third"}
    assert "with 2 other jobs running" in reasons["second"]
    assert reasons["third"] == "it waits behind second, which comes first"
    assert max(len(program.jobs) for program in trainer.programs) == 2
    assert_whole(tmp_path / "out")
    bench.train(base, tmp_path / "free", jobs)
    assert_same_results(tmp_path / "out", tmp_path / "free")


def test_a_job_too_large_even_alone_fails_with_a_sentence_and_blocks_nobody(tmp_path, settled):
    base = bench.base()
    jobs = [job("large", tokens=60, priority=9, adapter={"rank": 32}), job("small"), job("other")]
    results = bench.train(base, tmp_path / "out", jobs, memory=budget_for(base, 2, 20))
    assert results["large"].state == "failed"
    assert results["large"].reason.startswith("it cannot run even alone: needs ")
    assert "lower data.max_length or rank, or give more memory" in results["large"].reason
    assert (results["small"].state, results["other"].state) == ("succeeded", "succeeded")


def strike_above(base, rows, times=None):
    """A device that has no room for a pass of more than `rows` rows."""
    struck = []

    def hook(_module, _args, keys):
        if keys["input_ids"].shape[1] > rows and (times is None or len(struck) < times):
            struck.append(keys["input_ids"].shape[1])
            raise torch.OutOfMemoryError("no room")

    base.model.base_model.register_forward_pre_hook(hook, with_kwargs=True)
    return struck


def jobs_with_looks():
    return [job(name, eval={"fraction": 0.3, "every": 2}, keep="best") for name in ("a", "bb", "ccc")]


@pytest.fixture(scope="module")
def want(tmp_path_factory):
    output = tmp_path_factory.mktemp("memory") / "want"
    bench.train(bench.base(), output, jobs_with_looks())
    return output


def test_a_pass_that_does_not_fit_halves_the_capacity_and_changes_no_result(tmp_path, want):
    base = bench.base()
    struck = strike_above(base, 40)
    bench.train(base, tmp_path / "out", jobs_with_looks(), capacity=200)
    assert len(struck) == 3, "from 200 to 100 to 50 to 25"
    assert_whole(tmp_path / "out")
    assert_same_results(tmp_path / "out", want)
    notes = [one for one in status(tmp_path / "out")["notes"] if one.startswith("Out of memory")]
    assert notes[0] == "Out of memory with 200 tokens per microbatch: continuing with 100."
    assert len(notes) == 3


@pytest.mark.parametrize("at", slow_but(range(0, 14, 2), [0, 6]))
def test_wherever_memory_runs_short_no_step_evaluation_or_save_is_lost(tmp_path, want, at):
    """Once, at pass number `at`: in the first evaluation, inside a step, or in the last evaluation."""
    base = bench.base()
    passes = []

    def hook(_module, _args):
        passes.append(1)
        if len(passes) == at + 1:
            raise torch.OutOfMemoryError("no room")

    base.model.base_model.register_forward_pre_hook(hook)
    bench.train(base, tmp_path / "out", jobs_with_looks(), capacity=100)
    assert len(passes) > at
    assert_whole(tmp_path / "out")
    assert_same_results(tmp_path / "out", want)


@pytest.mark.slow
def test_a_process_that_really_has_no_memory_left_goes_on_in_halves(tmp_path, forks):
    """1024 tokens of this deep, narrow model take 0.75 GiB and 512 half of it; 0.5 GiB are there."""
    jobs = [{"name": name, "steps": 1, "batch_size": 23, "adapter": {"rank": 2}} for name in ("a", "b")]
    folder = jobs_folder(tmp_path, jobs)
    shutil.rmtree(folder / "model")
    sizes = {"hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 64, "num_attention_heads": 4}
    randomised(OPTConfig(**COMMON, **sizes, word_embed_proj_dim=64)).save_pretrained(folder / "model")
    word_tokenizer().save_pretrained(folder / "model")
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(6, 97)}" for _ in range(rng.randrange(40, 60))) for _ in range(60)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ["train", "jobs.yaml", "--memory", "100GiB", "--output"]
    assert forks.weftune(*command, "want", cwd=folder) == 0
    # On busy cores a run says that it is slower than planned.
    assert not any("memory" in note for note in status(folder / "want")["notes"])
    assert forks.weftune(*command, "out", cwd=folder, memory=500 << 20) == 0, (folder / "log").read_text()
    notes = [note for note in status(folder / "out")["notes"] if "memory" in note]
    assert notes[0] == "Out of memory with 1024 tokens per microbatch: continuing with 512."
    assert_whole(folder / "out")
    assert_same_results(folder / "out", folder / "want")


def test_at_the_longest_sample_the_last_comer_goes_back_and_all_finish(tmp_path):
    """Three jobs never fit, however small the microbatch; two do."""
    jobs = [job("a"), job("bb"), job("ccc")]
    bench.train(bench.base(), tmp_path / "want", jobs)
    base = bench.base()
    trainer = bench.trainer(base, tmp_path / "out", jobs, options=Options(capacity=20))
    reasons = []

    def hook(_module, _args):
        if len(trainer.loop.executor.attached) > 2:
            raise torch.OutOfMemoryError("no room")

    def callback(event):
        last = status(tmp_path / "out")["jobs"]["ccc"]
        if last["state"] == "queued":
            reasons.append(last["reason"])

    base.model.base_model.register_forward_pre_hook(hook)
    trainer.run(callback)
    assert "out of memory with 3 attached jobs and 20 tokens per microbatch" in reasons[0]
    assert_whole(tmp_path / "out")
    assert_same_results(tmp_path / "out", tmp_path / "want")


def test_a_job_that_does_not_fit_even_alone_fails_and_those_behind_it_run(tmp_path):
    base = bench.base()
    strike_above(base, 30)
    long = bench.rows([(list(range(4, 54)), [True] * 50)] * 4)
    jobs = [job("a"), JobSpec(name="long", data=long, steps=3, batch_size=4, adapter={"rank": 2}), job("bb")]
    results = bench.train(base, tmp_path / "out", jobs, capacity=64)
    assert results["long"].state == "failed"
    assert "out of memory with 1 attached job and 50 tokens per microbatch" in results["long"].reason
    assert (results["a"].state, results["bb"].state) == ("succeeded", "succeeded")
    bench.train(bench.base(), tmp_path / "want", [job("a"), job("bb")])
    for name in ("a", "bb"):
        got, want = bench.losses(tmp_path / "out", name), bench.losses(tmp_path / "want", name)
        assert got == pytest.approx(want, rel=1e-9)


def test_out_of_memory_inside_an_optimizer_step_fails_that_job_only(tmp_path, monkeypatch):
    jobs = [job("a"), job("bb")]
    bench.train(bench.base(), tmp_path / "want", jobs[:1])
    trainer = bench.trainer(bench.base(), tmp_path / "out", jobs)

    def callback(event):
        if isinstance(event, Stepped) and (event.job, event.step) == ("bb", 2):
            master = trainer.loop.executor.attached["bb"].master

            def short(masters, *others, **settings):
                if masters[0].data_ptr() == master.data_ptr():
                    raise torch.OutOfMemoryError("no room")
                step(masters, *others, **settings)

            step = adamw.adamw
            monkeypatch.setattr(adamw, "adamw", short)

    results = trainer.run(callback)
    assert results["bb"].reason == "out of memory inside its optimizer step 3"
    assert (tmp_path / "out" / "bb" / "checkpoints" / "step-00000002").is_dir()
    assert bench.losses(tmp_path / "out", "a") == bench.losses(tmp_path / "want", "a")
