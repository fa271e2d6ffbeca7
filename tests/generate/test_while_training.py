"""Sequences decoded between the passes of a training window, with the weights of that moment."""

from __future__ import annotations

import pytest
import torch

from tests.base.packs import CPU
from tests.cases import slow_but
from tests.families import tiny
from tests.generate.test_decoder import MIB, PROMPTS, logprobs_of, uncached
from weftune.adapters.dora.spec import DoraSpec
from weftune.adapters.kinds import AdapterSpec
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.prefix.spec import PrefixSpec
from weftune.bench.weftune_side import AttachedJobs, resident_jobs
from weftune.generate.decoder import Decoder, Generation
from weftune.generate.sampling import Sampling
from weftune.plan.program.program import Compute
from weftune.run.measure.timers import ActionTimer

SPECS: dict[str, AdapterSpec] = {
    "lora": LoraSpec(rank=4, dropout=0.1),
    "dora": DoraSpec(rank=3),
    "prefix": PrefixSpec(num_virtual_tokens=3),
}
ROUNDS = 6
LENGTHS = [[9, 14, 5], [20, 3], [7, 7, 7, 7]] * 2


def jobs_on(family: str) -> AttachedJobs:
    jobs = resident_jobs(tiny(family), CPU)
    for seed, (name, spec) in enumerate(SPECS.items()):
        jobs.join(name, spec, LENGTHS, seed)
    return jobs


def masters(jobs: AttachedJobs) -> list[torch.Tensor]:
    return [jobs.executor.attached[name].master.clone() for name in SPECS]


@pytest.mark.parametrize("family", slow_but(["llama", "gemma3"], ["llama"]))
def test_training_has_the_same_bits_whether_or_not_somebody_generates(family):
    quiet, busy = jobs_on(family), jobs_on(family)
    decoder = Decoder(busy.executor.adapted, MIB)
    busy.executor.offer_turn = decoder.run_pass
    made = [decoder.submit(prompt, Sampling(max_tokens=10), name) for prompt in PROMPTS for name in SPECS]
    for jobs in (quiet, busy):
        jobs.run(jobs.plan(ROUNDS, 32))
    assert any(one.tokens for one in made)
    assert quiet.losses == busy.losses
    for own, other in zip(masters(quiet), masters(busy), strict=True):
        assert torch.equal(own, other)


def test_before_each_turn_the_host_waits_until_the_device_has_begun_the_pass(monkeypatch):
    jobs, calls = jobs_on("llama"), []
    monkeypatch.setattr(ActionTimer, "await_start", lambda timer: calls.append("wait"))
    jobs.executor.offer_turn = lambda: calls.append("turn")
    program = jobs.plan(1, 32)
    jobs.run(program)
    passes = sum(isinstance(action, Compute) for action in program.devices[0])
    assert calls == ["wait", "turn"] * passes


def test_a_sequence_uses_the_newest_weights_and_records_their_step():
    jobs = jobs_on("llama")
    decoder = Decoder(jobs.executor.adapted, MIB)
    first: list[Generation] = []

    def turn() -> None:
        """One pass; what begins in it must be what the weights of this moment say."""
        if decoder.is_idle:
            first.append(decoder.submit(PROMPTS[3], Sampling(max_tokens=1), "lora"))
        for one in decoder.run_pass():
            if one.adapter == "lora" and len(one.tokens) == 1:
                logits_TV = uncached(jobs.executor.adapted, "lora", [*one.prompt, *one.tokens])
                assert one.logprobs == pytest.approx(logprobs_of(logits_TV, one.tokens).tolist(), abs=1e-9)

    jobs.executor.offer_turn = turn
    spanning = decoder.submit(PROMPTS[0], Sampling(max_tokens=16), "dora")
    jobs.run(jobs.plan(ROUNDS, 32))
    assert spanning.versions == sorted(spanning.versions)
    assert len(set(spanning.versions)) > 2
    assert len({one.versions[0] for one in first}) > 2
    assert len({one.logprobs[0] for one in first}) > 2, "the weights change with every step"


def test_weights_of_a_mean_are_another_version():
    jobs = jobs_on("llama")
    jobs.run(jobs.plan(2, 64))
    attached = jobs.executor.banks.attached["lora"]
    assert attached.version == 2
    jobs.executor.use_mean_weights("lora")
    assert attached.version != 2
    jobs.executor.use_latest_weights("lora")
    assert attached.version == 2
