"""`weftune doctor --profile`: measure this device's passes over a base, and write the profile."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weftune.base.spec import BaseSpec
from weftune.cli.early import check_device, refuse_missing_base
from weftune.core.shapes import ModelShape
from weftune.errors import OutputError, UserError
from weftune.plan.cost.profile import Profile, check_writable, profile_folder, profile_path, write_profile
from weftune.plan.cost.profile_cost import pass_terms
from weftune.plan.cost.time import PassWork

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch


def make_profile(base: str, device_name: str | None, output: Path | None) -> None:
    check_device(device_name)
    refuse_missing_base(BaseSpec(model=base))

    from weftune.base.load import inspect, select_device
    from weftune.run.measure.memory import bytes_before_base
    from weftune.run.profile import device_profile_key

    spec, device, console = BaseSpec(model=base), select_device(device_name), Console()
    shape = inspect(spec, device)
    # The memory of a training process includes its modules and the tokenizer.
    import_module("weftune.trainer.trainer")
    tokenizer = _tokenizer(spec)
    process_bytes = bytes_before_base(device)
    file = output or profile_path(profile_folder(), device_profile_key(shape, device))
    try:
        # Checked before measuring, so that no measurement is lost.
        check_writable(file)
        profile = replace(
            _measure_profile(console, spec, shape, device, tokenizer), process_bytes=process_bytes
        )
        if device.type == "cpu":
            first, other = worker_bytes(spec)
            profile = replace(profile, first_worker_bytes=first, worker_bytes=other)
        write_profile(file, profile)
    except OSError as error:
        raise OutputError(f"{file} cannot be written: {error.strerror}; name another --output") from None
    console.print(kinds_table(profile, shape))
    console.print(f"Measured in {profile.seconds:.0f} s: {file}", highlight=False, soft_wrap=True)


def _tokenizer(spec: BaseSpec) -> Any:
    """Return the tokenizer of the base; None if it has none."""
    from weftune.base.load import load_tokenizer

    with suppress(UserError):
        return load_tokenizer(spec)


def worker_bytes(spec: BaseSpec) -> tuple[int, int]:
    """Return the memory use in bytes, before anything is loaded, of the first of several workers and of any
    other worker; both numbers are zero if no worker can be started. Workers are forked, so they are measured
    in a forked process."""
    from weftune.launch.supervise import ProcessSpec, kill_processes, start_process

    process = start_process(ProcessSpec("worker", partial(_send_process_bytes, spec)), None, neighbours=2)
    try:
        first, other = process.connection.recv()
    except EOFError:
        return 0, 0
    finally:
        kill_processes([process])
    return first, other


def _send_process_bytes(spec: BaseSpec, connection: Connection) -> None:
    """Measure the memory use in bytes of this process before a base is loaded, as the first of several
    workers and as any other worker. Send both numbers over `connection`."""
    import torch

    from weftune.base.load import inspect
    from weftune.run.measure.memory import bytes_before_base

    device = torch.device("cpu")
    inspect(spec, device)
    other = bytes_before_base(device)
    tokenizer = _tokenizer(spec)
    connection.send((bytes_before_base(device), other))
    del tokenizer


def _measure_profile(
    console: Console, spec: BaseSpec, shape: ModelShape, device: torch.device, tokenizer: Any
) -> Profile:
    from weftune.base.load import load_config, model_source
    from weftune.run.profile import measure_profile
    from weftune.trainer.results import TokenizerFiles, prepare_result

    # No drawing thread: the measured passes would have to wait for it.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(f"Measuring {spec.model} on {device}", total=None)
        return measure_profile(
            load_config(spec, model_source(spec)).text_config,
            shape,
            spec.model,
            device,
            lambda done, total: progress.update(task, completed=done, total=total, refresh=True),
            # The writer does the same while the first window is trained.
            None if tokenizer is None else partial(prepare_result, None, TokenizerFiles(tokenizer)),
        )


def kinds_table(profile: Profile, shape: ModelShape) -> Table:
    """Return a table with the milliseconds that each part of a pass (embedding, layer, head, adapter) takes
    for 256 supervised tokens in four samples and an adapter of rank 8."""
    rank, tokens, samples = 8, 256, 4
    widths = sum(site.values_per_token for site in shape.sites if not site.experts)
    work = PassWork(
        tokens=tokens,
        squares=tokens * tokens // samples,
        samples=samples,
        supervised=tokens,
        adapted=tokens * rank * widths,
        segments=1,
    )
    found = pass_terms(profile, shape)
    title = f"Milliseconds over {tokens} tokens in {samples} samples, rank {rank}"
    table = Table("", "forward", "backward", "evaluation", title=title)
    for kind, name in (
        ("embedding", "embedding and the pass itself"),
        ("layer", f"one of {shape.layers} layers"),
        ("head", "head and loss"),
        ("adapter", "adapter, all its sites"),
    ):
        each = (found.forward, found.backward, found.evaluation)
        table.add_row(name, *(f"{1000 * getattr(terms, kind)(work):.2f}" for terms in each))
    whole = (terms.base_terms(shape.layers) for terms in (found.forward, found.backward, found.evaluation))
    table.add_row("whole pass", *(f"{1000 * terms(work):.1f}" for terms in whole))
    return table
