"""A sweep with PEFT: trials one after another in one process, or dealt to several that stay alive.

Who goes on from a rung is decided by `weftune.jobs.sweeps.halving`, as in Weftune's own sweeps, and a trial
whose training loss does not fall leaves by the same rule. PEFT is made as fast as it gets plainly: the base
is loaded once in a process; every trial is a named adapter that stays on the device with its optimizer, in
the base's dtype; AdamW is fused; batches are laid out once for all trials, without a mask where nothing is
padded; losses are read every ten steps. A trial goes to another process only where the deal is uneven.

    python -m benchmarks.peft_sweep TASK.json RESULT.json

With `probe_steps` nothing is searched: so many steps of every rank are timed, with as many processes at once
as the rungs of a sweep keep busy.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peft_train import Encoded, load_base, lora_config, padded, supervised_tokens
from weftune.core.clock import Phase, count_imports, phase, process_clock, use_clock
from weftune.jobs.sweeps.halving import LossTrend, Rungs, TrialEnd, rung_counts
from weftune.jobs.sweeps.spec import Halving, SweepSpec

READ_EVERY = 10
"""Steps between two looks at the losses: each makes the host wait for the device."""
WARMUP = 3
"""Steps before those that a probe times."""
EVAL_BATCH = 16
"""Held-out samples of a forward."""
PROBE = "probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftTrial:
    name: str
    rank: int
    alpha: float
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTask:
    model: str
    device: str
    dtype: str
    output: str
    processes: int
    rows: str
    held_out: str
    batches: list[list[int]]
    """For each step the rows of the file: the same for all trials."""
    rates: list[float]
    """For each step the share of a trial's learning rate."""
    clip: float
    weight_decay: float
    at: list[float]
    keep: float
    trials: list[PeftTrial]
    probe_steps: int | None = None

    @property
    def steps(self) -> int:
        return len(self.batches)

    @property
    def sweep(self) -> SweepSpec:
        halving = Halving(tuple(self.at), self.keep)
        return SweepSpec(over={}, search="random", trials=len(self.trials), halving=halving)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def read_task(path: Path) -> SweepTask:
    values = json.loads(path.read_text())
    return SweepTask(**{**values, "trials": [PeftTrial(**trial) for trial in values["trials"]]})


# -- what a sweep decides ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A trial at its limit, or where it ended before."""

    name: str
    step: int
    value: float | None = None
    """The loss on the held-out rows; none where it ended before its limit."""
    end: TrialEnd | None = None
    made: int = 0
    """Steps that were made for it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of a sweep."""

    decisions: tuple[tuple[str, ...], ...]
    """The trials that went on from each rung, the best first."""
    best: str | None
    best_loss: float | None
    trial_steps: int


Train = Callable[[Mapping[str, int]], Iterable[Outcome]]
"""Trains each trial up to a step and evaluates it there."""


def begun(spec: SweepSpec, trials: Sequence[str], steps: int) -> Rungs:
    rungs = Rungs(spec)
    rungs.begin_first_rung(trials)
    for trial in trials:
        rungs.add_trial(trial, steps)
    return rungs


def search(rungs: Rungs, train: Train) -> Found:
    """Rung after rung, until every trial has ended."""
    scores: dict[str, float | None] = {}
    made = 0
    while not rungs.is_over():
        for outcome in train(
            {name: rungs.step_limit(name) for name in rungs.trials if name not in rungs.ended_trials}
        ):
            made += outcome.made
            if outcome.end is not None:
                rungs.end_trial(outcome.name, outcome.end, outcome.step)
            elif outcome.step == rungs.steps(outcome.name):
                scores[outcome.name] = outcome.value
                rungs.end_trial(outcome.name, TrialEnd.FINISHED, outcome.step)
            else:
                rungs.record_metric(outcome.name, outcome.step, outcome.value)
        while pending := rungs.pending_decisions():
            for decision in pending:
                rungs.apply_decision(decision)
    best = next(iter(rungs.ranking(scores)), None)
    return Found(
        decisions=tuple(decision.kept for decision in rungs.decisions),
        best=best,
        best_loss=None if best is None else scores[best],
        trial_steps=made,
    )


