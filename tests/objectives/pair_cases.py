"""Preference pairs of random tokens, with prompts of several lengths and an empty one, and the specs of
objectives that are compared with TRL on them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weftune.data.cache import SampleStore, Tally
from weftune.data.samples import Samples, StoreRows
from weftune.objectives.spec import CpoSpec, DpoSpec, KtoSpec, ObjectiveSpec, OrpoSpec, RewardSpec

VOCABULARY = 97
LENGTHS = ((3, 4, 6), (5, 2, 3), (0, 5, 4), (2, 7, 2))
"""Tokens of the prompt, the chosen answer and the rejected answer of each pair."""
CASES: dict[str, ObjectiveSpec] = {
    "dpo sigmoid": DpoSpec(beta=0.3),
    "dpo hinge": DpoSpec(loss_type="hinge", beta=0.3),
    "dpo ipo": DpoSpec(loss_type="ipo", beta=0.3),
    "dpo robust": DpoSpec(loss_type="robust", beta=0.3, label_smoothing=0.2),
    "cpo sigmoid": CpoSpec(beta=0.3, label_smoothing=0.1),
    "cpo hinge": CpoSpec(loss_type="hinge", cpo_alpha=0.5),
    "cpo ipo": CpoSpec(loss_type="ipo", beta=0.4),
    "cpo simpo": CpoSpec(loss_type="simpo", beta=2.0, simpo_gamma=0.7),
    "simpo": CpoSpec(loss_type="simpo", cpo_alpha=0.0),
    "orpo": OrpoSpec(beta=0.5),
}


REWARD_CASES: dict[str, ObjectiveSpec] = {
    "reward": RewardSpec(),
    "reward centred": RewardSpec(center_rewards_coefficient=0.2),
}
LABELS = (True, False, True, True, False, True, False, True)
KTO_CASES: dict[str, ObjectiveSpec] = {
    "kto": KtoSpec(beta=0.3, desirable_weight=0.7, undesirable_weight=1.4),
    "kto apo": KtoSpec(loss_type="apo_zero_unpaired", beta=0.3, undesirable_weight=0.6),
}


def tokens_and_prompts(pair: int | None = None) -> list[tuple[Tensor, int]]:
    """Return the tokens of each sample and the length of its prompt, of all pairs or of one. The chosen
    sample of a pair comes first."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for prompt, *answers in LENGTHS:
        given = torch.randint(0, VOCABULARY, (prompt,), generator=generator)
        for answer in answers:
            own = torch.randint(0, VOCABULARY, (answer,), generator=generator)
            samples.append((torch.cat([given, own]), prompt))
    return samples if pair is None else samples[2 * pair : 2 * pair + 2]


def samples() -> Samples:
    found = tokens_and_prompts()
    masks = [np.arange(len(tokens)) >= prompt for tokens, prompt in found]
    store = SampleStore(
        tokens=np.concatenate([tokens.numpy() for tokens, _ in found]).astype(np.int32),
        mask=np.concatenate(masks),
        lengths=np.array([len(mask) for mask in masks], dtype=np.int32),
        supervised=np.array([int(mask[1:].sum()) for mask in masks], dtype=np.int32),
        rows=np.repeat(np.arange(len(LENGTHS)), 2).astype(np.uint64),
        tally=Tally(),
    )
    return Samples([StoreRows(store, np.arange(len(masks)))], "pairs", group_size=2)


def labelled_samples() -> Samples:
    """Return the samples of all pairs as labelled answers with their mismatched samples."""
    found = [(torch.from_numpy(tokens), mask) for tokens, mask in map(samples().tokens_and_mask, range(8))]
    store = SampleStore(
        tokens=np.concatenate([tokens.numpy() for tokens, _ in found]),
        mask=np.concatenate([mask for _, mask in found]),
        lengths=samples().lengths,
        supervised=samples().supervised,
        rows=np.arange(len(found)).astype(np.uint64),
        tally=Tally(),
        desirable=np.array(LABELS),
    )
    whole = Samples([StoreRows(store, np.arange(len(found)))], "labelled", has_labels=True)
    return whole.add_mismatched_samples(np.arange(len(found)), len(found), 10**6)


def mismatched_tokens() -> list[tuple[Tensor, int]]:
    """Return each prompt with the answer of the row before it, and the length of the prompt."""
    found = tokens_and_prompts()
    answers = [tokens[prompt:] for tokens, prompt in found]
    return [
        (torch.cat([tokens[:prompt], answers[row - 1]]), prompt) for row, (tokens, prompt) in enumerate(found)
    ]


def reference_sums(
    model: torch.nn.Module, pair: int | None = None, rows: list[tuple[Tensor, int]] | None = None
) -> Tensor:
    """Return the log-probability of each answer, one sample at a time; `rows` replaces the pairs."""
    sums = []
    with torch.no_grad():
        for tokens, prompt in tokens_and_prompts(pair) if rows is None else rows:
            logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
            chosen = logprobs.gather(1, tokens[1:, None])[:, 0]
            sums.append(chosen[max(0, prompt - 1) :].sum())
    return torch.stack(sums)
