"""Loss, metrics and gradient of TRL's trainers on the pairs of `pair_cases`, computed by TRL's own code.

`TRL_EXPERIMENTAL_SILENCE=1 python -m tests.objectives.trl_oracle` records them in trl.json, from trl 1.16.0.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.adapters.toys import plain_model
from tests.families import tiny
from tests.objectives.pair_cases import (
    CASES,
    KTO_CASES,
    LABELS,
    LENGTHS,
    REWARD_CASES,
    mismatched_tokens,
    reference_sums,
    tokens_and_prompts,
)
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.objectives.spec import CpoSpec, DpoSpec, KtoSpec, ObjectiveSpec, OrpoSpec, RewardSpec

FILE = Path(__file__).parent / "trl.json"
LORA = LoraSpec(rank=2, alpha=4.0)
PROJECTIONS = 4


def projections(gradient: Tensor) -> list[float]:
    """Return the norm of a gradient, and its products with some random vectors."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(PROJECTIONS, len(gradient), generator=generator, dtype=torch.float64)
    return [gradient.norm().item(), *(vectors @ gradient.double()).tolist()]


def trl_numbers(spec: ObjectiveSpec, flat: Tensor) -> dict[str, Any]:
    """Return loss, metrics and projections of the gradient with respect to the LoRA weights `flat`, and the
    mean of the losses of evaluation batches of one pair."""
    if isinstance(spec, RewardSpec):
        return _reward_numbers(spec, flat)
    flat = flat.clone().requires_grad_()
    model = plain_model("llama", JobAdapter("job", LORA, 0), flat)
    model.generation_config = None  # type: ignore[assignment]
    with torch.enable_grad():
        if isinstance(spec, KtoSpec):
            loss, metrics = _kto(spec, model)
            single = [loss.item()]
        elif isinstance(spec, DpoSpec):
            loss, metrics = _dpo(spec, model)
            single = [_dpo(spec, model, pair)[0].item() for pair in range(len(LENGTHS))]
        else:
            assert isinstance(spec, CpoSpec | OrpoSpec)
            loss, metrics = _cpo_or_orpo(spec, model)
            single = [_cpo_or_orpo(spec, model, pair)[0].item() for pair in range(len(LENGTHS))]
        loss.backward()
    assert flat.grad is not None
    named = {name: float(metrics[name]) for name in spec.metrics}
    found = {"loss": loss.item(), "metrics": named, "gradient": projections(flat.grad)}
    return {**found, "eval_loss": sum(single) / len(single)}


def _reward_numbers(spec: RewardSpec, flat: Tensor) -> dict[str, Any]:
    """Return the numbers of a reward model. The gradient is that of the head, then of the LoRA weights."""
    flat, head_D = flat.clone().requires_grad_(), head_weights().requires_grad_()
    decoder = plain_model("llama", JobAdapter("job", LORA, 0), flat).base_model
    with torch.enable_grad():
        loss, metrics = _reward(spec, decoder, head_D)
        loss.backward()
        single = [_reward(spec, decoder, head_D, pair)[0].item() for pair in range(len(LENGTHS))]
    assert flat.grad is not None
    assert head_D.grad is not None
    return {
        "loss": loss.item(),
        "metrics": {name: float(metrics[name]) for name in spec.metrics},
        "gradient": projections(torch.cat([head_D.grad, flat.grad])),
        "eval_loss": sum(single) / len(single),
    }


def _reward(
    spec: RewardSpec, decoder: Any, head_D: Tensor, pair: int | None = None
) -> tuple[Tensor, dict[str, float]]:
    from trl import RewardTrainer

    found = tokens_and_prompts(pair)
    found = [*found[0::2], *found[1::2]]
    shown = [torch.ones(len(one), dtype=torch.long) for one, _ in found]

    def classify(input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> SimpleNamespace:
        output = decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)
        last_BD = output.last_hidden_state[torch.arange(len(input_ids)), attention_mask.sum(dim=1) - 1]
        return SimpleNamespace(logits=(last_BD @ head_D)[:, None])

    trainer: Any = object.__new__(RewardTrainer)
    trainer.model, trainer.accelerator = decoder, _accelerator()
    trainer.args = SimpleNamespace(center_rewards_coefficient=spec.center_rewards_coefficient)
    trainer._total_train_tokens, trainer._tp_size = 0, 1
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    inputs = {
        "input_ids": pad_sequence([one for one, _ in found], batch_first=True),
        "attention_mask": pad_sequence(shown, batch_first=True),
    }
    loss = trainer.compute_loss(classify, inputs)
    return loss, {name: values[0] for name, values in trainer._metrics["eval"].items()}


def head_weights() -> Tensor:
    return torch.randn(32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _accelerator() -> SimpleNamespace:
    def same(value: Any) -> Any:
        return value

    return SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same)


