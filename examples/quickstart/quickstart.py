"""Trains the four jobs of jobs.yaml together, then asks the base and two adapters a held-out question."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from weftune.cli.generate import answer_panels
from weftune.errors import UserError
from weftune.generate.answers import generate_answers
from weftune.jobs.spec.read import read_run
from weftune.report.ending import final_table
from weftune.report.read import read_run as read_records
from weftune.report.terminal import LiveView
from weftune.trainer.options import Options
from weftune.trainer.train import make_trainer

HERE = Path(__file__).parent


def main() -> int:
    console = Console()
    run = read_run(HERE / "jobs.yaml")
    again = (run.output / "status.json").exists()
    with LiveView(console, []) as view:
        trainer = make_trainer(run, options=Options(resume=again), view=view)
        results = trainer.run()
    if trainer.interrupted:
        console.print("Interrupted. `make quickstart` goes on from here.")
        return 130
    console.print(final_table(read_records(run.output), console.width))
    held_out = json.loads((HERE / "openbookqa_held_out.jsonl").read_text().split("\n")[0])
    question, answer = (message["content"] for message in held_out["messages"])
    console.print(f"\n[bold]A question nobody was trained on[/bold]\n{escape(question)}")
    console.print(f"[dim]Expected: {escape(answer)}[/dim]")
    finished = {name: result.path for name, result in results.items() if result.state == "succeeded"}
    science = {name: path for name, path in finished.items() if name.startswith("science")}
    said = generate_answers(run.base, science, question, max_tokens=40)
    console.print(answer_panels(said))
    console.print(f"Report: {run.output / 'report.html'}", highlight=False, soft_wrap=True)
    return 0 if len(finished) == len(results) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"{error}")
