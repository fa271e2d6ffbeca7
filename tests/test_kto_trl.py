"""KTO through the whole system trains the weights of TRL's KTOTrainer, from the base or from an adapter. One
microbatch of TRL is a global batch of Weftune, so that the KL terms are equal."""

import json
import random

import pytest
import torch

from tests import bench, oracle
from tests.families import tiny
from tests.outputs import lines
from tests.test_dpo_trl import write_start
from weftune import JobSpec
from weftune.data.samples import SampleOrder

RATE, SEED, BATCH = 1e-2, 5, 5
CLOSE = 1e-3
"""Relative distance of what training moved: TRL computes log-probabilities in float32."""
pytestmark = pytest.mark.slow


def labelled(count, seed):
    rng = random.Random(seed)

    def words(low, high, most):
        return " ".join(f"w{rng.randrange(6, most)}" for _ in range(rng.randrange(low, high)))

    return [
        {
            "prompt": f"{words(2, 6, 97)} ",
            "completion": words(2, 9, 12),
            "label": rng.random() < 0.9,
        }
        for _ in range(count)
    ]


ROWS, HELD_OUT = labelled(13, 0), labelled(BATCH, 1)


def trained_by_trl(start, output, loss_type):
    """Train the adapter in `start` with TRL for one epoch; return its weights, the lines of its steps and the
    metrics of held-out rows."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from peft import PeftModel, get_peft_model_state_dict

    model = PeftModel.from_pretrained(tiny("llama", torch.float64, 0), start, is_trainable=True)
    settings = trl.KTOConfig(
        output_dir=str(output), use_cpu=True, per_device_train_batch_size=BATCH, num_train_epochs=1,
        per_device_eval_batch_size=BATCH, learning_rate=RATE, lr_scheduler_type="linear", weight_decay=0.0,
        max_grad_norm=1.0, beta=0.3, loss_type=loss_type, undesirable_weight=1.3, logging_steps=1,
        report_to="none", save_strategy="no", max_length=None, bf16=False, gradient_checkpointing=False,
        optim="adamw_torch",
    )  # fmt: skip
    order = SampleOrder(len(ROWS), BATCH, SEED).rows_of_epoch(0)
    trainer = trl.KTOTrainer(
        model, args=settings, train_dataset=Dataset.from_list([ROWS[row] for row in order]),
        eval_dataset=Dataset.from_list(HELD_OUT), processing_class=bench.tokenizer(),
    )  # fmt: skip
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return get_peft_model_state_dict(trainer.model, save_embedding_layers=False), steps, trainer.evaluate()


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("changes", [False, True])
def test_losses_metrics_and_weights_equal_those_of_trl(tmp_path, changes, loss_type):
    base = bench.base("llama")
    write_start(base, tmp_path / "start", changes)
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HELD_OUT))
    start = {"init_from": str(tmp_path / "start")} if changes else {}
    job = JobSpec(
        name="kto", data=ROWS, epochs=1, batch_size=BATCH, learning_rate=RATE, clip=1.0,
        objective={"kind": "kto", "beta": 0.3, "loss_type": loss_type, "undesirable_weight": 1.3},
        adapter={"rank": 4, **start}, seed=SEED, eval={"path": str(tmp_path / "held_out.jsonl")},
    )  # fmt: skip
    bench.train(base, tmp_path / "out", [job])
    expected, steps, evaluation = trained_by_trl(tmp_path / "start", tmp_path / "trl", loss_type)
    stepped = [line for line in lines(tmp_path / "out") if "loss" in line]
    *_, evaluated = [line for line in lines(tmp_path / "out") if "eval_loss" in line]
    assert len(stepped) == 3
    for line, wanted in zip(stepped, steps, strict=True):
        names = [name for name in ("loss", *job.objective.metrics) if name in wanted]
        found = {name: line[name] for name in names}
        assert found == pytest.approx({name: wanted[name] for name in names}, rel=1e-4, abs=1e-5)
    if loss_type == "kto":
        assert max(line["kl"] for line in stepped) > 0.01
    names = [f"eval_{name}" for name in ("loss", *job.objective.metrics)]
    found, wanted = ({name: one[name] for name in names if name in one} for one in (evaluated, evaluation))
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    before = bench.adapter(tmp_path / "start")
    own = bench.adapter(tmp_path / "out" / "kto")
    moved, target = ({name: one[name] - before[name] for name in before} for one in (own, expected))
    assert oracle.distance(moved, target) < CLOSE
