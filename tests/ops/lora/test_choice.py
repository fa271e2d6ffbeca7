"""The rule that chooses a plan: what it measures, what it remembers, and where."""

import json
import multiprocessing
import time
import zlib
from contextlib import nullcontext
from itertools import accumulate, pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.cases import slow_but
from weftune.core.deterministic import deterministic_kernels
from weftune.core.device_class import class_for_capability, pretend_device_class
from weftune.ops.lora import choice_trial
from weftune.ops.lora.choice import (
    MAX_ROWS,
    ChoiceFile,
    Choices,
    MeasuredPlan,
    PlanTrial,
    choice_file,
    fastest_plan,
)
from weftune.ops.lora.choice_trial import JOBS, device_choices, synthetic_site
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.table import Group, SlotTable, required_bands
from weftune.ops.lora.tiling import ProductPlan, choose_tiling

MACHINE = {
    "device": "Loom 9000/X",
    "capability": "12.3",
    "torch": "2.99.0+cu1",
    "triton": "9.9",
    "kernels": "0badcafe",
}
BOTH = (ProductPlan.wide, ProductPlan.wide_beside)
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


class Clock:
    """Stands for the trial; counts how often it is asked."""

    def __init__(self, wide=200.0, beside=100.0, fused=300.0, lacks_memory=False):
        self.times = {ProductPlan.wide: wide, ProductPlan.wide_beside: beside, ProductPlan.fused: fused}
        self.lacks_memory = lacks_memory
        self.asked = []

    def __call__(self, trial):
        self.asked.append(trial)
        if self.lacks_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {plan: self.times[plan] for plan in trial.plans if plan in self.times}


class Call:
    """The arguments of one question."""

    def __init__(self, rows=100, features=64, widths=(32, 16), rank=7, slots=8, device="cpu", **changes):
        self.dtype = changes.pop("dtype", torch.float32)
        outputs = sum(widths)
        self.x = torch.zeros(rows, features, dtype=self.dtype, device=device)
        self.weight = torch.zeros(outputs, features, dtype=self.dtype, device=device)
        if changes.pop("transposed", False):
            self.weight = self.weight.T.contiguous().T
        self.residual = torch.zeros(rows, outputs, device=device) if changes.pop("residual", False) else None
        names = [f"site{part}" for part in range(len(widths))]
        aligned = changes.pop("aligned", True)
        table = SlotTable.empty(names, slots, torch.device(device), aligned, required_bands(rank))
        columns = tuple(pairwise(accumulate(widths, initial=0)))
        self.group = Group(columns, table, rank, changes.pop("drops", False))
        self.rows = Rows.empty(rows, slots, torch.device(device))
        assert not changes

    def of(self, choices, plans=BOTH):
        return choices.choose_plan(self.x, self.weight, self.residual, self.group, self.rows, plans)

    def trial(self, plans=BOTH):
        return PlanTrial.for_linears(
            plans, self.x.dtype, self.weight, self.residual is not None, self.group, self.rows
        )


def choices(clock, folder, machine=MACHINE, capturing=False):
    return Choices(clock, ChoiceFile(folder, **machine), lambda: capturing)


def test_the_fastest_order_is_chosen_and_measured_once(tmp_path):
    clock = Clock(wide=200.0, beside=100.0)
    made = choices(clock, tmp_path)
    assert [Call().of(made) for _ in range(3)] == [ProductPlan.wide_beside] * 3
    assert len(clock.asked) == 1


def test_a_tie_within_one_percent_goes_to_the_earlier_order():
    assert fastest_plan({ProductPlan.wide_beside: 100.0, ProductPlan.wide: 100.9}) is ProductPlan.wide
    assert fastest_plan({ProductPlan.wide_beside: 100.0, ProductPlan.wide: 101.1}) is ProductPlan.wide_beside
    assert fastest_plan({ProductPlan.fused_beside: 100.0, ProductPlan.fused: 100.9}) is ProductPlan.fused


