"""`weftune generate` as a user types it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from rich.console import Console
from typer.testing import CliRunner

from tests.base.folders import model_folder
from tests.generate.test_answers import adapter_folder, spoken_by_peft
from weftune.base.load import select_device
from weftune.base.spec import BaseSpec
from weftune.cli.generate import answer_panels, chat_in_terminal, generate, recorded_base
from weftune.errors import AdapterError, UserError
from weftune.generate.answers import Answers, StreamedAnswer
from weftune.generate.sampling import Sampling


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(generate)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_base_and_adapter_are_shown_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    base = model_folder(tmp_path / "base")
    job = adapter_folder(tmp_path / "output" / "haiku", 1)
    record = {"job": {"name": "haiku"}, "base": {"model": str(base), "dtype": None, "revision": None}}
    (job / "job.yaml").write_text(yaml.safe_dump(record))
    with_adapter, alone = (spoken_by_peft(base, adapter, "w10 w20") for adapter in (job, None))
    shown = run(str(job), "w10 w20", "--against-base", "--max-tokens", "8", "--device", "cpu")
    assert "haiku" in shown
    assert with_adapter in shown
    assert alone in shown
    shown = run(str(job), "w10 w20", "--max-tokens", "8", "--device", "cpu")
    assert with_adapter in shown
    assert alone not in shown


def test_a_folder_that_holds_several_adapters_is_a_sentence_with_their_names(tmp_path: Path) -> None:
    for name in ("sql-lr2", "sql-lr1"):
        adapter_folder(tmp_path / "best" / name, 1)
    with pytest.raises(AdapterError, match=r"folders in it do: sql-lr1, sql-lr2; .*best/sql-lr1"):
        generate([str(tmp_path / "best"), "w10"])


def job_folder(place: Path, base: Path, name: str, seed: int) -> Path:
    """A finished job's folder: a random adapter, and the record of its base."""
    job = adapter_folder(place / name, seed)
    record = {"job": {"name": name}, "base": {"model": str(base), "dtype": None, "revision": None}}
    (job / "job.yaml").write_text(yaml.safe_dump(record))
    return job


def test_a_file_of_prompts_is_answered_by_every_adapter(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base")
    jobs = [job_folder(tmp_path / "output", base, name, seed) for seed, name in enumerate(("a", "b"))]
    chat = [{"role": "user", "content": "w30"}, {"role": "assistant", "content": "w31"}]
    rows = [{"prompt": "w10 w20"}, {"messages": chat}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "said.jsonl")]
    run(*map(str, jobs), *files, "--max-tokens", "8", "--device", "cpu")
    lines = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [(line["index"], line["adapter"]) for line in lines] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    for line in lines:
        prompt = "w10 w20" if line["index"] == 0 else "w30"
        expected = spoken_by_peft(base, tmp_path / "output" / line["adapter"], prompt)
        assert line["completion"].strip() == expected.strip()
        assert line["finish_reason"] in ("stop", "length")
        assert set(line) == {"index", "adapter", "completion", "finish_reason"}


STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A chat in a process that has a terminal."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "weftune", "generate", *words]
        self._pid, self._file = pty.fork()
        if self._pid == 0:
            os.execvpe(command[0], command, {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "30"})
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def wait_for(self, text: str) -> str:
        """Read until the text is shown; return what was shown up to there."""
        deadline = time.monotonic() + 60
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._file], [], [], 1.0)[0]:
                self.shown += STYLE.sub("", os.read(self._file, 65536).decode(errors="replace"))
        before, _, self.shown = self.shown.partition(text)
        return before

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


@pytest.mark.slow
def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_ends_the_chat(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100_000}))
    job = job_folder(tmp_path / "output", base, "a", 1)
    terminal = Terminal(str(job), "--max-tokens", "90000", "--device", "cpu")
    terminal.wait_for("Ctrl-C stops an answer, Ctrl-D ends the chat.")
    terminal.wait_for("> ")
    terminal.type("\n")
    terminal.wait_for("> ")
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D ends the chat.")
    terminal.wait_for("> ")
    for _ in range(2):
        terminal.type("w10 w20\n")
        terminal.wait_for("a ──")
        terminal.wait_for("w")
        terminal.type("\x03")
        assert "^C" in terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0


