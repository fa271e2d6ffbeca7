"""Scores of adapters and of their base beside transformers with PEFT, and beside what training reported."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests import oracle
from tests.adapters.kinds.cases import write_start
from tests.base.folders import CHATML, model_folder, word_tokenizer
from tests.base.packs import CPU
from tests.cases import slow_but
from tests.families import tiny
from tests.generate.test_answers import adapter_folder, spoken_by_peft
from tests.outputs import jobs_folder, lines, status
from weftune import train
from weftune.base.spec import BaseSpec
from weftune.core.evaluation import REWARDS, Evaluation
from weftune.core.files import dump_yaml
from weftune.data.encode import Encoder
from weftune.data.prepare import prepare
from weftune.data.spec import DataSpec
from weftune.errors import AdapterError, DataError
from weftune.generate.answers import Answers
from weftune.generate.evaluate import EncodedRows, evaluate, microbatches

KINDS = ("lora", "dora", "ia3", "prompt", "prefix")
MESSAGES = [
    {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
    for asked, said in (("w10 w20 w30", "w11 w12"), ("w40", "w13 w14 w15 w16"), ("w50 w51", "w17"))
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": MESSAGES,
    "prompt_completion": [
        {"prompt": "w10 w20", "completion": " w30 w31"},
        {"prompt": "w9", "completion": "w8"},
    ],
    "text": [{"text": "w10 w20 w30 w40"}, {"text": "w50 w60"}],
    "tokens": [{"input_ids": [7, 8, 9, 10, 11], "labels": [7, -100, 9, 10, 11]}],
    "alpaca": [{"instruction": "w10", "input": "w11", "output": "w12 w13"}],
}


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def folders_of_kinds(folder: Path) -> dict[str, Path]:
    model = tiny("llama", torch.float32)
    return {kind: write_start(folder / kind, model, kind, "llama") for kind in KINDS}


def evaluated(base: Path, adapters: dict[str, Path], data: Path, **options: Any) -> Evaluation:
    return evaluate(Answers(BaseSpec(model=str(base)), adapters, CPU), adapters, str(data), **options)


def scores(found: Evaluation) -> dict[str, dict[str, float | None]]:
    return {one.adapter: dict(one.scores) for one in found.results}


def accuracy(model: torch.nn.Module, samples: Sequence[oracle.Sample]) -> tuple[float, int]:
    """The share of supervised tokens that are the likeliest ones, sample by sample, and their number."""
    correct = count = 0
    for tokens, mask in samples:
        with torch.no_grad():
            likeliest = model(input_ids=torch.tensor([tokens])).logits[0].argmax(-1).tolist()
        virtual = len(likeliest) - len(tokens)
        for at, (token, supervised) in enumerate(zip(tokens, mask, strict=True)):
            if supervised and at + virtual > 0:
                correct += likeliest[at + virtual - 1] == token
                count += 1
    return correct / count, count


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
@pytest.mark.parametrize("format", slow_but(ROWS, ["messages", "text", "tokens"]))
def test_scores_of_every_kind_in_shared_passes_equal_transformers_with_peft(
    format: str, tmp_path: Path
) -> None:
    base, data = model_folder(tmp_path / "base"), write_lines(tmp_path / "rows.jsonl", ROWS[format])
    adapters = folders_of_kinds(tmp_path)
    found = evaluated(base, adapters, data, max_tokens=0)
    assert [one.adapter for one in found.results] == ["base", *KINDS]
    prepared = prepare(DataSpec(path=str(data)), None, word_tokenizer(), tmp_path / "cache").train
    samples = [
        (prepared.tokens(index).tolist(), prepared.mask(index).tolist()) for index in range(len(prepared))
    ]
    for one in found.results:
        model = tiny("llama", torch.float32)
        if one.adapter != "base":
            model = PeftModel.from_pretrained(model, adapters[one.adapter]).eval()
        expected, (share, tokens) = oracle.mean_loss(model, samples), accuracy(model, samples)
        assert one.scores["loss"] == pytest.approx(expected, abs=1e-5), one.adapter
        assert one.scores["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
        assert one.scores["token_accuracy"] == pytest.approx(share)
        assert (one.rows, one.tokens) == (len(ROWS[format]), tokens)
        assert one.scores["exact_match"] is None
    losses = [one.scores["loss"] for one in found.results]
    assert len(set(losses)) == len(losses)


def test_adapters_together_have_the_scores_and_the_answers_that_each_has_alone(tmp_path: Path) -> None:
    base, data = model_folder(tmp_path / "base"), write_lines(tmp_path / "rows.jsonl", MESSAGES)
    adapters = folders_of_kinds(tmp_path)
    adapters["loud"] = adapter_folder(tmp_path / "loud", 1)
    together = evaluated(base, adapters, data, max_tokens=6)
    for name, folder in adapters.items():
        alone = evaluated(base, {name: folder}, data, max_tokens=6, with_base=False)
        assert list(scores(alone)) == [name]
        assert scores(alone)[name] == pytest.approx(scores(together)[name], rel=1e-6)
        assert [row.answers[name] for row in alone.answers] == [row.answers[name] for row in together.answers]


def test_exact_match_is_1_for_the_adapter_that_gives_the_expected_answers_and_0_for_another(
    tmp_path: Path,
) -> None:
    base = model_folder(tmp_path / "base")
    adapters = {f"job{seed}": adapter_folder(tmp_path / f"job{seed}", seed) for seed in (1, 2)}
    prompts = ["w10 w20 w30", "w40 w41"]
    rows = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": f" {said}  "}]}
        for prompt in prompts
        for said in [spoken_by_peft(base, adapters["job1"], prompt)]
    ]
    found = evaluated(base, adapters, write_lines(tmp_path / "rows.jsonl", rows), max_tokens=8)
    assert {name: own["exact_match"] for name, own in scores(found).items()} == {
        "base": 0.0,
        "job1": 1.0,
        "job2": 0.0,
    }
    assert found.best_adapter("exact_match") == "job1"
    for prompt, row in zip(prompts, found.answers, strict=True):
        assert row.prompt == ({"role": "user", "content": prompt},)
        assert row.answers["job2"] == spoken_by_peft(base, adapters["job2"], prompt)


@pytest.mark.parametrize("format", ["messages", "prompt_completion", "alpaca"])
def test_an_answer_is_generated_after_the_tokens_that_stand_before_it_in_training(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = model_folder(tmp_path / "base"), {"job": adapter_folder(tmp_path / "job", 1)}
    data = write_lines(tmp_path / "rows.jsonl", ROWS[format])
    answers = Answers(BaseSpec(model=str(base)), adapter, CPU)
    prompts: list[list[int]] = []
    ask = answers.complete_prompts

    def watched(asked: Sequence[tuple[str, Sequence[int]]], *words: Any, **more: Any) -> Any:
        prompts.extend(list(tokens) for _, tokens in asked)
        return ask(asked, *words, **more)

    monkeypatch.setattr(answers, "complete_prompts", watched)
    evaluate(answers, adapter, str(data), with_base=False, max_tokens=1)
    trained = prepare(DataSpec(path=str(data)), None, word_tokenizer(), tmp_path / "cache").train
    before = [
        tokens[: mask.argmax()].tolist() for tokens, mask in map(trained.tokens_and_mask, range(len(trained)))
    ]
    assert prompts == before


def test_a_completion_is_expected_after_its_prompt_without_a_template(tmp_path: Path) -> None:
    base, adapter = model_folder(tmp_path / "base"), adapter_folder(tmp_path / "job", 1)
    answers = Answers(BaseSpec(model=str(base)), {"job": adapter}, CPU)
    plain = answers.encode_prompt("job", "w10 w20", is_plain_text=True)
    (spoken,) = answers.complete_prompts([("job", plain)])
    rows = [{"prompt": "w10 w20", "completion": spoken.text}, {"prompt": "w10 w21", "completion": "w3"}]
    found = evaluated(base, {"job": adapter}, write_lines(tmp_path / "rows.jsonl", rows))
    assert scores(found)["job"]["exact_match"] == 0.5


def test_the_chosen_answers_of_preference_pairs_are_expected(tmp_path: Path) -> None:
    base, adapter = model_folder(tmp_path / "base"), {"job": adapter_folder(tmp_path / "job", 1)}
    pairs = [
        {
            "prompt": row["messages"][:1],
            "chosen": row["messages"][1:],
            "rejected": [{"role": "assistant", "content": "w60 w61 w62"}],
        }
        for row in MESSAGES
    ]
    of_pairs = evaluated(base, adapter, write_lines(tmp_path / "pairs.jsonl", pairs), max_tokens=4)
    of_chats = evaluated(base, adapter, write_lines(tmp_path / "chats.jsonl", MESSAGES), max_tokens=4)
    for name, own in scores(of_chats).items():
        assert scores(of_pairs)[name].items() >= own.items()
    assert [one.rows for one in of_pairs.results] == [3, 3]
    assert [row.expected for row in of_pairs.answers] == [row.expected for row in of_chats.answers]


def test_the_desirable_ones_of_labelled_answers_are_expected(tmp_path: Path) -> None:
    base, adapter = model_folder(tmp_path / "base"), {"job": adapter_folder(tmp_path / "job", 1)}
    good = [
        {"prompt": row["messages"][:1], "completion": row["messages"][1:], "label": True} for row in MESSAGES
    ]
    wrong = [{"role": "assistant", "content": "w60 w61 w62"}]
    bad = [{**row, "completion": wrong, "label": False} for row in good]
    labelled = [row for both in zip(bad, good, strict=True) for row in both]
    of_labelled = evaluated(base, adapter, write_lines(tmp_path / "labels.jsonl", labelled), max_tokens=4)
    of_chats = evaluated(base, adapter, write_lines(tmp_path / "chats.jsonl", MESSAGES), max_tokens=4)
    assert scores(of_labelled) == scores(of_chats)
    assert [one.rows for one in of_labelled.results] == [3, 3]
    assert [row.expected for row in of_labelled.answers] == [row.expected for row in of_chats.answers]
    with pytest.raises(DataError, match="none of its answers has the label true"):
        evaluated(base, adapter, write_lines(tmp_path / "bad.jsonl", bad), max_tokens=4)


def test_a_finished_job_has_the_loss_that_its_training_reported_for_its_held_out_rows(tmp_path: Path) -> None:
    """With other lengths, other supervised tokens, another template and virtual tokens in each job."""
    template = tmp_path / "loud.jinja"
    template.write_text(CHATML.replace("user", "system").replace("</s>", "w7 </s>"))
    held_out = write_lines(tmp_path / "held-out.jsonl", [{"dialogue": row["messages"]} for row in MESSAGES])
    data = {"path": str(held_out), "columns": {"messages": "dialogue"}}
    cases = {
        "lora": ({"rank": 2}, {}),
        "short": ({"rank": 3}, {"max_length": 10}),
        "all": ({"kind": "dora", "rank": 2}, {"train_on": "all"}),
        "loud": ({"rank": 2}, {"chat_template": str(template)}),
        "prefix": ({"kind": "prefix", "num_virtual_tokens": 3}, {}),
    }
    jobs = [
        {
            "name": name,
            "steps": 3,
            "adapter": adapter,
            "data": {**data, **keys},
            "eval": {"path": str(held_out)},
        }
        for name, (adapter, keys) in cases.items()
    ]
    folder = jobs_folder(tmp_path / "run", jobs)
    train(folder / "jobs.yaml", progress=False)
    template.unlink()
    adapters = {name: folder / "out" / name for name in cases}
    base = BaseSpec(model=str(folder / "model"), dtype="float64")
    found = evaluate(Answers(base, adapters, CPU), adapters, str(held_out), max_tokens=4)
    reported = status(folder / "out")["jobs"]
    for name in cases:
        assert scores(found)[name]["loss"] == pytest.approx(reported[name]["eval_loss"], rel=1e-9), name
    assert scores(found)["base"]["loss"] == pytest.approx(reported["lora"]["base_loss"], rel=1e-9)
    assert len({one.tokens for one in found.results}) == 4
    assert any("truncated to 10 tokens" in note for note in found.notes)


def test_rewards_of_pairs_are_those_that_training_reported(tmp_path: Path) -> None:
    """Each with the `beta` of its job, other lengths and virtual tokens; the reference policy is the base."""
    pairs = write_lines(
        tmp_path / "pairs.jsonl",
        [
            {"prompt": f"w{n} w20 ", "chosen": f"w{n + 1} w30 w{n + 2}", "rejected": f"w40 w{n} w41 w42"}
            for n in range(10, 18)
        ],
    )
    cases: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
        "lora": ({"rank": 2}, {}, 0.1),
        "short": ({"rank": 3}, {"max_length": 5}, 0.3),
        "prefix": ({"kind": "prefix", "num_virtual_tokens": 3}, {}, 0.7),
    }
    jobs = [
        {
            "name": name,
            "steps": 4,
            "adapter": adapter,
            "data": {"path": str(pairs), **keys},
            "eval": {"path": str(pairs)},
            "objective": {"kind": "dpo", "beta": beta},
        }
        for name, (adapter, keys, beta) in cases.items()
    ]
    folder = jobs_folder(tmp_path / "run", jobs)
    train(folder / "jobs.yaml", progress=False)
    reported = {line["job"]: line for line in lines(folder / "out") if "eval_loss" in line}
    adapters = {name: folder / "out" / name for name in cases}
    base = BaseSpec(model=str(folder / "model"), dtype="float64")
    for with_base in (True, False):
        found = evaluate(
            Answers(base, adapters, CPU), adapters, str(pairs), max_tokens=0, with_base=with_base
        )
        for name in cases:
            own = scores(found)[name]
            for metric in REWARDS:
                assert own[metric] == pytest.approx(reported[name][f"eval_{metric}"], rel=1e-8), name
        assert len({scores(found)[name]["rewards/margins"] for name in cases}) == 3
        if with_base:
            assert [scores(found)["base"][metric] for metric in REWARDS] == [None, None]
    assert found.best_adapter("rewards/margins") in cases


def test_samples_of_all_adapters_share_passes_and_a_long_one_has_its_own(tmp_path: Path) -> None:
    data = write_lines(
        tmp_path / "rows.jsonl", [{"text": " ".join(["w9"] * count)} for count in (3, 3, 30, 3)]
    )
    samples = prepare(DataSpec(path=str(data)), None, word_tokenizer(), tmp_path / "cache").train
    rows = EncodedRows(Encoder(word_tokenizer()), samples, 4, [])
    found = list(microbatches({"b": rows, "base": rows.for_base(), "a": rows}, max_rows=25))
    assert [segment.job for segment in found[0].segments] == ["a", "b", "base"]
    assert [segment.adapter_job for segment in found[0].segments] == ["a", "b", None]
    assert sum(len(one.sample_lengths) for one in found) == 12
    long = [one for one in found if max(one.sample_lengths) > 25]
    assert [len(one.sample_lengths) for one in long] == [1, 1, 1]
    assert all(one.rows <= 25 or len(one.sample_lengths) == 1 for one in found)


def test_a_prompt_longer_than_the_context_has_no_answer_and_does_not_stop_the_others(tmp_path: Path) -> None:
    base, adapter = model_folder(tmp_path / "base"), adapter_folder(tmp_path / "job", 1)
    context = tiny("llama", torch.float32).config.max_position_embeddings
    long = [
        {"role": "user", "content": "w10"},
        {"role": "assistant", "content": "w11"},
        {"role": "user", "content": " ".join(["w12"] * context)},
        {"role": "assistant", "content": "w13"},
    ]
    data = write_lines(tmp_path / "rows.jsonl", [*MESSAGES, {"messages": long}])
    found = evaluated(base, {"job": adapter}, data, max_tokens=2)
    assert len(found.answers) == 3
    assert found.results[0].rows == 4
    assert any("1 of 4 prompts are longer" in note for note in found.notes)


def test_a_row_that_cannot_be_read_is_a_sentence_with_its_location(tmp_path: Path) -> None:
    base, adapter = model_folder(tmp_path / "base"), adapter_folder(tmp_path / "job", 1)
    data = write_lines(tmp_path / "rows.jsonl", [*MESSAGES, {"messages": []}])
    with pytest.raises(DataError, match=r"rows\.jsonl:4: `messages` is empty"):
        evaluated(base, {"job": adapter}, data)


def test_bad_rows_are_left_out_of_losses_and_answers_if_asked_for_and_counted(tmp_path: Path) -> None:
    base, adapter = model_folder(tmp_path / "base"), adapter_folder(tmp_path / "job", 1)
    good = write_lines(tmp_path / "good.jsonl", MESSAGES)
    bad = tmp_path / "bad.jsonl"
    rows = [*map(json.dumps, MESSAGES[:1]), '{"messages": []}', "{", *map(json.dumps, MESSAGES[1:])]
    bad.write_text("".join(f"{row}\n" for row in rows))
    found = evaluated(base, {"job": adapter}, bad, max_tokens=4, skip_bad_rows=True)
    expected = evaluated(base, {"job": adapter}, good, max_tokens=4)
    assert scores(found) == scores(expected)
    assert [row.answers for row in found.answers] == [row.answers for row in expected.answers]
    assert [one.rows for one in found.results] == [3, 3]
    assert any("2" in note and "skipped" in note for note in found.notes), found.notes


def test_a_job_file_with_unknown_data_keys_is_a_sentence(tmp_path: Path) -> None:
    base, adapter = model_folder(tmp_path / "base"), adapter_folder(tmp_path / "job", 1)
    record = {"job": {"data": {"colour": "red"}}, "base": {"model": str(base)}}
    (adapter / "job.yaml").write_bytes(dump_yaml(record))
    data = write_lines(tmp_path / "rows.jsonl", MESSAGES)
    with pytest.raises(AdapterError, match="does not say how the adapter was trained to read rows"):
        evaluated(base, {"job": adapter}, data)