def test_the_next_process_reads_what_the_last_one_measured(tmp_path):
    first, second = Clock(), Clock(wide=1.0, beside=2.0)
    Call().of(choices(first, tmp_path))
    assert Call().of(choices(second, tmp_path)) is ProductPlan.wide_beside
    assert (len(first.asked), len(second.asked)) == (1, 0)


OTHERS = {
    "dtype": dict(dtype=torch.bfloat16),
    "inputs": dict(features=128),
    "widths": dict(widths=(16, 32)),
    "rows beyond the power of two": dict(rows=129),
    "rank block": dict(rank=17),
    "bands": dict(rank=129),
    "dropout": dict(drops=True),
    "residual": dict(residual=True),
    "layout of the weight": dict(transposed=True),
    "alignment": dict(aligned=False),
    "slots": dict(slots=16),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_shape_that_differs_is_measured_by_itself(name, tmp_path):
    clock = Clock()
    made = choices(clock, tmp_path)
    Call().of(made)
    Call(**OTHERS[name]).of(made)
    assert len(clock.asked) == 2
    assert len(ChoiceFile(tmp_path, **MACHINE).read()) == 2


@pytest.mark.parametrize("same", [dict(rows=65), dict(rows=128), dict(rank=1), dict(rank=16)])
def test_rows_and_ranks_of_one_block_share_a_measurement(same, tmp_path):
    clock = Clock()
    made = choices(clock, tmp_path)
    Call().of(made)
    Call(**same).of(made)
    assert len(clock.asked) == 1
    assert (clock.asked[0].rows, clock.asked[0].ranks) == (128, 16)


def test_no_trial_has_more_rows_than_keep_a_device_busy():
    assert Call(rows=MAX_ROWS + 1, features=1, widths=(1,), aligned=False).trial().rows == MAX_ROWS


@pytest.mark.parametrize("field", ["device", "capability", "torch", "triton", "kernels"])
def test_another_machine_measures_for_itself(field, tmp_path):
    other, clock = {**MACHINE, field: "another"}, Clock(wide=1.0, beside=2.0)
    Call().of(choices(Clock(), tmp_path))
    assert Call().of(choices(clock, tmp_path, other)) is ProductPlan.wide
    assert len(clock.asked) == 1
    assert [known.plan for known in ChoiceFile(tmp_path, **other).read().values()] == [ProductPlan.wide]


def test_while_a_graph_is_captured_nothing_is_measured_nor_remembered(tmp_path):
    clock, capturing = Clock(), True
    made = Choices(clock, ChoiceFile(tmp_path, **MACHINE), lambda: capturing)
    assert Call().of(made) is ProductPlan.wide
    assert not clock.asked
    assert not list(tmp_path.iterdir())
    capturing = False
    assert Call().of(made) is ProductPlan.wide_beside
    capturing = True
    assert Call().of(made) is ProductPlan.wide_beside


def test_pinned_the_first_order_is_taken_unmeasured_whatever_a_file_says(tmp_path):
    Call().of(choices(Clock(wide=200.0, beside=100.0), tmp_path))
    clock = Clock(wide=200.0, beside=100.0)
    pinned = Choices(clock, ChoiceFile(tmp_path, **MACHINE), lambda: False, is_pinned=True)
    assert Call().of(pinned) is ProductPlan.wide
    assert Call(features=128).of(pinned) is ProductPlan.wide
    assert not clock.asked
    assert len(ChoiceFile(tmp_path, **MACHINE).read()) == 1


def test_pinned_only_the_first_order_is_compiled_ahead_whatever_a_file_says(tmp_path):
    Call().of(choices(Clock(), tmp_path))
    compiler, call = Compiler(), Call()
    file = ChoiceFile(tmp_path, **MACHINE)
    Choices(Clock(), file, lambda: False, compiler, is_pinned=True).compile_ahead([call.trial()])
    assert compiler.asked == [(call.trial(), BOTH[0])]


def test_a_forced_order_is_taken_and_compiled_whatever_may_be_used(tmp_path):
    Call().of(choices(Clock(), tmp_path))
    compiler, call, clock = Compiler(), Call(), Clock()
    made = Choices(clock, ChoiceFile(tmp_path, **MACHINE), lambda: False, compiler)
    made.forced_plan = ProductPlan.wide
    assert Call().of(made, (ProductPlan.fused, ProductPlan.fused_beside)) is ProductPlan.wide
    made.compile_ahead([call.trial()])
    assert compiler.asked == [(call.trial(), ProductPlan.wide)]
    assert not clock.asked


def test_choices_are_pinned_where_kernels_are_deterministic():
    assert not device_choices(CPU).is_pinned
    with deterministic_kernels():
        assert device_choices(CPU).is_pinned


def test_a_trial_out_of_memory_takes_the_first_order_for_this_process_only(tmp_path):
    clock = Clock(lacks_memory=True)
    made = choices(clock, tmp_path)
    assert [Call().of(made) for _ in range(2)] == [ProductPlan.wide] * 2
    assert len(clock.asked) == 1
    assert Call().of(choices(Clock(), tmp_path)) is ProductPlan.wide_beside


def test_an_order_that_may_not_be_used_is_never_chosen(tmp_path):
    clock = Clock()
    assert Call().of(choices(clock, tmp_path)) is ProductPlan.wide_beside
    assert Call().of(choices(clock, tmp_path), (ProductPlan.wide,)) is ProductPlan.wide
    assert len(clock.asked) == 1


def test_another_choice_of_orders_is_measured_by_itself(tmp_path):
    clock = Clock(wide=300.0, beside=200.0, fused=100.0)
    assert Call().of(choices(clock, tmp_path)) is ProductPlan.wide_beside
    assert Call().of(choices(clock, tmp_path), (ProductPlan.fused, *BOTH)) is ProductPlan.fused
    assert Call().of(choices(clock, tmp_path)) is ProductPlan.wide_beside
    assert len(clock.asked) == 2


def test_a_file_that_names_an_order_that_may_not_be_used_is_not_believed(tmp_path):
    file = ChoiceFile(tmp_path, **MACHINE)
    file.add(
        Call().trial().key, MeasuredPlan(ProductPlan.fused, {ProductPlan.fused: 1.0}), tuple(ProductPlan)
    )
    assert Call().of(choices(Clock(), tmp_path)) is ProductPlan.wide_beside
    assert file.read()[Call().trial().key].plan is ProductPlan.wide_beside


def test_an_order_that_the_device_cannot_run_is_not_chosen(tmp_path):
    clock = Clock()
    del clock.times[ProductPlan.wide]
    assert Call().of(choices(clock, tmp_path)) is ProductPlan.wide_beside
    clock.times.clear()
    none_runs = (ProductPlan.fused, ProductPlan.fused_beside)
    assert Call(rows=1000).of(choices(clock, tmp_path), none_runs) is ProductPlan.wide


def test_without_a_gpu_the_first_order_is_taken_and_no_file_written(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path))
    assert choice_file(torch.device("cpu")) is None
    assert Call().of(device_choices(torch.device("cpu"))) is ProductPlan.wide
    assert not list(tmp_path.iterdir())


