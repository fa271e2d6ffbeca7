"""kill -9 of any worker at any moment, in every mode: it is started again and ends where the undisturbed run
ended. On one device without a supervisor: `tests/test_killed.py`."""

import random
import signal
import time
from contextlib import suppress

import pytest

from tests.launch.modes import MODES
from tests.launches import copied
from tests.outputs import assert_same_results, assert_whole
from weftune.launch.supervise import MAX_RESTARTS

SEED = 20240607
TIMES = 100
"""A few of each mode are in `test_streaming`, `test_pipeline_lost`, `test_streaming_workers_resumed`."""


@pytest.fixture(scope="module")
def place(tmp_path_factory, trained_deep):
    return copied(trained_deep, tmp_path_factory.mktemp("killed"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])
def test_killed_at_random_moments_a_run_ends_in_the_same_adapters(place, mode):
    rng, kills = random.Random(SEED), 0
    print(f"seed {SEED}")
    while kills < TIMES:
        output = mode.output(place)
        run = mode.start(place, output.name)
        run.wait_until(lambda run=run: (run.output / "ranks" / "pids").exists())
        for _ in range(min(MAX_RESTARTS, TIMES - kills)):
            time.sleep(rng.uniform(0.0, 1.5))
            if run.code is None:
                with suppress(ProcessLookupError):
                    run.signal(rng.randrange(mode.workers), signal.SIGKILL)
                    kills += 1
        assert run.wait() == 0
        mode.assert_it_was(output)
        assert_whole(output)
        assert_same_results(output, place / "undisturbed")
