"""`weftune generate`: generate with finished adapters, all in one batch, alone or beside their base."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weftune.adapters.folder import refuse_reward_model
from weftune.cli.early import DeviceOption, check_device, refuse_missing_base
from weftune.errors import AdapterError, UserError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from weftune.base.spec import BaseSpec
    from weftune.generate.answers import Answers, StreamedAnswer
    from weftune.generate.sampling import Sampling

BaseOption = Annotated[bool, typer.Option(help="Show the base's answer beside the adapters'.")]


def generate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="ADAPTER... [PROMPT]",
            help="Folders of finished jobs (output/JOB), then the prompt. Without a prompt, a chat starts.",
        ),
    ],
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts: rows with `prompt` or `messages`.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File to write the answers to --prompts to.")] = None,
    against_base: BaseOption = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per answer.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature. 0 selects the most likely token.")
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Number of most likely tokens to sample from. 0 means all.")
    ] = 0,
    top_p: Annotated[
        float, typer.Option(help="Total probability of the most likely tokens to sample from.")
    ] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Values above 1 make repeated tokens less likely.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Values above 0 make new tokens more likely.")
    ] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends an answer; repeatable.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampled tokens.")] = 0,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Use prompts as they are, without the chat template.")
    ] = False,
    device: DeviceOption = None,
) -> None:
    """Generate answers with finished adapters."""
    check_device(device)
    folders, prompt = split_arguments(arguments)
    if prompts is not None and prompt is not None:
        raise UserError(f"--prompts and the prompt {prompt!r} are both given; leave one of them out")
    if output is not None and prompts is None:
        raise UserError("--output is the file for the answers to --prompts; name a file of prompts, too")
    if plain and system is not None:
        raise UserError("--plain uses prompts without a chat template, which has no place for --system")
    base = common_base(folders)
    for folder in folders:
        refuse_reward_model(folder, "which gives rewards and no answers; weftune eval evaluates it on pairs")

    from rich.console import Console

    from weftune.base.load import select_device
    from weftune.generate.answers import BASE, Answers, chat_messages
    from weftune.generate.prompts import read_prompts
    from weftune.generate.sampling import Sampling

    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        seed=seed,
    )
    rows = None if prompts is None else read_prompts(prompts)
    answers = Answers(base, folders_by_name(folders), select_device(device))
    names = [BASE] * against_base + [name for name in answers.tokenizers if name != BASE]
    console = Console()
    if rows is not None:
        asked = [
            (row.index, name, answers.encode_prompt(name, chat_messages(row.prompt, system), plain))
            for row in rows
            for name in names
        ]
        write_answers(answers, asked, sampling, stop or (), output)
    elif prompt is not None:
        asked_now = [
            (name, answers.encode_prompt(name, chat_messages(prompt, system), plain)) for name in names
        ]
        show_answers(console, answers, asked_now, sampling, stop or ())
    else:
        chat_in_terminal(console, answers, names, sampling, stop or (), system)


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], str | None]:
    """Return the adapter folders in the command's arguments, and the prompt or None. The last argument is the
    prompt, unless it is a folder or the only argument."""
    *first, last = arguments
    folders, prompt = [Path(one) for one in first], None
    if Path(last).is_dir() or not first:
        folders.append(Path(last))
    else:
        prompt = last
    for folder in folders:
        if not folder.is_dir():
            raise AdapterError(f"{folder} is no folder; write the folders of finished jobs, then one prompt.")
    return folders, prompt


def common_base(folders: Sequence[Path]) -> BaseSpec:
    """Return the specification of the base model that all adapters were trained on. Raise AdapterError if
    they have different ones."""
    from weftune.adapters.folder import check_adapter_folder, refuse_parent_folder

    for folder in folders:
        refuse_parent_folder(folder)
    bases = {folder: recorded_base(folder) for folder in folders}
    for folder in folders:
        check_adapter_folder(folder)
    first = folders[0]
    for folder, base in bases.items():
        if base != bases[first]:
            raise AdapterError(
                f"{first} was trained on {bases[first].model} and {folder} on {base.model}, or with other "
                "settings of the base; ask adapters of one base at a time."
            )
    refuse_missing_base(bases[first])
    return bases[first]


def folders_by_name(folders: Sequence[Path]) -> dict[str, Path]:
    """Return a mapping from the name of each adapter to its folder. An adapter is named after its folder or,
    if that name is `base` or occurs twice, by the folder's path."""
    names = [folder.resolve().name for folder in folders]
    clear = {name for name in names if names.count(name) == 1 and name != "base"}
    return {
        name if name in clear else str(folder): folder for name, folder in zip(names, folders, strict=True)
    }