def known_text(entry):
    return json.dumps({"machine": MACHINE, "shapes": {Call().trial().key: entry}})


SPOILED = {
    "nothing": b"",
    "half a file": b'{"machine": {"device": "Loom',
    "no text": b"\xff\xfe\x00",
    "a list": b"[1, 2]",
    "no shapes": known_text({}).replace('"shapes"', '"shape"').encode(),
    "shapes that are a list": b'{"machine": null, "shapes": []}',
    "deep nesting": b"[" * 100_000,
    "an unknown order": known_text({"order": "sideways", "microseconds": {}}).encode(),
    "an order that is a list": known_text({"order": [], "microseconds": {}}).encode(),
    "an order that is no more": known_text({"order": "before", "microseconds": {"before": 1.0}}).encode(),
    "the time of an order that is no more": known_text(
        {"order": "fused", "microseconds": {"fused": 1.0, "after": 2.0}}
    ).encode(),
    "times of no number": known_text({"order": "wide", "microseconds": {"wide": "soon"}}).encode(),
    "times that are a list": known_text({"order": "wide", "microseconds": []}).encode(),
    "an order without times": known_text({"order": "wide"}).encode(),
    "an entry that is text": known_text("wide").encode(),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_file_is_ignored_and_written_anew(name, tmp_path):
    file, clock = ChoiceFile(tmp_path, **MACHINE), Clock()
    file.path.write_bytes(SPOILED[name])
    assert file.read() == {}
    assert Call().of(choices(clock, tmp_path)) is ProductPlan.wide_beside
    assert len(clock.asked) == 1
    times = {plan: clock.times[plan] for plan in BOTH}
    assert file.read() == {Call().trial().key: MeasuredPlan(ProductPlan.wide_beside, times)}


def test_one_bad_entry_costs_the_others_nothing(tmp_path):
    file = ChoiceFile(tmp_path, **MACHINE)
    file.add("good", MeasuredPlan(ProductPlan.wide_beside, {ProductPlan.wide_beside: 1.0}), BOTH)
    content = json.loads(file.path.read_text())
    content["shapes"]["bad"] = {"order": 3}
    file.path.write_text(json.dumps(content))
    assert list(file.read()) == ["good"]


def test_a_cache_that_cannot_be_written_only_costs_the_memory_of_other_processes(tmp_path):
    (tmp_path / "routes").write_text("a file where the folder should be")
    clock = Clock()
    made = choices(clock, tmp_path / "routes")
    assert [Call().of(made) for _ in range(2)] == [ProductPlan.wide_beside] * 2
    assert len(clock.asked) == 1


def test_what_another_process_wrote_during_the_trial_stands(tmp_path):
    """So both go on with the same order, and so does every run after them."""
    file = ChoiceFile(tmp_path, **MACHINE)

    def slow(trial):
        file.add(Call().trial().key, MeasuredPlan(ProductPlan.wide, {ProductPlan.wide: 1.0}), BOTH)
        return {ProductPlan.wide: 2.0, ProductPlan.wide_beside: 1.0}

    assert Call().of(Choices(slow, file, lambda: False)) is ProductPlan.wide
    assert file.read()[Call().trial().key].plan is ProductPlan.wide


def write(folder, name):
    file = ChoiceFile(folder, **MACHINE)
    for number in range(150):
        measured = MeasuredPlan(ProductPlan.wide_beside, {ProductPlan.wide_beside: float(number)})
        file.add(f"{name} {number}", measured, BOTH)


def test_two_processes_that_write_at_once_never_leave_a_broken_file(tmp_path):
    file = ChoiceFile(tmp_path, **MACHINE)
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write, args=(tmp_path, name)) for name in ("one", "two")]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        if file.path.exists():
            assert file.read(), "a broken file reads as an empty one"
            seen += 1
        time.sleep(0.001)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen > 0
    assert {text.split()[0] for text in file.read()} <= {"one", "two"}
    assert [found.name for found in tmp_path.iterdir()] == [file.path.name]


