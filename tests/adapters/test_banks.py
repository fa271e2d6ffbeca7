"""Banks: jobs come and go, each keeps its own slot, and who is not in a microbatch does not matter to it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from tests.adapters.attached_banks import attach, banks_with, empty_banks, logits, together, weights_of
from tests.base.packs import packed, random_samples
from tests.bench import base as tiny_base
from tests.families import FAMILIES, tiny
from weftune.adapters import banks as all_banks
from weftune.adapters.banks import Banks
from weftune.adapters.kind import JobAdapter, SiteTensors
from weftune.adapters.lora.spec import A, B, LoraSpec
from weftune.adapters.registry import get_kind
from weftune.adapters.tiled import TiledBank
from weftune.core.shapes import SiteShape
from weftune.ops.lora.choice import ChoiceFile, Choices, PlanTrial
from weftune.ops.lora.routes import Route
from weftune.ops.lora.table import SlotTable

LORA = get_kind("lora")
CLOSE = 1e-6
"""In float64 too: most families normalise in float32 whatever the dtype, where a last bit can flip."""


def mixed(base):
    """Four jobs of different rank, scale and targets; the last shares no site with the third."""
    names = [site.name for site in base.shape.sites]
    ending = names[0].rpartition(".")[2]
    return {
        "a": LoraSpec(rank=3, alpha=6.0),
        "b": LoraSpec(rank=5, alpha=2.0, targets=(ending,), rslora=True),
        "c": LoraSpec(rank=2, alpha=9.0, targets=(names[0],)),
        "d": LoraSpec(rank=4, alpha=4.0, targets=(names[-1],), rank_pattern={names[-1]: 7}),
    }


def random_weights(base, spec, seed):
    layout = LORA.layout(spec, base.shape.sites)
    return torch.randn(layout.size, generator=torch.Generator().manual_seed(seed), dtype=base.dtype) * 0.2


@pytest.fixture(scope="module")
def llama():
    return tiny_base("llama")


@pytest.fixture
def crowd(llama):
    """Banks with the four aboard, and the flat vector of each."""
    specs, banks = mixed(llama), empty_banks(llama)
    weights = {job: random_weights(llama, spec, seed) for seed, (job, spec) in enumerate(specs.items())}
    for job, spec in specs.items():
        attach(banks, llama, job, spec, weights[job])
    return banks, weights


def held(banks, job):
    """The job's flat vector as passes read it."""
    return banks.attached[job].weights


def gradients(base, banks, microbatch, jobs, route=Route.segmented):
    """Each job's gradient of one pass, as the executor collects it."""
    for job in jobs:
        banks.attached[job].gradient.zero_()
    with banks.bind(microbatch, route, training=True):
        h_TD = base.hidden(microbatch)
        targets_T = microbatch.tokens_T.roll(-1)
        loss_T = torch.nn.functional.cross_entropy(base.head().logits(h_TD), targets_T, reduction="none")
        loss_T.sum().backward()
    return {job: banks.attached[job].gradient.clone() for job in jobs}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_job_of_a_mixed_pack_gets_the_logits_that_peft_gives_it_alone(family, tmp_path):
    base = tiny_base(family)
    specs, banks = mixed(base), empty_banks(base)
    for seed, (job, spec) in enumerate(specs.items()):
        weights = random_weights(base, spec, seed)
        attach(banks, base, job, spec, weights)
        LORA.save(
            tmp_path / job, spec, banks.attached[job].layout.parameter_views(weights), base.shape.sites, "b"
        )
    jobs = ["a", "b", "c", "d"]
    samples = random_samples((9, 5, 12, 7))
    plain = [tiny(family)(input_ids=tokens[None], use_cache=False).logits[0].detach() for tokens in samples]
    for got, job, tokens, bare in zip(
        logits(base, banks, together(jobs, samples)), jobs, samples, plain, strict=True
    ):
        peft = PeftModel.from_pretrained(tiny(family), tmp_path / job).eval()
        want = peft(input_ids=tokens[None], use_cache=False).logits[0].detach()
        torch.testing.assert_close(got, want, rtol=CLOSE, atol=CLOSE)
        assert (want - bare).abs().max() > 1e-3


def test_every_job_reads_back_what_was_written_for_it(crowd):
    banks, weights = crowd
    for job, flat in weights.items():
        assert torch.equal(held(banks, job), flat)


def test_a_write_lands_in_the_slot_of_its_job_only(llama, crowd):
    banks, weights = crowd
    new = random_weights(llama, mixed(llama)["b"], 99)
    banks.attached["b"].weights.copy_(new)
    assert torch.equal(held(banks, "b"), new)
    for job in "acd":
        assert torch.equal(held(banks, job), weights[job])
    banks.attached["a"].weights.zero_()
    assert not held(banks, "a").any()
    assert torch.equal(held(banks, "b"), new)


