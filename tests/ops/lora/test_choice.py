"""The rule that chooses an order: what it measures, what it remembers, and where."""

import json
import multiprocessing
import time
from dataclasses import replace
from itertools import accumulate, pairwise, product

import pytest
import torch

from tests.cases import slow_but
from weftune.ops.lora.choice import MOST_ROWS, Choices, fastest, shape_of
from weftune.ops.lora.choice_file import ChoiceFile, Machine, MeasuredOrder, file_for
from weftune.ops.lora.choice_trial import JOBS, choices_on, made_up_site
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.table import Group, SlotTable
from weftune.ops.lora.weave import Order

MACHINE = Machine("Loom 9000/X", "12.3", "2.99.0+cu1", "9.9", "0badcafe")
BOTH = (Order.wide, Order.wide_beside)


class Clock:
    """Stands for the trial; counts how often it is asked."""

    def __init__(self, wide=200.0, beside=100.0, fused=300.0, lacks_memory=False):
        self.times = {Order.wide: wide, Order.wide_beside: beside, Order.fused: fused}
        self.lacks_memory = lacks_memory
        self.asked = []

    def __call__(self, shape, orders):
        self.asked.append(shape)
        if self.lacks_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {order: self.times[order] for order in orders if order in self.times}


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
        table = SlotTable.empty(names, slots, torch.device(device), aligned)
        columns = tuple(pairwise(accumulate(widths, initial=0)))
        self.group = Group(columns, table, rank, changes.pop("drops", False))
        self.rows = Rows.empty(rows, slots, torch.device(device))
        assert not changes

    def of(self, choices, orders=BOTH):
        return choices.order(self.x, self.weight, self.residual, self.group, self.rows, orders)

    @property
    def shape(self):
        return shape_of(self.x, self.weight, self.residual, self.group, self.rows)

    def contest(self, orders=BOTH):
        return f"{self.shape.text}: {' or '.join(orders)}"


def choices(clock, folder, machine=MACHINE, capturing=False):
    return Choices(clock, ChoiceFile(folder, machine), lambda: capturing)


def test_the_fastest_order_is_chosen_and_measured_once(tmp_path):
    clock = Clock(wide=200.0, beside=100.0)
    made = choices(clock, tmp_path)
    assert [Call().of(made) for _ in range(3)] == [Order.wide_beside] * 3
    assert len(clock.asked) == 1


def test_a_tie_within_one_percent_goes_to_the_earlier_order():
    assert fastest({Order.wide_beside: 100.0, Order.wide: 100.9}) is Order.wide
    assert fastest({Order.wide_beside: 100.0, Order.wide: 101.1}) is Order.wide_beside
    assert fastest({Order.fused_beside: 100.0, Order.fused: 100.9}) is Order.fused


def test_the_next_process_reads_what_the_last_one_measured(tmp_path):
    first, second = Clock(), Clock(wide=1.0, beside=2.0)
    Call().of(choices(first, tmp_path))
    assert Call().of(choices(second, tmp_path)) is Order.wide_beside
    assert (len(first.asked), len(second.asked)) == (1, 0)


OTHERS = {
    "dtype": dict(dtype=torch.bfloat16),
    "inputs": dict(features=128),
    "widths": dict(widths=(16, 32)),
    "rows beyond the power of two": dict(rows=129),
    "rank block": dict(rank=17),
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
    assert len(ChoiceFile(tmp_path, MACHINE).read()) == 2


@pytest.mark.parametrize("same", [dict(rows=65), dict(rows=128), dict(rank=1), dict(rank=16)])
def test_rows_and_ranks_of_one_block_share_a_measurement(same, tmp_path):
    clock = Clock()
    made = choices(clock, tmp_path)
    Call().of(made)
    Call(**same).of(made)
    assert len(clock.asked) == 1
    assert (clock.asked[0].rows, clock.asked[0].ranks) == (128, 16)


def test_no_trial_has_more_rows_than_keep_a_device_busy():
    assert Call(rows=MOST_ROWS + 1, features=1, widths=(1,), aligned=False).shape.rows == MOST_ROWS


@pytest.mark.parametrize("field", ["device", "capability", "torch", "triton", "kernels"])
def test_another_machine_measures_for_itself(field, tmp_path):
    other, clock = replace(MACHINE, **{field: "another"}), Clock(wide=1.0, beside=2.0)
    Call().of(choices(Clock(), tmp_path))
    assert Call().of(choices(clock, tmp_path, other)) is Order.wide
    assert len(clock.asked) == 1
    assert [known.order for known in ChoiceFile(tmp_path, other).read().values()] == [Order.wide]


def test_while_a_graph_is_captured_nothing_is_measured_nor_remembered(tmp_path):
    clock, capturing = Clock(), True
    made = Choices(clock, ChoiceFile(tmp_path, MACHINE), lambda: capturing)
    assert Call().of(made) is Order.wide
    assert not clock.asked
    assert not list(tmp_path.iterdir())
    capturing = False
    assert Call().of(made) is Order.wide_beside
    capturing = True
    assert Call().of(made) is Order.wide_beside


def test_a_trial_out_of_memory_takes_the_first_order_for_this_process_only(tmp_path):
    clock = Clock(lacks_memory=True)
    made = choices(clock, tmp_path)
    assert [Call().of(made) for _ in range(2)] == [Order.wide] * 2
    assert len(clock.asked) == 1
    assert Call().of(choices(Clock(), tmp_path)) is Order.wide_beside


def test_an_order_that_may_not_be_used_is_never_chosen(tmp_path):
    clock = Clock()
    assert Call().of(choices(clock, tmp_path)) is Order.wide_beside
    assert Call().of(choices(clock, tmp_path), (Order.wide,)) is Order.wide
    assert len(clock.asked) == 1


def test_another_choice_of_orders_is_measured_by_itself(tmp_path):
    clock = Clock(wide=300.0, beside=200.0, fused=100.0)
    assert Call().of(choices(clock, tmp_path)) is Order.wide_beside
    assert Call().of(choices(clock, tmp_path), (Order.fused, *BOTH)) is Order.fused
    assert Call().of(choices(clock, tmp_path)) is Order.wide_beside
    assert len(clock.asked) == 2


def test_a_file_that_names_an_order_that_may_not_be_used_is_not_believed(tmp_path):
    file = ChoiceFile(tmp_path, MACHINE)
    file.add(Call().contest(), MeasuredOrder(Order.fused, {Order.fused: 1.0}), tuple(Order))
    assert Call().of(choices(Clock(), tmp_path)) is Order.wide_beside
    assert file.read()[Call().contest()].order is Order.wide_beside


def test_an_order_that_the_device_cannot_run_is_not_chosen(tmp_path):
    clock = Clock()
    del clock.times[Order.wide]
    assert Call().of(choices(clock, tmp_path)) is Order.wide_beside
    clock.times.clear()
    none_runs = (Order.fused, Order.fused_beside)
    assert Call(rows=1000).of(choices(clock, tmp_path), none_runs) is Order.wide


def test_without_a_gpu_the_first_order_is_taken_and_no_file_written(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path))
    assert file_for(torch.device("cpu")) is None
    assert Call().of(choices_on(torch.device("cpu"))) is Order.wide
    assert not list(tmp_path.iterdir())


