"""DPO through the whole system trains the weights of TRL's DPOTrainer, from the base or from an adapter."""

from types import SimpleNamespace

import pytest
import torch

from tests import bench, oracle
from tests.families import tiny
from tests.outputs import lines
from tests.run import executors
from tests.test_references import ROWS
from weftune import JobSpec
from weftune.adapters.registry import get_kind

STEPS, RATE, SEED = 4, 1e-2, 5
CLOSE = 1e-6
"""The Trainer adds up losses in float32."""
EXACT = 1e-9
pytestmark = pytest.mark.slow


def exact_logprobs(hidden_ND, weight_VD, bias, labels_N, *_):
    """Compute what TRL's function of this signature returns. Its logits are float32 whatever its inputs are,
    and Adam magnifies their rounding where gradients are small."""
    logits_NV = torch.nn.functional.linear(hidden_ND, weight_VD, bias)
    logprobs_NV = logits_NV.log_softmax(-1)
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        mean_N, is_top1_N = logits_NV.mean(-1), logits_NV.argmax(-1) == labels_N
    return logprobs_NV.gather(1, labels_N[:, None])[:, 0], entropy_N, None, mean_N, is_top1_N


def write_start(base, folder, changes: bool):
    """Write an adapter that changes the base, or the one with which a job without `init_from` begins."""
    job = executors.prepare(base, "start", seed=SEED)
    made, spec = executors.job_training(base, job), job.spec.adapter
    views = made.layout.parameter_views(made.master)
    if changes:
        for number, value in enumerate(views.values()):
            value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(number)) * 0.3)
    get_kind("lora").save(folder, spec, views, base.shape.sites, "tiny/llama")


def trained_by_trl(start, output, loss_type):
    """Train the adapter in `start` with TRL; return its weights and the losses of its steps."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from peft import PeftModel, get_peft_model_state_dict

    model = PeftModel.from_pretrained(tiny("llama", torch.float64, 0), start, is_trainable=True)
    settings = trl.DPOConfig(
        output_dir=str(output), use_cpu=True, per_device_train_batch_size=len(ROWS), max_steps=STEPS,
        learning_rate=RATE, lr_scheduler_type="linear", weight_decay=0.0, max_grad_norm=1.0, beta=0.3,
        loss_type=loss_type, logging_steps=1, report_to="none", save_strategy="no", max_length=None,
        bf16=False, gradient_checkpointing=False, optim="adamw_torch",
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        model, args=settings, train_dataset=Dataset.from_list(ROWS), processing_class=bench.tokenizer()
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return get_peft_model_state_dict(trainer.model, save_embedding_layers=False), losses


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
@pytest.mark.parametrize("changes", [False, True])
def test_losses_and_weights_equal_those_of_trl(tmp_path, monkeypatch, changes, loss_type):
    monkeypatch.setattr(
        pytest.importorskip("trl").trainer.utils,
        "_ChunkedLogProbFunction",
        SimpleNamespace(apply=exact_logprobs),
    )
    base = bench.base("llama")
    write_start(base, tmp_path / "start", changes)
    start = {"init_from": str(tmp_path / "start")} if changes else {}
    job = JobSpec(
        name="dpo", data=ROWS, steps=STEPS, batch_size=len(ROWS), learning_rate=RATE, clip=1.0,
        objective={"kind": "dpo", "beta": 0.3, "loss_type": loss_type},
        adapter={"rank": 4, **start}, seed=SEED,
    )  # fmt: skip
    bench.train(base, tmp_path / "out", [job])
    expected, losses = trained_by_trl(tmp_path / "start", tmp_path / "trl", loss_type)
    found = bench.adapter(tmp_path / "out" / "dpo")
    assert [line["loss"] for line in lines(tmp_path / "out")] == pytest.approx(losses, rel=CLOSE)
    assert found.keys() == expected.keys()
    before = bench.adapter(tmp_path / "start")
    moved, wanted = ({name: one[name] - before[name] for name in before} for one in (found, expected))
    assert oracle.distance(moved, wanted) < EXACT
