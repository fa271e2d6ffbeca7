"""`weftune eval`: loss, accuracy and answers of finished adapters and of their base on the same rows."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weftune.adapters.folder import has_scalar_head, read_config
from weftune.cli.early import DeviceOption, check_device
from weftune.cli.generate import common_base, folders_by_name
from weftune.errors import AdapterError, UserError

if TYPE_CHECKING:
    from rich.table import Table

    from weftune.core.evaluation import Evaluation
    from weftune.generate.metric import UserMetric


def eval(
    adapters: Annotated[
        list[Path], typer.Argument(metavar="ADAPTER...", help="Folders of finished jobs (output/JOB).")
    ],
    data: Annotated[
        str, typer.Option(metavar="FILE", help="File of rows, in any format that training reads.")
    ],
    metric: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE.py:FUNCTION",
            help="Rank by loss, perplexity, token_accuracy, exact_match, rewards/margins or "
            "rewards/accuracies of pairs, accuracy or margin of reward models, or your Python function.",
        ),
    ] = "loss",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results as JSON.")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page with all answers side by side.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=0, help="Maximum number of tokens per answer. 0 generates no answers.")
    ] = 128,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Skip rows that cannot be used, and report how many.")
    ] = False,
    no_base: Annotated[
        bool, typer.Option("--no-base", help="Do not evaluate the base without adapters.")
    ] = False,
    device: DeviceOption = None,
) -> None:
    """Evaluate finished adapters and their base on the same rows."""
    check_device(device)
    for folder in adapters:
        if not folder.is_dir():
            raise AdapterError(f"{folder} is no folder; write the folders of finished jobs.")
    base, folders = common_base(adapters), folders_by_name(adapters)
    rewards = any(has_scalar_head(read_config(folder)) for folder in adapters)
    ranked_by, user_metric = read_metric(metric, rewards)

    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TaskID

    from weftune.base.load import select_device
    from weftune.core.files import replace_file, replace_json
    from weftune.generate.answers import Answers
    from weftune.generate.evaluate import evaluate
    from weftune.report.evaluation import evaluation_page

    errors = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=errors) as progress:
        tasks: dict[str, TaskID] = {}

        def show_progress(count_text: str, done: int, total: int | None) -> None:
            if count_text not in tasks:
                tasks[count_text] = progress.add_task(count_text, total=total)
            progress.update(tasks[count_text], completed=done, total=total)

        found = evaluate(
            Answers(base, folders, select_device(device)),
            folders,
            data,
            with_base=not no_base,
            max_tokens=max_tokens,
            metric=user_metric,
            skip_bad_rows=skip_bad_rows,
            show_progress=show_progress,
        )
    if ranked_by not in found.results[0].scores:
        raise UserError(f"--metric: {ranked_by} is a metric of preference pairs, and {data} holds none.")
    for note in found.notes:
        errors.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    Console().print(score_table(found, ranked_by))
    if json is not None:
        replace_json(json, found.record())
    if page is not None:
        replace_file(page, evaluation_page(found, ranked_by).encode())
        errors.print(f"Answers side by side: {page}", highlight=False, markup=False, soft_wrap=True)


def read_metric(text: str, is_reward_model: bool = False) -> tuple[str, UserMetric | None]:
    """Return the name of the metric by which the table of adapters is ranked, and the user's function if it
    names one. Reward models have other metrics, and no answers that a function could measure."""
    from weftune.core.evaluation import METRICS, REWARDS
    from weftune.objectives.spec import REWARD_METRICS

    known = ("loss", *REWARD_METRICS) if is_reward_model else (*METRICS, *REWARDS)
    if text in known:
        return text, None
    if is_reward_model:
        raise UserError(f"--metric: {text} is no metric of reward models; write {', '.join(known)}.")
    file, _, function = text.rpartition(":")
    if file.endswith(".py"):
        from weftune.generate.metric import load_metric

        return function, load_metric(Path(file), function)
    near = difflib.get_close_matches(text, METRICS, 1)
    hint = f"did you mean {near[0]}?" if near else f"write {', '.join(METRICS)}, or FILE.py:FUNCTION."
    raise UserError(f"--metric: {text} is no metric; {hint}")


def score_table(evaluation: Evaluation, metric: str) -> Table:
    """Return the table of scores, the best adapter first and marked. Names of adapters are not interpreted as
    markup."""
    from rich.table import Table
    from rich.text import Text

    from weftune.report.evaluation import metric_title, score_text

    best = evaluation.best_adapter(metric)
    table = Table("adapter")
    for name in evaluation.results[0].scores:
        table.add_column(Text(metric_title(name), style="bold" if name == metric else ""), justify="right")
    table.add_column("rows", justify="right")
    table.add_column("tokens", justify="right")
    for one in evaluation.rank_results(metric):
        title = Text(f"{one.adapter} ★ best" if one.adapter == best else one.adapter)
        cells = [score_text(name, value) for name, value in one.scores.items()]
        style = "bold green" if one.adapter == best else ""
        table.add_row(title, *cells, f"{one.rows:,}", f"{one.tokens:,}", style=style)
    return table