def known_text(entry):
    machine = {
        name: getattr(MACHINE, name) for name in ("device", "capability", "torch", "triton", "kernels")
    }
    return json.dumps({"machine": machine, "shapes": {Call().contest(): entry}})


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
    "an entry that is text": known_text("wide").encode(),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_file_is_ignored_and_written_anew(name, tmp_path):
    file, clock = ChoiceFile(tmp_path, MACHINE), Clock()
    file.path.write_bytes(SPOILED[name])
    assert file.read() == {}
    assert Call().of(choices(clock, tmp_path)) is Order.wide_beside
    assert len(clock.asked) == 1
    times = {order: clock.times[order] for order in BOTH}
    assert file.read() == {Call().contest(): MeasuredOrder(Order.wide_beside, times)}


def test_one_bad_entry_costs_the_others_nothing(tmp_path):
    file = ChoiceFile(tmp_path, MACHINE)
    file.add("good", MeasuredOrder(Order.wide_beside, {Order.wide_beside: 1.0}), BOTH)
    content = json.loads(file.path.read_text())
    content["shapes"]["bad"] = {"order": 3}
    file.path.write_text(json.dumps(content))
    assert list(file.read()) == ["good"]


def test_a_cache_that_cannot_be_written_only_costs_the_memory_of_other_processes(tmp_path):
    (tmp_path / "routes").write_text("a file where the folder should be")
    clock = Clock()
    made = choices(clock, tmp_path / "routes")
    assert [Call().of(made) for _ in range(2)] == [Order.wide_beside] * 2
    assert len(clock.asked) == 1


def test_what_another_process_wrote_during_the_trial_stands(tmp_path):
    """So both go on with the same order, and so does every run after them."""
    file = ChoiceFile(tmp_path, MACHINE)

    def slow(shape, orders):
        file.add(Call().contest(), MeasuredOrder(Order.wide, {Order.wide: 1.0}), BOTH)
        return {Order.wide: 2.0, Order.wide_beside: 1.0}

    assert Call().of(Choices(slow, file, lambda: False)) is Order.wide
    assert file.read()[Call().contest()].order is Order.wide


def write(folder, name):
    file = ChoiceFile(folder, MACHINE)
    for number in range(150):
        measured = MeasuredOrder(Order.wide_beside, {Order.wide_beside: float(number)})
        file.add(f"{name} {number}", measured, BOTH)


def test_two_processes_that_write_at_once_never_leave_a_broken_file(tmp_path):
    file = ChoiceFile(tmp_path, MACHINE)
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
    name = ChoiceFile(tmp_path, MACHINE).path.name
    assert name == "loom-9000-x-12.3-torch-2.99.0-cu1-triton-9.9.json"


LADEN = dict(drops=True, residual=True, transposed=True)


@pytest.mark.parametrize(
    ("order", "changes"),
    slow_but(
        product(BOTH, ({}, LADEN, dict(rows=3))), [(Order.wide_beside, LADEN), (Order.wide, dict(rows=3))]
    ),
)
def test_a_trial_computes_a_site_with_rows_for_eight_jobs(order, changes, device):
    shape = Call(**(dict(rows=100, device=device) | changes)).shape
    site = made_up_site(shape, device)
    site.step(order)
    assert site.x_TK.shape == (shape.rows, 64)
    assert (site.weight_NK.stride(0) == 1) == shape.transposed
    assert len(site.entries) == min(JOBS, shape.rows)
    for entry in (entry for seated in site.entries for entry in seated):
        assert entry.rank == 16
        for gradient in (entry.da_RK, entry.db_RN):
            assert gradient.isfinite().all()
            assert gradient.norm() > 0