@pytest.mark.parametrize("gone", ["a", "b", "c", "d"])
def test_who_leaves_changes_neither_the_weights_nor_the_gradients_of_the_others(llama, crowd, gone):
    banks, weights = crowd
    stay = [job for job in weights if job != gone]
    samples = random_samples((6, 9, 4))
    microbatch = together(stay, samples)
    before = gradients(llama, banks, microbatch, stay)
    assert all(found.norm() > 1e-3 for found in before.values())
    banks.detach(gone)
    assert gone not in banks.attached
    for job in stay:
        assert torch.equal(held(banks, job), weights[job])
    after = gradients(llama, banks, microbatch, stay)
    for job in stay:
        assert torch.equal(after[job], before[job])
    attach(banks, llama, gone, mixed(llama)[gone], weights[gone])
    again = gradients(llama, banks, microbatch, stay)
    for job in (*stay, gone):
        assert torch.equal(held(banks, job), weights[job])
    for job in stay:
        assert torch.equal(again[job], before[job])


def test_gradients_of_jobs_together_are_those_of_each_job_alone(llama, crowd):
    banks, weights = crowd
    jobs, samples = list(weights), random_samples((8, 3, 10, 6))
    # A sample's last row is to predict the next sample's first token, so that token comes along as nobody's.
    both = gradients(llama, banks, together(jobs, samples), jobs)
    for index, job in enumerate(jobs):
        alone = empty_banks(llama)
        attach(alone, llama, job, mixed(llama)[job], weights[job])
        follower = samples[(index + 1) % len(samples)][:1]
        pair = together([job, "nobody"], [samples[index], follower])
        with alone.bind(pair, Route.reference, training=True):
            logits_TV = llama.head().logits(llama.hidden(pair))
            rows = len(samples[index])
            loss = torch.nn.functional.cross_entropy(
                logits_TV[:rows], pair.tokens_T[1 : rows + 1], reduction="sum"
            )
            loss.backward()
        want = alone.attached[job].gradient
        torch.testing.assert_close(both[job], want, rtol=CLOSE, atol=CLOSE)


def test_gradients_add_up_over_passes(llama, crowd):
    banks, _ = crowd
    microbatch = together(["a"], random_samples((7,)))
    once = gradients(llama, banks, microbatch, ["a"])["a"]
    with banks.bind(microbatch, Route.segmented, training=True):
        h_TD = llama.hidden(microbatch)
        targets_T = microbatch.tokens_T.roll(-1)
        torch.nn.functional.cross_entropy(llama.head().logits(h_TD), targets_T, reduction="sum").backward()
    torch.testing.assert_close(banks.attached["a"].gradient, 2 * once, rtol=CLOSE, atol=CLOSE)


def test_more_jobs_than_slots_make_room(llama):
    banks = empty_banks(llama)
    spec = LoraSpec(rank=1)
    for number in range(65):
        attach(banks, llama, f"job{number}", spec, weights_of(llama, f"job{number}", spec))
    assert banks.slots == 128
    banks.detach("job7")
    attach(banks, llama, "late", spec, weights_of(llama, "late", spec))
    assert banks.attached["late"].slot == 7


def test_outside_a_bound_pass_the_base_computes_as_if_nobody_were_aboard(llama, crowd):
    banks, _ = crowd
    samples = random_samples((6, 11))
    with torch.no_grad():
        outside = llama.hidden(packed(samples))
        bare = tiny_base("llama").hidden(packed(samples))
    assert torch.equal(outside, bare)
    with torch.no_grad(), banks.bind(together(["a", "b"], samples), Route.segmented, training=False):
        inside = llama.hidden(packed(samples))
    assert not torch.allclose(inside, bare)


def test_rows_of_nobody_aboard_are_the_bases_own(llama, crowd):
    banks, _ = crowd
    samples = random_samples((5, 8, 6))
    got = logits(llama, banks, together(["a", "stranger", "b"], samples))[1]
    want = logits(llama, empty_banks(llama), packed([samples[1]]))[0]
    torch.testing.assert_close(got, want, rtol=CLOSE, atol=CLOSE)


def test_a_pass_inside_a_pass_is_a_bug_and_a_failed_pass_is_unbound(llama, crowd):
    banks, _ = crowd
    microbatch = together(["a"], random_samples((4,)))
    with pytest.raises(AssertionError, match="already bound"):
        with banks.bind(microbatch, Route.segmented, True), banks.bind(microbatch, Route.segmented, True):
            pass
    assert len(logits(llama, banks, microbatch)) == 1


