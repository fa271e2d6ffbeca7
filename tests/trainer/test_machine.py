"""What stages are cut by, before any worker is started."""

from dataclasses import replace

import psutil

from tests.bench import CPU
from tests.plan.costs import SHAPE
from tests.plan.profiles import profile
from weftune import Options
from weftune.base.spec import BaseSpec
from weftune.plan.cost.profile import profile_folder, profile_path, write_profile
from weftune.plan.layout.choose import MAX_TOKENS, PROCESS_BYTES, part_costs
from weftune.plan.layout.stages import measured_costs, typical_work
from weftune.run.profile import device_profile_key
from weftune.trainer.machine import data_sheet_gpu, describe_machine

DEMO = BaseSpec(model="demo")


def test_stages_are_cut_by_the_profile_in_the_cache_if_it_is_of_this_device_and_base(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path))

    def costs_here(shape):
        return part_costs(shape, describe_machine(Options(), DEMO, CPU, shape))

    assert costs_here(SHAPE) is None
    mine = replace(profile(), key=device_profile_key(SHAPE, CPU))
    write_profile(profile_path(profile_folder(), mine.key), mine)
    assert costs_here(SHAPE) == measured_costs(mine, SHAPE, typical_work(SHAPE, MAX_TOKENS[False]))
    assert costs_here(replace(SHAPE, vocabulary=100)) is None


def test_shares_of_a_run_have_the_hosts_memory_among_them(monkeypatch):
    real = psutil.virtual_memory()
    monkeypatch.setattr("psutil.virtual_memory", lambda: real._replace(available=80 << 30))
    alone, share = (describe_machine(Options(shares=count), DEMO, CPU, SHAPE) for count in (1, 4))
    assert alone.host_budget_bytes == 4 * share.host_budget_bytes > 60 << 30


def test_a_deterministic_run_is_planned_by_what_the_machine_has_not_by_what_is_free(monkeypatch):
    real = psutil.virtual_memory()

    def found(deterministic, free):
        monkeypatch.setattr("psutil.virtual_memory", lambda: real._replace(total=64 << 30, available=free))
        machine = describe_machine(Options(deterministic=deterministic), DEMO, CPU, SHAPE)
        return machine.budget_bytes, machine.host_budget_bytes, machine.process_bytes

    assert found(True, 1 << 30) == found(True, 32 << 30)
    assert found(True, 1 << 30)[2] == PROCESS_BYTES
    assert found(False, 1 << 30) != found(False, 32 << 30)
    given = describe_machine(Options(deterministic=True, memory=5 << 30), DEMO, CPU, SHAPE)
    assert (given.budget_bytes, given.process_bytes) == (5 << 30, PROCESS_BYTES)
    assert data_sheet_gpu(1 << 30, 2 << 30) == data_sheet_gpu(1 << 30, 2 << 30)