def test_the_name_of_the_file_says_what_it_is_for_and_nothing_a_path_would_mind(tmp_path):
    name = ChoiceFile(tmp_path, **MACHINE).path.name
    assert name == "loom-9000-x-12.3-torch-2.99.0-cu1-triton-9.9.json"


LADEN = dict(drops=True, residual=True, transposed=True)


@pytest.mark.parametrize(
    ("plan", "changes"),
    slow_but(
        product(BOTH, ({}, LADEN, dict(rows=3))),
        [(ProductPlan.wide_beside, LADEN), (ProductPlan.wide, dict(rows=3))],
    ),
)
def test_a_trial_computes_a_site_with_rows_for_eight_jobs(plan, changes, device):
    trial = Call(**(dict(rows=100, device=device) | changes)).trial()
    site = synthetic_site(trial, device)
    site.step(plan)
    assert site.x_TK.shape == (trial.rows, 64)
    assert (site.weight_NK.stride(0) == 1) == trial.is_transposed
    assert len(site.adapters) == min(JOBS, trial.rows)
    for entry in (entry for seated in site.adapters for entry in seated):
        assert entry.rank == 16
        for gradient in (entry.da_RK, entry.db_RN):
            assert gradient.isfinite().all()
            assert gradient.norm() > 0


def test_a_trial_reads_as_text():
    assert Call().trial().key == (
        "float32, 128 rows, 64 inputs, 32+16 outputs, rank 16, 8 slots, aligned: wide or wide, beside"
    )
    changed = Call(rows=1, drops=True, residual=True, transposed=True, aligned=False, dtype=torch.bfloat16)
    assert changed.trial(BOTH[:1]).key == (
        "bfloat16, 1 rows, 64 inputs, 32+16 outputs, rank 16, 8 slots, drops, residual, transposed: wide"
    )


