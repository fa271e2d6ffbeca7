"""Baselines for Weftune: the frozen base model in plain transformers, and PEFT with one job after another.
Shapes: B samples, L tokens per sample, D hidden width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from weftune.bench.sizes import Size, build, random_ids
from weftune.bench.timing import Block, Hardware, MeasuredStep, Repeats, measure, repeat_step
from weftune.core.batch import IGNORED
from weftune.core.shapes import layer_number

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PHI3_TARGETS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineWork:
    """The work of one round of a benchmark: one optimizer step per job on `batch` samples of `length` tokens,
    all supervised."""

    jobs: int
    batch: int
    length: int
    rank: int
    ranks: tuple[int, ...] = ()
    """Rank of each job. Empty if all jobs have the rank in the field `rank`; otherwise that field has the
    largest rank."""
    dropouts: tuple[float, ...] = ()
    """Dropout of each job. Empty if no job has dropout."""

    @property
    def job_ranks(self) -> tuple[int, ...]:
        return self.ranks or (self.rank,) * self.jobs

    @property
    def job_dropouts(self) -> tuple[float, ...]:
        return self.dropouts or (0.0,) * self.jobs

    @property
    def mean_rank(self) -> float:
        return sum(self.job_ranks) / self.jobs

    @property
    def lengths(self) -> list[int]:
        """Lengths in tokens of all samples of all jobs."""
        return [self.length] * (self.jobs * self.batch)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def measure_frozen_base(size: Size, work: BaselineWork, hardware: Hardware, repeats: Repeats) -> MeasuredStep:
    """Measure forward and backward over all jobs' samples as one batch, without adapters.

    The input embeddings require a gradient, so that the backward reaches all layers.
    """
    model = build(size, hardware)
    ids_BL = random_ids(size, work.jobs * work.batch, work.length, hardware)
    x_BLD = model.get_input_embeddings()(ids_BL).detach().requires_grad_()

    def step() -> None:
        x_BLD.grad = None
        model(inputs_embeds=x_BLD, labels=ids_BL, use_cache=False).loss.backward()

    return measure(repeat_step(step), hardware, repeats)


def peft_one_by_one(
    size: Size,
    work: BaselineWork,
    hardware: Hardware,
    repeats: Repeats,
    float32_adapters: bool,
    nf4: bool = False,
) -> MeasuredStep:
    """Measure one job's step in PEFT, and multiply its seconds by the number of jobs.

    With `float32_adapters`, adapters are in float32, PEFT's default; otherwise in the base's dtype. `nf4`
    quantises the base with bitsandbytes (QLoRA). No activations are recomputed.
    """
    model = peft_model(size, work.rank, hardware, float32_adapters, nf4)
    base_bytes = sum(value.nbytes for name, value in model.named_parameters() if "lora_" not in name)
    step = job_step(model, random_ids(size, work.batch, work.length, hardware))
    one = measure(repeat_step(step), hardware, repeats)
    assert one.seconds is not None
    return MeasuredStep(one.seconds * work.jobs, one.peak_bytes, base_bytes=base_bytes)


def quantise_nf4(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the linears of all layers in place by NF4 linears of bitsandbytes, to which PEFT can add
    adapters."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for path, linear in list(model.named_modules()):
        if not isinstance(linear, nn.Linear) or layer_number(path) is None:
            continue
        made = Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=linear.weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        made.bias = linear.bias
        made.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        model.set_submodule(path, made.to(linear.weight.device))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    return model


def peft_model(size: Size, rank: int, hardware: Hardware, float32_adapters: bool, nf4: bool = False) -> Any:
    targets = PHI3_TARGETS if size.family == "phi3" else TARGETS[:4] if size.experts else TARGETS
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=targets,
        target_parameters=EXPERTS if size.experts else None,
        task_type="CAUSAL_LM",
    )
    base = quantise_nf4(build(size, hardware)) if nf4 else build(size, hardware)
    return get_peft_model(base, config, autocast_adapter_dtype=float32_adapters).train()


def job_step(model: Any, ids_BL: Tensor) -> Callable[[], None]:
    """Return a function that makes an optimizer step, on the same unpadded samples each time."""
    optimizer = make_adamw(model)

    def step() -> None:
        model(input_ids=ids_BL, labels=ids_BL, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)


def peft_padded(
    size: Size, rounds: Sequence[Iterable[Sequence[int]]], rank: int, hardware: Hardware
) -> Block:
    """Return a `Block` for timing PEFT, which trains one job after another, with each batch padded to its
    longest sample.

    `rounds` has the lengths in tokens of the samples, one list per round (one batch of every job). One
    adapter represents all jobs, since all of them cost the same and a user would load them one by one.
    """
    model = peft_model(size, rank, hardware, float32_adapters=False)
    optimizer = make_adamw(model)
    batches = [[_padded_step(size, lengths, hardware) for lengths in jobs] for jobs in rounds]

    def one_round(number: int) -> None:
        for ids_BL, present_BL, labels_BL in batches[number % len(batches)]:
            out = model(input_ids=ids_BL, attention_mask=present_BL, labels=labels_BL, use_cache=False)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def block(steps: int) -> Callable[[], None]:
        def run() -> None:
            for number in range(steps):
                one_round(number)

        return run

    return block


def _padded_step(size: Size, lengths: Sequence[int], hardware: Hardware) -> tuple[Tensor, Tensor, Tensor]:
    ids_BL = random_ids(size, len(lengths), max(lengths), hardware)
    ends_B1 = torch.tensor(lengths, device=hardware.device)[:, None]
    present_BL = torch.arange(max(lengths), device=hardware.device)[None] < ends_B1
    return ids_BL, present_BL.long(), torch.where(present_BL, ids_BL, IGNORED)
