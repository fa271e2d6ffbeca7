"""What stages are cut by, before any worker is started."""

from dataclasses import replace

from tests.bench import CPU
from tests.plan.costs import SHAPE
from tests.plan.profiles import profile
from weftune.plan.cost.profile import file_of, profile_folder, write_profile
from weftune.plan.layout.cut import measured_costs, typical_work
from weftune.run.profile import key_here
from weftune.trainer.machine import costs_here, most_tokens


def test_stages_are_cut_by_the_profile_in_the_cache_if_it_is_of_this_device_and_base(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path))
    assert costs_here(SHAPE, CPU) is None
    mine = replace(profile(), key=key_here(SHAPE, CPU))
    write_profile(file_of(profile_folder(), mine.key), mine)
    assert costs_here(SHAPE, CPU) == measured_costs(mine, SHAPE, typical_work(SHAPE, most_tokens(CPU)))
    assert costs_here(replace(SHAPE, vocabulary=100), CPU) is None