def dealt(trials: Sequence[str], homes: Mapping[str, int], processes: int) -> list[list[str]]:
    """As many trials to each process as to any other; one stays where it is unless there are too many."""
    most, larger = divmod(len(trials), processes)
    shares: list[list[str]] = [[] for _ in range(processes)]
    rest = []
    for trial in trials:
        home = homes.get(trial)
        sizes = [len(share) for share in shares]
        full = home is None or sizes[home] > most or (sizes[home] == most and _above(sizes, most) == larger)
        (rest if full else shares[home or 0]).append(trial)
    for trial in rest:
        min(shares, key=len).append(trial)
    return shares


def _above(sizes: Sequence[int], most: int) -> int:
    return sum(size > most for size in sizes)


# -- one process ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Held:
    """A trial in a process: its named adapter, and what goes on with it."""

    adapter: str
    parameters: list[Any]
    optimizer: Any
    trend: LossTrend
    step: int = 0


class PeftProcess:
    """The base, the rows, and the trials that were begun here."""

    def __init__(self, task: SweepTask) -> None:
        with count_imports():
            import torch
            import transformers  # noqa: F401
            from peft import get_peft_model  # noqa: F401
        self.task = task
        self.trials = {trial.name: trial for trial in task.trials}
        self.held: dict[str, Held] = {}
        with phase(Phase.LOADING):
            self.base = load_base(task.model, task.device, task.dtype)
            self.model: Any = None
        with phase(Phase.TOKENISING):
            self.rows, held_out = (_samples(Path(path)) for path in (task.rows, task.held_out))
            starts = range(0, len(held_out), EVAL_BATCH)
            self.held_out = [_laid_out(held_out[at : at + EVAL_BATCH], task.device) for at in starts]
            self.supervised = [supervised_tokens(held_out[at : at + EVAL_BATCH]) for at in starts]
        self.batches: dict[int, dict[str, Any]] = {}
        self.synchronize = torch.cuda.synchronize if task.device != "cpu" else lambda: None

    # -- asked by whoever leads ---------------------------------------------------------------------------

    def train(self, limits: Mapping[str, int]) -> list[Outcome]:
        return [self.train_trial(name, limit) for name, limit in limits.items()]

    def train_trial(self, name: str, limit: int) -> Outcome:
        if name not in self.held:
            self.begin(name, self.trials[name])
        held = self.held[name]
        self.model.set_adapter(held.adapter)
        first = held.step
        while held.step < limit:
            until = min(limit, held.step + READ_EVERY)
            losses = [
                self.make_step(held, step, self.trials[name]) for step in range(held.step + 1, until + 1)
            ]
            if (ended := self._read(name, held, losses)) is not None:
                return Outcome(name=name, step=ended[1], end=ended[0], made=held.step - first)
        return Outcome(name=name, step=limit, value=self.evaluate(), made=held.step - first)

    def hand_over(self, name: str, path: str) -> None:
        import torch
        from peft import get_peft_model_state_dict

        held = self.held.pop(name)
        weights = get_peft_model_state_dict(self.model, adapter_name=held.adapter)
        torch.save((weights, held.optimizer.state_dict(), held.trend, held.step), path)

    def take_over(self, name: str, path: str) -> None:
        import torch
        from peft import set_peft_model_state_dict

        weights, optimizer, trend, step = torch.load(path, map_location=self.task.device, weights_only=False)
        self.begin(name, self.trials[name])
        held = self.held[name]
        set_peft_model_state_dict(self.model, weights, adapter_name=held.adapter)
        held.optimizer.load_state_dict(optimizer)
        held.trend, held.step = trend, step

    def save(self, name: str, folder: str) -> None:
        held = self.held[name]
        self.model.save_pretrained(folder, selected_adapters=[held.adapter])

    def probe(self, ranks: Sequence[int], steps: int) -> dict[str, Any]:
        """Seconds of a step of every rank, of an evaluation, and of what a trial needs to begin."""
        found: dict[str, Any] = {"steps": {}, "evaluations": [], "begins": []}
        for rank in ranks:
            trial = PeftTrial(name=PROBE, rank=rank, alpha=2 * rank, learning_rate=1e-4)
            found["begins"].append(self._timed(lambda trial=trial: self.begin(PROBE, trial)))
            held = self.held[PROBE]
            self.model.set_adapter(held.adapter)
            for step in range(1, WARMUP + 1):
                self.make_step(held, step, trial)
            made = range(WARMUP + 1, WARMUP + steps + 1)
            seconds = self._timed(lambda made=made, trial=trial: self._make_steps(made, trial))
            found["steps"][str(rank)] = seconds / steps
            self.evaluate()
            found["evaluations"].append(self._timed(self.evaluate))
        return found

    def peak_bytes(self) -> int | None:
        import torch

        return torch.cuda.max_memory_allocated() if self.task.device != "cpu" else None

    # -- how ----------------------------------------------------------------------------------------------

    def begin(self, name: str, trial: PeftTrial) -> None:
        import torch

        # Names of modules have no dots, those of trials may.
        adapter = f"trial{0 if self.model is None else len(self.model.peft_config)}"
        # Its weights are drawn where they will be.
        with torch.device(self.task.device):
            self._add(adapter, lora_config(trial.rank, trial.alpha))
        self.model.set_adapter(adapter)
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(
            parameters, lr=trial.learning_rate, weight_decay=self.task.weight_decay, fused=True
        )
        self.held[name] = Held(adapter, parameters, optimizer, LossTrend(self.task.steps))

    def _add(self, adapter: str, config: Any) -> None:
        from peft import get_peft_model

        if self.model is not None:
            self.model.add_adapter(adapter, config, autocast_adapter_dtype=False)
            return
        self.model = get_peft_model(
            self.base, config, adapter_name=adapter, autocast_adapter_dtype=False
        ).train()

    def make_step(self, held: Held, step: int, trial: PeftTrial) -> Any:
        import torch

        at = (step - 1) % self.task.steps
        for group in held.optimizer.param_groups:
            group["lr"] = trial.learning_rate * self.task.rates[at]
        loss = self.model(**self._batch(at)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(held.parameters, self.task.clip)
        held.optimizer.step()
        held.optimizer.zero_grad()
        held.step = step
        return loss.detach()

    def _make_steps(self, steps: Iterable[int], trial: PeftTrial) -> None:
        """As a trial makes them: now and then the losses are read."""
        losses = []
        for step in steps:
            losses.append(self.make_step(self.held[trial.name], step, trial))
            if len(losses) == READ_EVERY:
                _values(losses)
                losses = []

    def _batch(self, at: int) -> dict[str, Any]:
        if at not in self.batches:
            samples = [self.rows[row] for row in self.task.batches[at]]
            self.batches[at] = _laid_out(samples, self.task.device)
        return self.batches[at]

    def _read(self, name: str, held: Held, losses: Sequence[Any]) -> tuple[TrialEnd, int] | None:
        """Whether the trial ends by these losses, and at which step."""
        values = _values(losses)
        for step, loss in enumerate(values, start=held.step - len(values) + 1):
            if not math.isfinite(loss):
                return TrialEnd.FAILED, step
            held.trend.add_loss(step, loss)
            if held.trend.leave_reason() is not None:
                return TrialEnd.LEFT, step
        return None

    def evaluate(self) -> float:
        import torch

        with torch.no_grad():
            losses = [self.model(**batch).loss for batch in self.held_out]
        whole = zip(_values(losses), self.supervised, strict=True)
        return math.fsum(loss * tokens for loss, tokens in whole) / sum(self.supervised)

    def _timed(self, act: Callable[[], object]) -> float:
        self.synchronize()
        began = time.perf_counter()
        act()
        self.synchronize()
        return time.perf_counter() - began


def _samples(path: Path) -> list[Encoded]:
    rows = [json.loads(line) for line in path.read_text().split("\n") if line]
    return [Encoded(row["input_ids"], row["labels"]) for row in rows]


def _laid_out(samples: Sequence[Encoded], device: str) -> dict[str, Any]:
    batch = padded(samples, device)
    if len({len(one.tokens) for one in samples}) == 1:
        del batch["attention_mask"]
    return batch


def _values(losses: Sequence[Any]) -> list[float]:
    import torch

    found: list[float] = torch.stack(list(losses)).tolist()
    return found


# -- processes ---------------------------------------------------------------------------------------------


class Worker(Protocol):
    """A PeftProcess that is asked first and answers later."""

    def ask(self, method: str, *arguments: Any) -> None: ...

    def answer(self) -> Any: ...


class Here:
    """This process; it answers when it is asked."""

    def __init__(self, task: SweepTask) -> None:
        self._process = PeftProcess(task)
        self._answer: Any = None

    def ask(self, method: str, *arguments: Any) -> None:
        self._answer = getattr(self._process, method)(*arguments)

    def answer(self) -> Any:
        return self._answer


class Apart:
    """A process of its own. One that dies ends the measurement with an EOFError."""

    def __init__(self, task: SweepTask) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(task, other), daemon=True)
        self._process.start()
        other.close()

    def ask(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        return self._pipe.recv()

    def end(self) -> None:
        self._pipe.close()
        self._process.join()


def serve(task: SweepTask, pipe: Any) -> None:
    """Load, say so, then answer until nobody asks any more."""
    if task.device == "cpu":
        import torch

        torch.set_num_threads(1)
    process = PeftProcess(task)
    pipe.send(None)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(process, method)(*arguments))


