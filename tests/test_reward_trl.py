"""Reward models through the whole system have the weights of TRL's RewardTrainer. One microbatch of TRL is a
global batch of Weftune, so that the extreme rewards are equal."""

import json
import random

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests import bench, oracle
from tests.families import tiny
from tests.outputs import lines
from weftune import JobSpec
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.registry import adapter_layout, get_kind
from weftune.data.samples import SampleOrder

RATE, SEED, BATCH = 1e-2, 5, 4
CLOSE = 1e-5
"""Relative distance of what training moved, and of losses and metrics."""
SPEC = LoraSpec(rank=4, modules_to_save=("score",))
pytestmark = pytest.mark.slow


def pairs(count, seed):
    rng = random.Random(seed)

    def words(low, high):
        return " ".join(f"w{rng.randrange(6, 97)}" for _ in range(rng.randrange(low, high)))

    return [
        {"prompt": f"{words(2, 6)} ", "chosen": words(2, 9), "rejected": words(2, 9)} for _ in range(count)
    ]


ROWS, HELD_OUT = pairs(11, 0), pairs(BATCH, 1)


def classifier():
    """The tiny base as transformers' model for sequence classification."""
    base = tiny("llama", torch.float64, 0)
    base.config.num_labels, base.config.pad_token_id = 1, 0
    model = AutoModelForSequenceClassification.from_config(base.config, dtype=torch.float64)
    model.model = base.model
    return model


def trained_by_trl(start, output, coefficient):
    """Train the adapter in `start` with TRL for one epoch; return its weights, the lines of its steps and the
    metrics of held-out rows."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from peft import PeftModel, get_peft_model_state_dict

    model = PeftModel.from_pretrained(classifier(), start, is_trainable=True)
    settings = trl.RewardConfig(
        output_dir=str(output), use_cpu=True, per_device_train_batch_size=BATCH, num_train_epochs=1,
        per_device_eval_batch_size=BATCH, learning_rate=RATE, lr_scheduler_type="linear", weight_decay=0.0,
        max_grad_norm=1.0, center_rewards_coefficient=coefficient, logging_steps=1, report_to="none",
        save_strategy="no", max_length=None, bf16=False, gradient_checkpointing=False, optim="adamw_torch",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    order = SampleOrder(len(ROWS), BATCH, SEED).rows_of_epoch(0)
    trainer = trl.RewardTrainer(
        model, args=settings, train_dataset=Dataset.from_list([ROWS[row] for row in order]),
        eval_dataset=Dataset.from_list(HELD_OUT), processing_class=bench.tokenizer(),
    )  # fmt: skip
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return get_peft_model_state_dict(trainer.model, save_embedding_layers=False), steps, trainer.evaluate()


def write_start(base, folder):
    """Write an adapter with a scalar head that changes the base."""
    layout = adapter_layout(SPEC, base.shape.sites)
    flat = torch.randn(layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.3
    get_kind("lora").save(folder, SPEC, layout.parameter_views(flat), base.shape.sites, "tiny/llama")


@pytest.mark.parametrize("coefficient", [None, 0.1])
def test_losses_metrics_and_weights_equal_those_of_trl(tmp_path, coefficient):
    base = bench.base("llama")
    write_start(base, tmp_path / "start")
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HELD_OUT))
    job = JobSpec(
        name="reward", data=ROWS, epochs=1, batch_size=BATCH, learning_rate=RATE, clip=1.0,
        objective={"kind": "reward", "center_rewards_coefficient": coefficient}, seed=SEED,
        adapter={"rank": 4, "init_from": str(tmp_path / "start")},
        eval={"path": str(tmp_path / "held_out.jsonl")},
    )  # fmt: skip
    bench.train(base, tmp_path / "out", [job])
    expected, steps, evaluation = trained_by_trl(tmp_path / "start", tmp_path / "trl", coefficient)
    stepped = [line for line in lines(tmp_path / "out") if "loss" in line]
    *_, evaluated = [line for line in lines(tmp_path / "out") if "eval_loss" in line]
    assert len(stepped) == 3
    for line, wanted in zip(stepped, steps, strict=True):
        names = ("loss", *job.objective.metrics)
        found = {name: line[name] for name in names}
        assert found == pytest.approx({name: float(wanted[name]) for name in names}, rel=CLOSE, abs=CLOSE)
    names = [f"eval_{name}" for name in ("loss", *job.objective.metrics)]
    found, wanted = ({name: one[name] for name in names} for one in (evaluated, evaluation))
    assert found == pytest.approx(wanted, rel=CLOSE, abs=CLOSE)
    before = bench.adapter(tmp_path / "start")
    own = bench.adapter(tmp_path / "out" / "reward")
    moved, target = ({name: one[name] - before[name] for name in before} for one in (own, expected))
    assert oracle.distance(moved, target) < CLOSE