def recorded_base(folder: Path) -> BaseSpec:
    """Return the specification of the base model that the job in `folder` was trained on, as recorded in its
    job.yaml."""
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


def show_answers(
    console: Console,
    answers: Answers,
    prompts: Sequence[tuple[str, Sequence[int]]],
    sampling: Sampling,
    stop: Sequence[str],
    stop_requested: Callable[[], bool] = lambda: False,
) -> list[StreamedAnswer]:
    """Draw the answers to one prompt side by side; in a terminal, while they are generated."""
    from rich.live import Live
    from rich.padding import Padding

    texts = {name: "" for name, _ in prompts}

    def render_panels() -> RenderableType:
        panels = answer_panels({answers.adapter_title(name): text.strip() for name, text in texts.items()})
        # The ^C that a terminal shows must not wrap, since the panels are then drawn again one line too low.
        return Padding(panels, (0, 2 * console.is_terminal, 0, 0))

    with Live(
        render_panels(), console=console, auto_refresh=False, transient=not console.is_terminal
    ) as live:

        def show(answer: StreamedAnswer, new_text: str) -> None:
            texts[answer.adapter] += new_text
            if console.is_terminal:
                live.update(render_panels(), refresh=True)

        found = answers.complete_prompts(prompts, sampling, stop, show, stop_requested)
        texts = {answer.adapter: answer.text for answer in found}
        live.update(render_panels(), refresh=True)
    if not console.is_terminal:
        console.print(render_panels())
    return found


def write_answers(
    answers: Answers,
    prompts: Sequence[tuple[int, str, Sequence[int]]],
    sampling: Sampling,
    stop: Sequence[str],
    output: Path | None,
) -> None:
    """Write one line per prompt and adapter, to a file or to standard output."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    from weftune.core.files import replace_file

    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
        task = progress.add_task("answers", total=len(prompts))

        def show(answer: StreamedAnswer, new_text: str) -> None:
            if answer.finish_reason is not None:
                progress.advance(task)

        found = answers.complete_prompts(
            [(name, tokens) for _, name, tokens in prompts], sampling, stop, show
        )
    lines = [
        json.dumps(
            {
                "index": index,
                "adapter": answer.adapter,
                "completion": answer.text,
                "finish_reason": answer.finish_reason,
            },
            ensure_ascii=False,
        )
        for (index, _, _), answer in zip(prompts, found, strict=True)
    ]
    text = "".join(f"{line}\n" for line in lines)
    if output is None:
        typer.echo(text, nl=False)
    else:
        replace_file(output, text.encode())
        console.print(f"{len(lines)} answers: {output}", highlight=False, soft_wrap=True)


def chat_in_terminal(
    console: Console,
    answers: Answers,
    names: Sequence[str],
    sampling: Sampling,
    stop: Sequence[str],
    system: str | None,
) -> None:
    """Chat in the terminal until the input ends. Every adapter sees only its own answers. A question that
    cannot be answered is not added to the chat."""
    from weftune.core.interrupt import handle_interrupts

    start = [] if system is None else [{"role": "system", "content": system}]
    history = {name: list(start) for name in names}
    console.print("[dim]Ask something. Ctrl-C stops an answer, Ctrl-D ends the chat.[/dim]")
    while True:
        try:
            said = console.input("[bold]>[/bold] ").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n[dim]Ctrl-D ends the chat.[/dim]")
            continue
        if not said:
            continue
        question = {"role": "user", "content": said}
        try:
            asked = [(name, answers.encode_prompt(name, [*history[name], question])) for name in names]
            with handle_interrupts(lambda: None, [signal.SIGINT]) as stop_requested:
                found = show_answers(console, answers, asked, sampling, stop, stop_requested)
        except UserError as error:
            console.print(str(error), markup=False, highlight=False, soft_wrap=True)
            continue
        for answer in found:
            history[answer.adapter] += [question, {"role": "assistant", "content": answer.text}]


def answer_panels(answers: dict[str, str]) -> RenderableType:
    """Draw one panel per answer: side by side if there are two, otherwise one below the other. Answers are
    not interpreted as markup."""
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