@dataclass(slots=True)
class Workers:
    """All processes, and which trial is where."""

    all: Sequence[Worker]
    folder: Path
    homes: dict[str, int] = field(default_factory=dict)

    def train(self, limits: Mapping[str, int]) -> list[Outcome]:
        shares = dealt(list(limits), self.homes, len(self.all))
        self._move(shares)
        busy = [
            (worker, {name: limits[name] for name in share})
            for worker, share in zip(self.all, shares, strict=True)
            if share
        ]
        for worker, share in busy:
            worker.ask("train", share)
        return [outcome for worker, _ in busy for outcome in worker.answer()]

    def _move(self, shares: Sequence[Sequence[str]]) -> None:
        places = {name: place for place, share in enumerate(shares) for name in share}
        for name, place in places.items():
            home = self.homes.get(name, place)
            if home != place:
                path = str(self.folder / f"{len(self.homes)}-{place}.pt")
                for at, method in ((home, "hand_over"), (place, "take_over")):
                    self.all[at].ask(method, name, path)
                    self.all[at].answer()
                Path(path).unlink()
        self.homes |= places

    def save(self, name: str, folder: Path) -> None:
        worker = self.all[self.homes.get(name, 0)]
        worker.ask("save", name, str(folder))
        worker.answer()

    def probe(self, count: int, ranks: Sequence[int], steps: int) -> dict[str, Any]:
        """The means of `count` processes that do the same at once."""
        for worker in self.all[:count]:
            worker.ask("probe", ranks, steps)
        answers = [worker.answer() for worker in self.all[:count]]
        return {
            "steps": {
                str(rank): statistics.mean(one["steps"][str(rank)] for one in answers) for rank in ranks
            },
            "evaluation": statistics.mean(value for one in answers for value in one["evaluations"]),
            "begin": statistics.mean(value for one in answers for value in one["begins"]),
        }

    def peak_bytes(self) -> int | None:
        for worker in self.all:
            worker.ask("peak_bytes")
        return sum(worker.answer() or 0 for worker in self.all) or None