def test_dropout_acts_in_training_only_and_not_by_other_jobs():
    base = tiny_base("llama")
    dropping = LoraSpec(rank=4, alpha=8.0, dropout=0.5)
    weights = random_weights(base, dropping, 0)
    microbatch = together(["a"], random_samples((9,)))

    def hidden(banks, training):
        with torch.no_grad(), banks.bind(microbatch, Route.segmented, training):
            return base.hidden(microbatch)

    banks = empty_banks(base)
    attach(banks, base, "a", dropping, weights)
    quiet = empty_banks(base)
    attach(quiet, base, "a", LoraSpec(rank=4, alpha=8.0), weights)
    assert torch.equal(hidden(banks, False), hidden(quiet, True))
    dropped = hidden(banks, True)
    assert not torch.allclose(dropped, hidden(quiet, True))
    attach(banks, base, "b", dropping, weights)
    assert torch.equal(hidden(banks, True), dropped)


def test_the_banks_hold_the_bases_dtype_and_never_train_the_base():
    base = tiny_base("gpt2", torch.float32)
    banks = banks_with(base, {"a": LoraSpec(rank=2)})
    layout = LORA.layout(LoraSpec(rank=2), base.shape.sites)
    banks.attached["a"].weights.copy_(torch.randn(layout.size, dtype=torch.float64))
    before = copy.deepcopy(base.model.state_dict())
    found = gradients(base, banks, together(["a"], random_samples((6,))), ["a"])["a"]
    assert found.norm() > 0
    assert banks.attached["a"].weights.dtype == torch.float32
    assert all(parameter.grad is None for parameter in base.model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in base.model.state_dict().items())


def test_a_new_adapter_changes_nothing_until_it_is_trained(llama):
    spec = LoraSpec(rank=4)
    banks = empty_banks(llama)
    attach(banks, llama, "a", spec, weights_of(llama, "a", spec))
    samples = random_samples((6,))
    (got,) = logits(llama, banks, together(["a"], samples))
    (want,) = logits(llama, empty_banks(llama), packed(samples))
    assert torch.equal(got, want)


def test_a_restored_base_is_as_it_was() -> None:
    base = tiny_base("gpt2")
    before = {name: module.forward for name, module in base.sites().items()}
    Banks(base.sites(), base.shape.sites, next(base.model.parameters())).restore_base()
    assert {name: module.forward for name, module in base.sites().items()} == before


def test_a_slot_that_was_left_is_taken_again_the_lowest_first(llama) -> None:
    banks, spec = empty_banks(llama), LoraSpec(rank=1)
    for number in range(5):
        attach(banks, llama, f"job{number}", spec, random_weights(llama, spec, number))
    for number in (3, 1):
        banks.detach(f"job{number}")
    for name in ("x", "y", "z"):
        attach(banks, llama, name, spec, random_weights(llama, spec, 0))
    assert [banks.attached[name].slot for name in ("x", "y", "z")] == [1, 3, 5]


def test_a_job_that_cannot_come_aboard_takes_no_slot(llama, monkeypatch: pytest.MonkeyPatch) -> None:
    banks, spec = empty_banks(llama), LoraSpec(rank=1)
    for number in range(3):
        attach(banks, llama, f"job{number}", spec, random_weights(llama, spec, number))
    banks.detach("job1")
    weights = random_weights(llama, spec, 0)
    with monkeypatch.context() as short:
        short.setattr(type(LORA), "rows_before", raising(MemoryError))
        with pytest.raises(MemoryError):
            attach(banks, llama, "x", spec, weights)
    for name in ("y", "z"):
        attach(banks, llama, name, spec, random_weights(llama, spec, 0))
    assert sorted(job.slot for job in banks.attached.values()) == [0, 1, 2, 3]


def raising(error):
    def fail(*_):
        raise error

    return fail


def seat(bank: TiledBank, sites: Sequence[SiteShape], slot: int, rank: int) -> None:
    spec = LoraSpec(rank=rank)
    layout = LORA.layout(spec, sites)
    views = layout.parameter_views(torch.zeros(layout.size))
    adapter = JobAdapter(f"job{slot}", spec, 0)
    parts = [LORA.tiled_part(SiteTensors(adapter, site, views, views)) for site in sites]
    bank.attach(adapter.job, slot, parts)


