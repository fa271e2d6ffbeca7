"""Solo PEFT training, step by step and in plain torch: what Weftune must equal."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, get_scheduler

from weftune.base.load import load_plain
from weftune.base.quant.linear import dequantise_linears
from weftune.base.spec import BaseSpec
from weftune.ops.dropout import keep_mask_TK, mask_key

Sample = tuple[list[int], list[bool]]
"""Tokens, and which of them are supervised."""
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters under PEFT's and torch's own names."""

    steps: int
    lr: float = 1e-3
    schedule: str = "linear"
    warmup: int = 0
    weight_decay: float = 0.0
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    start: Weights
    end: Weights

    def moved(self) -> Weights:
        """What training changed: A − A₀ and B − B₀ by tensor name."""
        return {name: self.end[name].double() - self.start[name].double() for name in self.end}


def lora_config(
    model: PreTrainedModel, rank: int, alpha: float, targets: str | list[str], **more
) -> LoraConfig:
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        fan_in_fan_out=model.config.model_type == "gpt2",
        task_type="CAUSAL_LM",
        **more,
    )


def write_start(
    folder: Path, model: PreTrainedModel, config: LoraConfig, seed: int = 0, b_scale: float = 0.0
) -> Path:
    """A PEFT adapter as PEFT initialises it; `b_scale` moves B off zero, so that A trains from step 1."""
    torch.manual_seed(seed)
    peft_model = get_peft_model(copy.deepcopy(model), copy.deepcopy(config))
    peft_model.save_pretrained(str(folder))
    weights = load_file(folder / "adapter_model.safetensors")
    for name, value in weights.items():
        if "lora_B" in name:
            weights[name] = torch.randn_like(value) * b_scale
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def train_with_peft(
    model: PreTrainedModel,
    config: LoraConfig,
    start: Path,
    batches: Sequence[Sequence[Sample]],
    recipe: Recipe,
    padded: bool = True,
    dropout: HashedDropout | None = None,
    b_ratio: float = 1.0,
) -> Trained:
    """Each of `batches` is one optimizer step, run as one padded batch or sample by sample.

    With `dropout`, which goes sample by sample, PEFT drops the values that Weftune drops. B learns at
    `b_ratio` times the rate: LoRA+.
    """
    peft_model = get_peft_model(copy.deepcopy(model), copy.deepcopy(config))
    weights = load_file(start / "adapter_model.safetensors")
    set_peft_model_state_dict(peft_model, weights)
    peft_model.to(model.dtype).eval()
    if dropout is not None:
        dropout.install(peft_model, config.lora_dropout)
    losses = train_model(peft_model, batches, recipe, padded, dropout, b_ratio)
    return Trained(losses, weights, {k: v.clone() for k, v in get_peft_model_state_dict(peft_model).items()})


def train_model(
    model: torch.nn.Module,
    batches: Sequence[Sequence[Sample]],
    recipe: Recipe,
    padded: bool = True,
    dropout: HashedDropout | None = None,
    b_ratio: float = 1.0,
) -> list[float]:
    """Train whatever requires a gradient, with torch's own AdamW: the losses."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    trainable = [p for _, p in named]
    groups = [{"params": [p], "lr": recipe.lr * (b_ratio if "lora_B" in name else 1.0)} for name, p in named]
    optimizer = torch.optim.AdamW(
        groups, lr=recipe.lr, weight_decay=recipe.weight_decay, betas=recipe.betas, eps=recipe.eps
    )
    schedule = {"constant": "constant_with_warmup"}.get(recipe.schedule, recipe.schedule)
    scheduler = get_scheduler(schedule, optimizer, recipe.warmup, recipe.steps)
    losses = []
    for number, batch in enumerate(batches[: recipe.steps], start=1):
        offset = 0
        supervised = _supervised(model, batch)
        optimizer.zero_grad()
        total = 0.0
        for part in [batch] if padded else [[sample] for sample in batch]:
            if dropout is not None:
                dropout.step, dropout.offset = number, offset
            loss = _loss_sum(model, part) / supervised
            loss.backward()
            total += loss.item()
            offset += sum(len(tokens) for tokens, _ in part)
        torch.nn.utils.clip_grad_norm_(trainable, recipe.clip)
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return losses


class HashedDropout:
    """Puts Weftune's bits in the place of PEFT's dropout modules; told which step and sample comes next."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = self.offset = 0

    def install(self, peft_model: torch.nn.Module, probability: float) -> None:
        for name, module in peft_model.named_modules():
            if hasattr(module, "lora_dropout"):
                site = name.removeprefix("base_model.model.")
                module.lora_dropout["default"] = _Dropped(self, site, probability)
                # DoRA drops in training mode only.
                module.training = True


