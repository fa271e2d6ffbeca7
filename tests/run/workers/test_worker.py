"""What the first command makes of a worker."""

import pytest

from weftune.base.spec import BaseSpec
from weftune.core.deterministic import are_kernels_deterministic
from weftune.errors import UserError
from weftune.plan.program.layout import one_device_layout
from weftune.run.workers import worker
from weftune.run.workers.messages import Begin, End, Ended


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_worker_has_deterministic_kernels_if_the_first_one_says_so(monkeypatch, deterministic):
    begin = Begin(BaseSpec(model="demo"), one_device_layout(2).for_worker(0), deterministic=deterministic)
    commands, answers, found = [End(), begin], [], []

    class CommandReceiver:
        def __init__(self, connections):
            self.next_command, self.answer = commands.pop, answers.append

    class WorkerConnections:
        class position:
            worker = 1

    def loads(*_):
        found.append(are_kernels_deterministic())
        raise UserError("enough is known")

    monkeypatch.setattr(worker, "CommandReceiver", CommandReceiver)
    monkeypatch.setattr(worker, "Worker", loads)
    worker.serve(WorkerConnections, None)
    assert found == [deterministic]
    assert isinstance(answers[-1], Ended)
    assert not are_kernels_deterministic()
