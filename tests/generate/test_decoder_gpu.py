"""Decoding on a CUDA device: captured steps, attention by a kernel. Run with `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.base.packs import random_samples
from tests.families import randomised
from tests.generate.test_decoder import logprobs_of, other_folder, uncached
from tests.test_families_gpu import small_config
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.generate.adapters import attach_adapter_folder
from weftune.generate.decoder import Decoder
from weftune.generate.sampling import Sampling
from weftune.run.passes.adapted import AdaptedBase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NEW = 24
PROMPTS = [tokens.tolist() for tokens in random_samples((5, 60, 9, 33, 2, 100, 17, 11, 7), seed=3)]


def adapted_on_gpu(shape: str, dtype: torch.dtype) -> AdaptedBase:
    spec = BaseSpec(model=f"small/{shape}", dtype=str(dtype).removeprefix("torch."))
    base = Base.from_model(randomised(small_config(shape), dtype), spec, torch.device("cuda", 0))
    return AdaptedBase(base)


@pytest.mark.parametrize("shape", ["8b", "qwen3-8b", "gemma-3-4b"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decoded_tokens_have_the_log_probabilities_of_a_training_pass(shape, dtype, tmp_path: Path):
    adapted = adapted_on_gpu(shape, dtype)
    decoder = Decoder(adapted, 1 << 30)
    sampling = Sampling(max_tokens=NEW, temperature=0.8, top_p=0.9)
    names: list[str | None] = [None]
    made = []
    # First the kernels for few rows compute all adapters, then those of training; the last adapter has none.
    for kind in ("lora", "ia3", "bottleneck"):
        names.append(kind)
        attach_adapter_folder(adapted, kind, other_folder(tmp_path / kind, adapted.base, kind, shape))
        made += [
            decoder.submit(prompt, sampling, names[number % len(names)])
            for number, prompt in enumerate(PROMPTS)
        ]
        decoder.run_until_idle()
    differences = []
    for one in made:
        logits_TV = uncached(adapted, one.adapter, [*one.prompt, *one.tokens]).cpu()
        differences.append((torch.tensor(one.logprobs) - logprobs_of(logits_TV, one.tokens)).abs())
    mean = torch.cat(differences).mean().item()
    assert mean < (3e-3 if dtype is torch.bfloat16 else 1e-5), mean
    assert adapted.can_capture is (dtype is torch.bfloat16)


def test_captured_and_uncaptured_steps_choose_the_same_tokens(tmp_path: Path):
    adapted = adapted_on_gpu("8b", torch.bfloat16)
    attach_adapter_folder(adapted, "lora", other_folder(tmp_path / "lora", adapted.base, "lora", "8b"))
    found = []
    for captures in (True, False):
        decoder = Decoder(adapted, 1 << 30)
        if not captures:
            decoder._graphs = None
        made = [decoder.submit(prompt, Sampling(max_tokens=NEW), "lora") for prompt in PROMPTS]
        decoder.run_until_idle()
        found.append([one.tokens for one in made])
    assert found[0] == found[1]