class _Dropped(torch.nn.Module):
    def __init__(self, source: HashedDropout, site: str, probability: float) -> None:
        super().__init__()
        self.source, self.site, self.probability = source, site, probability

    def forward(self, x: Tensor) -> Tensor:
        index = self.source.offset + torch.arange(x.shape[1])
        kept = keep_mask_TK(
            mask_key(self.source.seed, self.source.step, self.site), index, x.shape[2], self.probability
        )
        return x * kept / (1 - self.probability)


def _loss_sum(model: torch.nn.Module, samples: Sequence[Sample]) -> Tensor:
    longest = max(len(tokens) for tokens, _ in samples)
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in samples])
    present = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens, _ in samples])
    labels = torch.tensor(
        [
            [t if m else -100 for t, m in zip(tokens, mask, strict=True)] + [-100] * (longest - len(tokens))
            for tokens, mask in samples
        ]
    )
    logits = model(input_ids=ids, attention_mask=present, use_cache=False).logits
    labels = torch.nn.functional.pad(labels, (_virtual_tokens(model), 0), value=-100)
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def mean_loss(model: torch.nn.Module, samples: Sequence[Sample]) -> float:
    """Over all supervised tokens."""
    with torch.no_grad():
        return float(_loss_sum(model, samples)) / _supervised(model, samples)


def _supervised(model: torch.nn.Module, samples: Sequence[Sample]) -> int:
    """Tokens that something stands before and that are to be predicted from it."""
    first = 0 if _virtual_tokens(model) else 1
    return sum(sum(mask[first:]) for _, mask in samples)


def _virtual_tokens(model: torch.nn.Module) -> int:
    """Rows that PEFT puts before every sample."""
    config = getattr(model, "active_peft_config", None)
    return config.num_virtual_tokens if config is not None and config.peft_type == "PROMPT_TUNING" else 0


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The largest relative distance over the tensors; one that only `second` has counts as not moved."""
    worst = 0.0
    for name, want in second.items():
        got = first[name] if name in first else torch.zeros_like(want)
        gap = (got.double() - want.double()).norm() / max(want.double().norm().item(), 1e-30)
        worst = max(worst, gap.item() if math.isfinite(gap.item()) else math.inf)
    return worst


def assert_equal_float64(got: Trained, want: Trained) -> None:
    """Step losses to 1e-9 relative, what training moved to 1e-8 in relative norm, tensor by tensor."""
    assert len(got.losses) == len(want.losses)
    for mine, theirs in zip(got.losses, want.losses, strict=True):
        assert abs(mine - theirs) <= 1e-9 * abs(theirs)
    assert distance(got.moved(), want.moved()) <= 1e-8


FLIPPED = 1e-3
"""How far one element whose gradient has the other sign can take a tiny adapter: DESIGN says that PEFT is so
far from itself. Seen in a pipeline of four stages: 1.6e-4 where one process was 2.1e-5 from float64."""


def assert_equal_float32(
    got: Trained, padded: Trained, one_by_one: Trained, exact: Trained, floor: float = 0.0
) -> None:
    """Losses to 1e-5, or where PEFT's own two ways of running the job drift further apart, to 3 × that drift;
    weights as near to the float64 run as those two are, times 3.

    Adam turns a gradient of the other sign near zero into a whole step, so that two float32 runs differ by a
    few such elements and their distance is a matter of luck (docs/design.md has the numbers). The distance to
    the float64 run is less so; where only one run is compared with another, `floor` is allowed in any case.
    """
    assert _drift(got, padded) <= max(1e-5, 3 * _drift(one_by_one, padded))
    for part in ("lora_A", "lora_B"):
        allowed = max(floor, 3 * max(_whole(padded, exact, part), _whole(one_by_one, exact, part)))
        assert 0 < allowed < 0.1
        assert (error := _whole(got, exact, part)) <= allowed, f"{part}: {error:.1e} over {allowed:.1e}"


def _drift(first: Trained, second: Trained) -> float:
    """The largest gap between the losses of two runs, relative where the loss is above 1."""
    pairs = zip(first.losses, second.losses, strict=True)
    return max(abs(mine - theirs) / max(1.0, abs(theirs)) for mine, theirs in pairs)


def _whole(run: Trained, exact: Trained, part: str) -> float:
    """The relative distance of all tensors of one kind together."""
    mine, theirs = run.moved(), exact.moved()
    names = [name for name in theirs if part in name]
    gap = torch.cat([(mine[name] - theirs[name]).flatten() for name in names])
    return float(gap.norm() / torch.cat([theirs[name].flatten() for name in names]).norm())


def peft_on(spec: BaseSpec, folder: Path) -> PeftModel:
    """A finished adapter on the base that `spec` loads. PEFT's DoRA reads the weights of linears, so those of
    a quantised base become plain linears with the dequantised matrices."""
    model = load_plain(spec, torch.device("cpu"))
    if json.loads((folder / "adapter_config.json").read_text()).get("use_dora"):
        dequantise_linears(model)
    return PeftModel.from_pretrained(model, folder).eval()