@pytest.mark.parametrize(("rows", "counted"), [(1, 1), (2, 2), (3, 4), (16384, 16384), (16385, 16384)])
def test_rows_are_counted_up_to_a_power_of_two_that_keeps_a_device_busy(rows, counted):
    call = Call(rows=rows, features=1, widths=(1,), aligned=False)
    assert call.trial().rows == counted
    assert not call.trial().is_transposed


class Compiler:
    """Stands for Triton; notes what it is asked for."""

    def __init__(self, broken=False):
        self.broken, self.asked = broken, []

    def __call__(self, trial, plan):
        self.asked.append((trial, plan))
        if self.broken:
            raise RuntimeError("no such instruction")


def ahead(folder, compiler, capturing=False):
    return Choices(Clock(), ChoiceFile(folder, **MACHINE), lambda: capturing, compiler)


def test_every_order_of_every_shape_is_compiled_ahead_once(tmp_path):
    compiler, calls = Compiler(), [Call(), Call(), Call(features=128)]
    made = ahead(tmp_path, compiler)
    for _ in range(2):
        made.compile_ahead(call.trial() for call in calls)
    wanted = {(call.trial(), plan) for call in calls for plan in BOTH}
    assert len(compiler.asked) == len(wanted) == 4
    assert set(compiler.asked) == wanted


def test_what_is_decided_or_no_choice_is_not_compiled_ahead(tmp_path):
    compiler = Compiler()
    Call().of(ahead(tmp_path, None))
    later = ahead(tmp_path, compiler)
    later.compile_ahead([Call().trial(), Call(features=128).trial(BOTH[:1])])
    assert compiler.asked == []


def test_nothing_is_compiled_ahead_inside_a_capture(tmp_path):
    compiler = Compiler()
    ahead(tmp_path, compiler, capturing=True).compile_ahead([Call().trial()])
    assert compiler.asked == []


def test_a_kernel_that_does_not_compile_ahead_is_left_to_its_pass(tmp_path):
    compiler = Compiler(broken=True)
    made = ahead(tmp_path, compiler)
    made.compile_ahead([Call().trial()])
    assert len(compiler.asked) == 2
    assert Call().of(made) is ProductPlan.wide_beside


def test_an_order_that_is_just_one_percent_slower_is_as_good():
    assert fastest_plan({ProductPlan.wide_beside: 100.0, ProductPlan.wide: 101.0}) is ProductPlan.wide


def test_a_trial_out_of_memory_gives_back_what_it_took(tmp_path, monkeypatch):
    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    Call().of(choices(Clock(), tmp_path))
    assert not freed
    Call(rows=1).of(choices(Clock(lacks_memory=True), tmp_path))
    assert freed == [True]


