"""What `weftune` does in a process where something is wrong: a slow device, too little memory, a job that is
cancelled. Every worker runs one of these in the place of `main`; what it changes stays in its process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from tests.tensor_memory import storage_bytes

LAYER_SECONDS = 0.05
FINISHING = 0.2
"""In the place of ten seconds."""
ROOM = 60
"""Rows that a layer of a device without memory has room for."""
LATER = 30
"""The layer at which there is no room at all."""
VICTIM, OTHER = "victim", "other"


def _before_layers(do: Callable[[Any], None]) -> None:
    """Of the tiny OPT: `do` hears of what each is given, in whatever way the layer is run."""
    from transformers.models.opt.modeling_opt import OPTDecoderLayer

    run = OPTDecoderLayer.forward

    def forward(self: Any, hidden_states: Any, *args: Any, **keys: Any) -> Any:
        do(hidden_states)
        return run(self, hidden_states, *args, **keys)

    OPTDecoderLayer.forward = forward


def _main() -> None:
    from weftune.cli.main import main

    main()


def slow_main() -> None:
    import weftune.core.interrupt

    _before_layers(lambda given: time.sleep(LAYER_SECONDS))
    weftune.core.interrupt.FINISH_SECONDS = FINISHING
    _main()


def short_main(struck: Path) -> None:
    """The last worker, or the only one, has no room for large microbatches, and once none for any; the file
    `struck` has a letter for each time."""
    import torch

    calls = count(1)

    def refuse(given: Any) -> None:
        rows = given.numel() // given.shape[-1]
        if rows > ROOM or next(calls) == LATER:
            with struck.open("a") as file:
                file.write("x")
            raise torch.OutOfMemoryError("no room")

    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        _before_layers(refuse)
    _main()


def cancelling_main(moment: tuple[str, int, str], notes: Path) -> None:
    """The first worker cancels a job at a moment: a job, its step, and what happened. Every worker notes who
    is aboard at the beginning of each window, and how many tensors are as large as the job's own."""
    from weftune.run.executor import Executor
    from weftune.trainer.trainer import Trainer

    train, run, sizes = Trainer.run, Executor.run, set[int]()

    def note(what: Any) -> None:
        with (notes / f"worker-{os.environ['RANK']}").open("a") as file:
            print(json.dumps(what), file=file)

    def with_cancel(self: Any) -> Any:
        def callback(event: Any) -> None:
            happened = [event.job, event.step, type(event).__name__]
            note({"event": happened})
            if happened == list(moment):
                note({"cancelled": VICTIM})
                self.cancel(VICTIM)

        return train(self, callback)

    def noted(self: Any, *args: Any, **keys: Any) -> Iterator[Any]:
        if VICTIM in self.attached:
            sizes.add(self.attached[VICTIM].master.untyped_storage().nbytes())
        note({"aboard": sorted(self.attached), "own": sum(size in sizes for size in storage_bytes())})
        yield from run(self, *args, **keys)

    Trainer.run, Executor.run = with_cancel, noted
    _main()


def urgent_main(moment: tuple[str, int], keys: dict[str, Any]) -> None:
    """The first worker adds a job at a moment, which is another's step; there is room for two at a time."""
    from weftune import JobSpec
    from weftune.plan.cost.fitted import FittedModels
    from weftune.trainer.trainer import Trainer

    train = Trainer.run

    def with_addition(self: Any) -> Any:
        def callback(event: Any) -> None:
            if (event.job, event.step) == moment and keys["name"] not in self.jobs:
                self.add(JobSpec(**keys))

        return train(self, callback)

    def two_at_a_time(_self: Any, jobs: Any) -> str | None:
        return None if len(jobs) <= 2 else "there is room for two at a time"

    Trainer.run, FittedModels.misfit_reason = with_addition, two_at_a_time
    _main()


def exact_main() -> None:
    _keep_norms_exact()
    _main()


def exact_share(*arguments: Any) -> None:
    """The main function of a share's processes."""
    from weftune.launch.split import run_share

    _keep_norms_exact()
    run_share(*arguments)


def _keep_norms_exact() -> None:
    """Llama's norms compute in float32 whatever they are given, so that the order of a sum can move a result
    by a rounding of float32. Here they keep float64."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from tests.families import ExactNorm

    LlamaRMSNorm.shift = 0.0
    LlamaRMSNorm.eps = property(lambda norm: norm.variance_epsilon)
    LlamaRMSNorm.forward = ExactNorm.forward


def tell_wall_time() -> None:
    """Write the seconds that the clock of this process has counted to the file that the first word names."""
    import sys

    from weftune.core.clock import process_clock

    Path(sys.argv[1]).write_text(str(process_clock().read().seconds))


def with_short_chunks() -> None:
    """Samples of tiny models are cut, although their passes take no longer with more rows."""
    from weftune.plan.layout import choose
    from weftune.run.workers.paces import Paces

    choose.CPU_CHUNK_ROWS = 8
    Paces.has_measurements, Paces.stages = True, Paces.guessed_stages
    _main()
