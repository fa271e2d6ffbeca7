"""`weftune generate`: generate with a finished adapter, alone or beside its base."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weftune.cli.early import DeviceOption, refuse_base, refuse_device
from weftune.errors import AdapterError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from weftune.base.spec import BaseSpec


def generate(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished job: output/JOB.")],
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    against_base: Annotated[bool, typer.Option(help="Show the base's answer beside the adapter's.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 128,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    device: DeviceOption = None,
) -> None:
    """Ask a finished adapter something."""
    from weftune.adapters.folder import check_adapter_folder, refuse_parent_folder

    refuse_device(device)
    refuse_parent_folder(folder)
    spec = recorded_base(folder)
    check_adapter_folder(folder)
    refuse_base(spec)

    from rich.console import Console

    from weftune.base.load import select_device
    from weftune.data.tokenise import prompt_tokens
    from weftune.trainer.generate import BASE, generate_answers

    said = generate_answers(
        spec,
        {"adapter": folder},
        prompt,
        tokenise=prompt_tokens,
        system=system,
        max_tokens=max_tokens,
        device=select_device(device),
        with_base=against_base,
    )
    titles = {BASE: f"{BASE} ({spec.model})", "adapter": folder.resolve().name}
    Console().print(answer_panels({titles[who]: text for who, text in said.items()}))


def recorded_base(folder: Path) -> BaseSpec:
    """Return the base that the job in `folder` was trained on, as recorded in its job.yaml."""
    from weftune.base.spec import BaseSpec
    from weftune.jobs.store.job_file import JOB_FILE, DamagedJobFile, read_job_file

    try:
        found = read_job_file(folder)
        if found is None:
            raise AdapterError(f"{folder} is no folder of a finished job: it holds no {JOB_FILE}.")
        return BaseSpec.from_record(found.values["base"])
    except DamagedJobFile as error:
        raise AdapterError(f"{error}, so it is not known which base the adapter was trained on.") from error
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise AdapterError(
            f"{folder / JOB_FILE} does not say which base the adapter was trained on."
        ) from error


def answer_panels(answers: dict[str, str]) -> RenderableType:
    """Draw one panel per answer, two side by side; answers are `Text`, so that brackets are no markup."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    panels = [Panel(Text(text), title=Text(name), title_align="left") for name, text in answers.items()]
    if len(panels) > 2:
        return Group(*panels)
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in panels:
        table.add_column(ratio=1)
    table.add_row(*panels)
    return table