def test_the_file_is_made_with_its_folders_and_is_read_by_people(tmp_path):
    file = ChoiceFile(tmp_path / "made" / "for it", **MACHINE)
    file.add("z", MeasuredPlan(ProductPlan.wide, {ProductPlan.wide_beside: 2.0, ProductPlan.wide: 1.0}), BOTH)
    file.add("a", MeasuredPlan(ProductPlan.wide, {}), BOTH)
    assert file.path.read_text() == (
        '{\n "machine": {\n  "capability": "12.3",\n  "device": "Loom 9000/X",\n  "kernels": "0badcafe",\n'
        '  "torch": "2.99.0+cu1",\n  "triton": "9.9"\n },\n "shapes": {\n'
        '  "a": {\n   "microseconds": {},\n   "order": "wide"\n  },\n'
        '  "z": {\n   "microseconds": {\n    "wide": 1.0,\n    "wide, beside": 2.0\n   },\n'
        '   "order": "wide"\n  }\n }\n}'
    )


@pytest.mark.parametrize("error", [OSError("the disk is full"), KeyboardInterrupt()])
@pytest.mark.parametrize("gone", [False, True])
def test_a_write_that_fails_leaves_nothing_half_done(error, gone, tmp_path, monkeypatch):
    def fail(partial, path):
        if gone:
            partial.unlink()
        raise error

    monkeypatch.setattr("weftune.ops.lora.choice.os.replace", fail)
    file = ChoiceFile(tmp_path, **MACHINE)
    ends = pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext()
    with ends:
        file.add("a", MeasuredPlan(ProductPlan.wide, {}), BOTH)
    assert not list(tmp_path.iterdir())