# -- the command -------------------------------------------------------------------------------------------


def started(task: SweepTask) -> Sequence[Worker]:
    if task.processes == 1:
        return [Here(task)]
    with phase(Phase.LOADING):
        workers = [Apart(task) for _ in range(task.processes)]
        for worker in workers:
            worker.answer()
    return workers


def run(task: SweepTask) -> dict[str, Any]:
    output = Path(task.output)
    output.mkdir(parents=True, exist_ok=True)
    workers = Workers(started(task), output)
    if task.probe_steps is None:
        with phase(Phase.TRAINING):
            found = search(
                begun(task.sweep, [trial.name for trial in task.trials], task.steps), workers.train
            )
        best, told = found.best, asdict(found)
    else:
        with phase(Phase.TRAINING):
            best, told = PROBE, {"probes": probes(task, workers)}
    with phase(Phase.EXPORT) if best else nullcontext():
        if best:
            workers.save(best, output / "best")
    told |= {"peak_bytes": workers.peak_bytes()}
    for worker in workers.all:
        if isinstance(worker, Apart):
            worker.end()
    return told


def probes(task: SweepTask, workers: Workers) -> dict[str, Any]:
    """Number of processes at once → what they measured."""
    assert task.probe_steps is not None
    ranks = sorted({trial.rank for trial in task.trials})
    return {str(count): workers.probe(count, ranks, task.probe_steps) for count in busy_processes(task)}


def busy_processes(task: SweepTask) -> list[int]:
    """How many processes have a trial at each rung, each number once, the largest first."""
    return sorted({min(task.processes, count) for count in rung_counts(task.sweep)}, reverse=True)


def main() -> None:
    with use_clock(process_clock()) as clock:
        told = run(read_task(Path(sys.argv[1])))
        told |= {"phases": clock.read().phases}
    Path(sys.argv[2]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