def test_an_answer_that_was_stopped_stays_in_the_chat_as_far_as_it_was_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = model_folder(tmp_path / "base")
    job = job_folder(tmp_path / "output", base, "a", 1)
    answers = Answers(BaseSpec(model=str(base)), {"a": job}, torch.device("cpu"))
    asked: list[str] = []
    ask = answers.complete_prompts

    def stopped(prompts: Any, sampling: Any, stop: Any, on_text: Any, stop_requested: Any) -> Any:
        """Press Ctrl-C after the third token of the first answer."""
        asked.append(answers.tokenizers["a"].decode(prompts[0][1]))

        def press(answer: StreamedAnswer, text: str) -> None:
            on_text(answer, text)
            if len(asked) == 1 and len(answer.generation.tokens) == 3:
                signal.raise_signal(signal.SIGINT)

        return ask(prompts, sampling, stop, press, stop_requested)

    monkeypatch.setattr(answers, "complete_prompts", stopped)
    monkeypatch.setattr("sys.stdin", StringIO("w10 w20\nw11\n"))
    console, before = Console(width=80), signal.getsignal(signal.SIGINT)
    with console.capture() as capture:
        chat_in_terminal(console, answers, ["a"], Sampling(max_tokens=8), (), None)
    three = spoken_by_peft(base, job, "w10 w20", 3)
    assert len(three.split()) == 3
    assert spoken_by_peft(base, job, "w10 w20", 8) not in capture.get()
    assert (
        asked[1].split()
        == f"<s> user w10 w20 </s> <s> assistant {three} </s> <s> user w11 </s> <s> assistant".split()
    )
    assert signal.getsignal(signal.SIGINT) is before


def test_a_question_for_which_there_is_no_room_leaves_no_trace_in_the_chat(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base")
    job = job_folder(tmp_path / "output", base, "a", 1)
    app = typer.Typer()
    app.command()(generate)
    typed = " ".join(["w10"] * 80) + "\nw10 w20\n"
    words = [str(job), "--max-tokens", "6", "--device", "cpu"]
    result = CliRunner().invoke(app, words, input=typed, catch_exceptions=False)
    assert result.exit_code == 0
    assert "and the base has 64 positions" in " ".join(result.output.split())
    assert spoken_by_peft(base, job, "w10 w20", 6) in result.output


def test_without_a_prompt_it_is_a_chat_that_remembers_its_answers(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base")
    job = job_folder(tmp_path / "output", base, "a", 1)
    app = typer.Typer()
    app.command()(generate)
    words = ["--max-tokens", "6", "--device", "cpu"]
    result = CliRunner().invoke(app, [str(job), *words], input="w10 w20\nw11\n", catch_exceptions=False)
    assert result.exit_code == 0
    first = spoken_by_peft(base, job, "w10 w20", 6)
    assert first in result.output
    second = spoken_by_peft(base, job, f"w10 w20 </s> <s> assistant {first} </s> <s> user w11", 6)
    assert second in result.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{job}", "other", "w10"], "other is no folder; write the folders of finished jobs"),
        (["{job}", "w10", "--prompts", "rows.jsonl"], "leave one of them out"),
        (["{job}", "w10", "--output", "said.jsonl"], "name a file of prompts"),
        (["{job}", "w10", "--plain", "--system", "w11"], "no place for --system"),
        (["{job}", "{stranger}", "w10"], "ask adapters of one base at a time"),
        (["{job}", "w10", "--top-p", "0"], "top_p cannot be 0"),
        (["{job}", "--prompts", "{bad}"], r"bad.jsonl:2: a row of prompts has a column"),
        (["{job}", "--prompts", "{empty}"], "holds no prompts"),
    ],
)
def test_a_mistake_is_a_sentence(words: list[str], sentence: str, tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base")
    places = {
        "job": job_folder(tmp_path / "output", base, "a", 1),
        "stranger": job_folder(tmp_path / "output", tmp_path / "elsewhere", "b", 1),
        "bad": tmp_path / "bad.jsonl",
        "empty": tmp_path / "empty.jsonl",
    }
    places["bad"].write_text('{"prompt": "w1"}\n{"question": "w1"}\n')
    places["empty"].write_text("")
    with pytest.raises(UserError, match=sentence):
        run(*(word.format(**places) for word in words), "--device", "cpu")


def test_brackets_in_an_answer_are_shown_as_they_are() -> None:
    console = Console(width=60)
    with console.capture() as capture:
        console.print(answer_panels({"[red]base": "[bold]no markup[/bold] [/]"}))
    assert "[bold]no markup[/bold] [/]" in capture.get()
    assert "[red]base" in capture.get()


def test_a_folder_without_a_job_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"it holds no job\.yaml"):
        recorded_base(tmp_path)
    for text in ("- a list", "base: demo", "{", "name: x"):
        (tmp_path / "job.yaml").write_text(text)
        with pytest.raises(AdapterError, match=r"job\.yaml cannot be used .*which base"):
            recorded_base(tmp_path)


def test_a_device_that_is_none_is_a_sentence() -> None:
    with pytest.raises(UserError, match="--device: gpu is no device"):
        select_device("gpu")
    assert select_device("cpu").type == "cpu"


def test_a_gpu_without_a_number_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's functions about memory refuse a device without an index."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert select_device("cuda") == select_device(None) == torch.device("cuda", 0)
    assert select_device("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert select_device("cuda") == select_device(None) == torch.device("cuda", 3)