def _cpo_or_orpo(
    spec: CpoSpec | OrpoSpec, model: Any, pair: int | None = None
) -> tuple[Tensor, dict[str, float]]:
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    trainer: Any = object.__new__(CPOTrainer if isinstance(spec, CpoSpec) else ORPOTrainer)
    trainer.is_encoder_decoder = trainer.aux_loss_enabled = False
    trainer.pad_token_id = trainer.padding_value = 0
    trainer.accelerator, trainer.beta = _accelerator(), spec.beta
    if isinstance(spec, CpoSpec):
        trainer.alpha = 0.0
        for name in ("loss_type", "label_smoothing", "cpo_alpha", "simpo_gamma"):
            setattr(trainer, name, getattr(spec, name))
    batch: dict[str, Tensor] = {}
    for first, side in enumerate(("chosen", "rejected")):
        own = tokens_and_prompts(pair)[first::2]
        labels = [torch.where(torch.arange(len(one)) < prompt, -100, one) for one, prompt in own]
        shown = [torch.ones(len(one), dtype=torch.long) for one, _ in own]
        batch[f"{side}_input_ids"] = pad_sequence([one for one, _ in own], batch_first=True)
        batch[f"{side}_labels"] = pad_sequence(labels, batch_first=True, padding_value=-100)
        batch[f"{side}_attention_mask"] = pad_sequence(shown, batch_first=True)
    loss, metrics = trainer.get_batch_loss_metrics(model, batch)
    return loss, metrics


def _dpo(spec: DpoSpec, model: Any, pair: int | None = None) -> tuple[Tensor, dict[str, float]]:
    from trl import DPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    trainer: Any = object.__new__(DPOTrainer)
    trainer.model, trainer.accelerator = model, _accelerator()
    trainer.aux_loss_enabled = trainer.use_weighting = False
    trainer.ld_alpha, trainer.f_divergence_type = None, "reverse_kl"
    trainer.precompute_ref_logps, trainer._total_train_tokens, trainer._tp_size = True, 0, 1
    trainer.loss_types, trainer.loss_weights = [spec.loss_type], [1.0]
    trainer.beta, trainer.label_smoothing = spec.beta, spec.label_smoothing
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    found, references = tokens_and_prompts(pair), reference_sums(tiny("llama"), pair)
    found = [*found[0::2], *found[1::2]]
    answers = [(torch.arange(len(one)) >= prompt).long() for one, prompt in found]
    shown = [torch.ones(len(one), dtype=torch.long) for one, _ in found]
    inputs = {
        "input_ids": pad_sequence([one for one, _ in found], batch_first=True),
        "attention_mask": pad_sequence(shown, batch_first=True),
        "completion_mask": pad_sequence(answers, batch_first=True),
        "ref_chosen_logps": references[0::2],
        "ref_rejected_logps": references[1::2],
    }
    loss = trainer._compute_loss(model, inputs, return_outputs=False)
    return loss, {name: values[0] for name, values in trainer._metrics["eval"].items()}


def _kto(spec: KtoSpec, model: Any) -> tuple[Tensor, dict[str, float]]:
    from trl import KTOTrainer
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    trainer: Any = object.__new__(KTOTrainer)
    trainer.model, trainer.accelerator = model, _accelerator()
    trainer.aux_loss_enabled, trainer.precompute_ref_logps = False, True
    trainer.calculate_KL, trainer._total_train_tokens, trainer._tp_size = spec.loss_type == "kto", 0, 1
    for name in ("loss_type", "beta", "desirable_weight", "undesirable_weight"):
        setattr(trainer, name, getattr(spec, name))
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    inputs: dict[str, Any] = {"label": torch.tensor(LABELS)}
    for prefix, rows in (("", tokens_and_prompts()), ("KL_", mismatched_tokens())):
        answers = [(torch.arange(len(one)) >= prompt).long() for one, prompt in rows]
        shown = [torch.ones(len(one), dtype=torch.long) for one, _ in rows]
        inputs[f"{prefix}input_ids"] = pad_sequence([one for one, _ in rows], batch_first=True)
        inputs[f"{prefix}attention_mask"] = pad_sequence(shown, batch_first=True)
        inputs[f"{prefix}completion_mask"] = pad_sequence(answers, batch_first=True)
        inputs[f"ref_{prefix}logps"] = reference_sums(tiny("llama"), rows=rows)
    loss = trainer._compute_loss(model, inputs, return_outputs=False)
    return loss, {name: values[0] for name, values in trainer._metrics["eval"].items()}


def lora_weights() -> Tensor:
    from tests.bench import base
    from weftune.adapters.registry import get_kind

    size = get_kind("lora").layout(LORA, base("llama").shape.sites).size
    return torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.2


if __name__ == "__main__":
    cases = {**CASES, **KTO_CASES, **REWARD_CASES}
    numbers = {name: trl_numbers(spec, lora_weights()) for name, spec in cases.items()}
    FILE.write_text(json.dumps(numbers, indent=1) + "\n")