def test_tables_are_sent_once_however_many_jobs_come_and_go(llama, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = llama.shape.sites[:1]
    bank, sent = TiledBank(sites, 64), list[int]()
    seat(bank, sites, 0, rank=1)
    bank._table_group(torch.zeros(()))
    monkeypatch.setattr(
        SlotTable, "copy_to_device", lambda table: sent.append(int((table.host_views[2] > 0).sum()))
    )
    for slot in range(1, 40):
        seat(bank, sites, slot, rank=1)
    for slot in range(10, 20):
        bank.detach(f"job{slot}")
    assert sent == []
    bank.send_tables()
    bank.send_tables()
    assert sent == [30], "once, with those who stayed"


def test_a_pass_begins_with_the_tables_of_all_who_are_aboard() -> None:
    llama = tiny_base("llama", torch.float32)
    banks = banks_with(llama, {"a": LoraSpec(rank=3)})
    (bank, *_) = (group.tiled for group in banks._groups.values())
    assert bank._table_group(torch.zeros(())).table.rank_PS[0, :2].tolist() == [3, 0]
    attach(banks, llama, "b", LoraSpec(rank=5), random_weights(llama, LoraSpec(rank=5), 0))
    seats = banks.slot_rows(together(["a", "b"], random_samples((4, 6))))
    assert [(seat.start, seat.stop, seat.slot) for seat in seats] == [(0, 4, 0), (4, 10, 1)]
    assert bank._table_group(torch.zeros(())).table.rank_PS[0, :2].tolist() == [3, 5]


class Asked(Choices):
    """Records the trials whose kernels are to be compiled."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[list[PlanTrial]] = []
        file = ChoiceFile(folder, "here", *("any version",) * 4)
        super().__init__(raising(AssertionError), file, compile=raising(AssertionError))

    def compile_ahead(self, trials: Iterable[PlanTrial]) -> None:
        self.asked.append(list(trials))


def test_kernels_are_compiled_ahead_once_and_only_for_sites_that_have_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = tiny_base("llama", torch.float32)
    choices, site = Asked(tmp_path), llama.shape.sites[0]
    monkeypatch.setattr(all_banks, "device_choices", lambda device: choices)
    banks = banks_with(llama, {"a": LoraSpec(rank=3, targets=(site.name,))})
    microbatch = together(["a"], random_samples((6,)))
    for _ in range(2):
        with banks.bind(microbatch, Route.tiled, training=True):
            pass
    ((one,),) = choices.asked
    assert (one.features, one.widths) == (site.in_features, (site.out_features,))


def test_one_kind_alone_at_a_site_adds_to_the_products_own_dtype_as_peft_does() -> None:
    """Several kinds are summed in float32 instead."""
    base = tiny_base("llama", torch.bfloat16)
    spec, site = LoraSpec(rank=4, alpha=8.0), base.shape.sites[0]
    banks, weights = empty_banks(base), random_weights(base, spec, 0)
    attach(banks, base, "a", spec, weights)
    a_rK, b_rN = (banks.attached["a"].layout.parameter_views(weights)[site.name, name] for name in (A, B))
    module, microbatch = base.sites()[site.name], together(["a"], random_samples((9,)))
    x_TK = torch.randn(9, site.in_features, generator=torch.Generator().manual_seed(1)).to(base.dtype)
    with torch.no_grad(), banks.bind(microbatch, Route.reference, training=False):
        y_TN = module(x_TK)
    want_TN = torch.nn.functional.linear(x_TK, module.weight) + (x_TK @ a_rK.T) @ b_rN * 2.0
    assert torch.equal(y_TN, want_TN)


def test_a_large_job_leaves_the_limits_of_a_bank_as_it_found_them(llama) -> None:
    """Else every site would stay slow when it has gone; captured passes of both limits find their graph."""
    sites = llama.shape.sites[:1]
    bank = TiledBank(sites, 8)
    seat(bank, sites, 0, rank=3)
    group = bank._table_group(torch.zeros(()))
    small = bank.limits()
    assert (group.rank, group.bands) == (16, 1)
    seat(bank, sites, 1, rank=100)
    bank.send_tables()
    large = bank.limits()
    assert bank._table_group(torch.zeros(())).rank == 128
    assert bank._table_group(torch.zeros(())).table is group.table
    bank.detach("job1")
    assert bank.limits() == small
    seat(bank, sites, 1, rank=70)
    assert bank.limits() == large


def test_a_rank_of_several_bands_has_another_table_and_keeps_it(llama) -> None:
    """A captured pass has the table's address: none that was made for the old one may be found again."""
    sites = llama.shape.sites[:1]
    bank, seen = TiledBank(sites, 8), []
    for slot, rank in enumerate((3, 300, 4)):
        seat(bank, sites, slot, rank)
        bank.send_tables()
        group = bank._table_group(torch.zeros(()))
        seen.append((bank.limits(), group.rank, group.bands, group.table.rank_PS[:, :3].tolist()))
    assert [one[1:] for one in seen] == [
        (16, 1, [[3, 0, 0]]),
        (512, 4, [[3, 128, 0], [0, 128, 0], [0, 44, 0], [0, 0, 0]]),
        (512, 4, [[3, 128, 4], [0, 128, 0], [0, 44, 0], [0, 0, 0]]),
    ]
    bank.detach("job1")
    bank.send_tables()
    left = bank._table_group(torch.zeros(()))
    assert (left.rank, left.bands, left.table) == (16, 4, group.table)
    assert bank.limits() not in [limits for limits, *_ in seen]