def test_the_file_of_a_gpu_is_that_of_its_name_class_versions_and_kernels(tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path))
    card = SimpleNamespace(name="Loom 9000", shared_memory_per_block_optin=1, multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    sources = sorted((ROOT / "weftune" / "ops").rglob("*.py"))
    kernels = f"{zlib.crc32(b''.join(source.read_bytes() for source in sources)):08x}"
    machine = "Loom 9000", "8.6", torch.__version__, triton.__version__, kernels
    with pretend_device_class(class_for_capability((8, 6))):
        assert choice_file(torch.device("cuda", 3)) == ChoiceFile(tmp_path / "routes", *machine)


def test_a_made_up_site_has_the_shape_that_is_asked_for():
    call = Call(rows=100, slots=16, drops=True, residual=True)
    site = synthetic_site(call.trial(), CPU)
    assert len(site.adapters) == 8
    assert {(one.scale, one.dropout) for seated in site.adapters for one in seated} == {(1.0, 0.1)}
    assert site.group.columns == ((0, 32), (32, 48))
    assert (site.group.rank, site.group.has_dropout) == (16, True)
    assert (site.dy_TN.shape, site.weight_NK.shape) == ((128, 48), (48, 64))
    assert site.residual_TN.shape == (128, 48)
    assert site.rows.token_index_T.tolist() == list(range(128))
    owners = [slot for start, stop, slot in site.rows.tiles_G3.tolist() for _ in range(start, stop)]
    assert owners == [row // 16 for row in range(128)]
    plain = synthetic_site(Call(slots=3, rows=100).trial(), CPU)
    assert plain.residual_TN is None
    assert {(one.scale, one.dropout) for seated in plain.adapters for one in seated} == {(1.0, 0.0)}
    assert len(plain.adapters) == 3


def test_a_step_of_a_trial_is_a_forward_and_a_backward_of_training(monkeypatch):
    site, seen = synthetic_site(Call(rows=100, features=640, residual=True).trial(), CPU), []
    monkeypatch.setattr(choice_trial, "forward", lambda *given: seen.append(given) or ("y", "s", None))
    monkeypatch.setattr(choice_trial, "backward", lambda *given, **named: seen.append((*given, named)))
    site.step(ProductPlan.wide_beside)
    forward, backward = seen
    assert forward[:4] == (site.x_TK, site.weight_NK, None, site.residual_TN)
    call = forward[4]
    assert (call.group, call.rows, call.training, call.plan) == (
        *(site.group, site.rows),
        *(True, ProductPlan.wide_beside),
    )
    assert call.tiling == choose_tiling(site.rows, site.group, 640, torch.float32)
    assert backward == (site.dy_TN, site.x_TK, site.weight_NK, "s", call, {"needs_dx": True})


class Steps:
    """Stands for a site: notes its steps, and fails at some of them."""

    def __init__(self, seconds=0.0, fails=()):
        self.taken, self.seconds, self.fails, self.now = [], seconds, fails, 0.0

    def step(self, plan):
        self.taken.append(plan)
        self.now += self.seconds
        if plan in self.fails:
            from triton.errors import TritonError

            raise TritonError("more shared memory than there is")


def test_an_order_that_triton_cannot_compile_does_not_run():
    pytest.importorskip("triton")
    site = Steps(fails=(ProductPlan.fused,))
    assert [choice_trial._can_run_plan(site, plan) for plan in (ProductPlan.wide, ProductPlan.fused)] == [
        True,
        False,
    ]
    assert site.taken == [ProductPlan.wide, ProductPlan.fused]


def test_a_round_times_every_order_behind_a_head_start_with_a_cold_cache(monkeypatch):
    scratch, log = torch.ones(4, dtype=torch.int8), []

    class Site(Steps):
        def step(self, plan):
            scratch.fill_(1)
            super().step(plan)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = site.now
            log.append("warm" if scratch.any() else "cold")

        def elapsed_time(self, other):
            assert log[-1] == "waited"
            return 1000.0 * (other.at - self.at)

    site = Site(seconds=0.25)
    stream = SimpleNamespace(synchronize=lambda: log.append("waited"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("slept"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    assert choice_trial._time_round(site, BOTH, scratch) == dict.fromkeys(BOTH, 250_000.0)
    assert site.taken == list(BOTH)
    assert log == ["slept", "cold", "warm", "cold", "warm", "waited"]


def rounds_of(first, monkeypatch, fails=()):
    """(rounds that counted, the result) of a trial whose first round takes so many microseconds."""
    site, sizes, grads = Steps(fails=fails), [], []
    times = iter([first, *(float(number) for number in range(1, 20))])

    def made(trial, device):
        grads.append(torch.is_grad_enabled())
        return site

    def one_round(asked, plans, scratch):
        assert asked is site
        sizes.append(scratch.nbytes)
        taken = next(times)
        return dict.fromkeys(plans, taken / 2)

    monkeypatch.setattr(choice_trial, "synthetic_site", made)
    monkeypatch.setattr(choice_trial, "_time_round", one_round)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1000)
    )
    found = choice_trial.time_plans(Call().trial(), device=CPU)
    assert set(sizes) <= {2000}
    assert grads == [False]
    return len(sizes) - 1, found


@pytest.mark.parametrize(
    ("first", "rounds"), [(1.0, 9), (6_000.0, 9), (10_000.0, 6), (10_000.1, 5), (20_000.1, 3), (1e6, 3)]
)
def test_a_trial_has_as_many_rounds_as_its_budget_allows_and_takes_the_middle_one(first, rounds, monkeypatch):
    pytest.importorskip("triton")
    counted, found = rounds_of(first, monkeypatch)
    assert counted == rounds
    assert found == dict.fromkeys(BOTH, (rounds + 1) / 4)


def test_a_trial_leaves_out_what_does_not_run(monkeypatch):
    pytest.importorskip("triton")
    assert rounds_of(1e6, monkeypatch, fails=(ProductPlan.wide,)) == (3, {ProductPlan.wide_beside: 1.0})
    assert rounds_of(1e6, monkeypatch, fails=BOTH) == (-1, {})
