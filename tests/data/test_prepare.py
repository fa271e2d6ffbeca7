from __future__ import annotations

import json
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from tests.data import families
from weftune.data import prepare as prepare_module
from weftune.data.encode import Encoder
from weftune.data.prepare import SharedData, _hash_threshold, _source_label, check_rows, prepare
from weftune.data.samples import SampleOrder
from weftune.data.spec import DataSpec, EvalSpec, Source
from weftune.errors import DataError

ROWS = [{"text": f"the cat sat on mat {n}"} for n in range(200)]


def texts(samples, tokenizer) -> list[str]:
    return [tokenizer.decode(samples.tokens(i)[:-1].tolist()) for i in range(len(samples))]


def test_truncated_rows_are_counted(gpt2, tmp_path):
    rows = [{"text": "cat " * 40}, {"text": "cat"}, {"text": "cat " * 50}]
    prepared = prepare(DataSpec(rows=rows, max_length=16), None, gpt2, tmp_path)
    assert prepared.notes == ("2 of 3 rows were truncated to 16 tokens.",)
    assert prepared.train.lengths.tolist() == [16, len(gpt2("cat").input_ids) + 1, 16]
    assert prepared.train.supervised.tolist() == [n - 1 for n in prepared.train.lengths]
    assert prepared.train.lengths.dtype == prepared.train.supervised.dtype == np.int32


@pytest.mark.parametrize("given", [{"max_length": 6}, {"max_length": 7}, {"max_length": 8}, {"context": 7}])
def test_a_row_of_exactly_max_length_is_neither_cut_nor_counted(given, gpt2, tmp_path):
    row = {"input_ids": [5, 6, 7, 8, 9, 10, 11]}
    spec = DataSpec(rows=[row], max_length=given.get("max_length", 100))
    prepared = prepare(spec, None, gpt2, tmp_path, context=given.get("context"))
    kept = row["input_ids"][: given.get("max_length", 7)]
    assert prepared.train.tokens(0).tolist() == kept
    cut = ("1 of 1 rows were truncated to 6 tokens.",)
    assert prepared.notes == (cut if len(kept) < 7 else ())


@pytest.mark.parametrize("form", ["chat", "text", "pair"])
def test_max_length_counts_every_token_of_a_row_of_any_form(form, smollm2, tmp_path):
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "yes there"}]
    row = {
        "chat": {"messages": chat},
        "text": {"text": "yes there"},
        "pair": {"prompt": "Hello", "completion": " there yes"},
    }[form]
    whole = prepare(DataSpec(rows=[row]), None, smollm2, tmp_path).train.tokens(0).tolist()
    for more in (-1, 0, 1):
        prepared = prepare(DataSpec(rows=[row], max_length=len(whole) + more), None, smollm2, tmp_path)
        assert prepared.train.tokens(0).tolist() == whole[: len(whole) + more]
        assert len(prepared.notes) == (more < 0)


def test_the_bases_context_shortens_samples_too(gpt2, tmp_path):
    prepared = prepare(DataSpec(rows=[{"text": "cat " * 40}]), None, gpt2, tmp_path, context=9)
    assert prepared.train.lengths.tolist() == [9]


def test_the_second_time_the_cache_is_read_and_says_the_same(gpt2, tmp_path):
    spec = DataSpec(rows=[{"text": "cat " * 40}, {"text": 5}], max_length=8, skip_bad_rows=True)
    seen: list[int] = []
    first = prepare(spec, None, gpt2, tmp_path, progress=seen.append)
    assert seen == [2]
    second = prepare(spec, None, gpt2, tmp_path, progress=seen.append)
    assert seen == [2]
    assert second.notes == first.notes
    assert len(first.notes) == 2
    assert second.train.fingerprint == first.train.fingerprint
    assert second.train.tokens(0).tolist() == first.train.tokens(0).tolist()


def test_the_fingerprint_is_the_datas_and_not_the_paths(gpt2, tmp_path, write_lines):
    one, two = write_lines(ROWS[:5], "one.jsonl"), write_lines(ROWS[:5], "two.jsonl")
    prints = [
        prepare(DataSpec(path=str(path)), None, gpt2, tmp_path / "c").train.fingerprint for path in (one, two)
    ]
    assert prints[0] == prints[1]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": ROWS[:4]},
        {"max_length": 4},
        {"train_on": "all"},
        {"limit": 3},
        {"format": "auto", "columns": {"messages": "chat"}},
    ],
)
def test_what_matters_changes_the_fingerprint(change, gpt2, tmp_path):
    plain = prepare(DataSpec(rows=ROWS[:5]), None, gpt2, tmp_path).train.fingerprint
    assert prepare(DataSpec(**{"rows": ROWS[:5], **change}), None, gpt2, tmp_path).train.fingerprint != plain


def test_another_tokenizer_or_template_changes_the_fingerprint(gpt2, smollm2, tmp_path):
    spec = DataSpec(rows=ROWS[:5])
    other = families.smollm2()
    other.chat_template = families.QWEN25
    prints = {prepare(spec, None, made, tmp_path).train.fingerprint for made in (gpt2, smollm2, other)}
    assert len(prints) == 3
    smollm2("a", truncation=True, max_length=4, padding="max_length")
    assert prepare(spec, None, smollm2, tmp_path).train.fingerprint in prints


def test_a_fraction_splits_by_the_row_and_not_by_the_job(gpt2, tmp_path):
    def split(rows, **spec):
        prepared = prepare(DataSpec(rows=rows, **spec), EvalSpec(fraction=0.2), gpt2, tmp_path)
        return set(texts(prepared.train, gpt2)), set(texts(prepared.evaluation, gpt2))

    train, held_out = split(ROWS)
    assert train | held_out == {row["text"] for row in ROWS}
    assert not train & held_out
    assert 20 <= len(held_out) <= 60
    assert split(ROWS[::-1]) == (train, held_out)
    assert split(ROWS, train_on="all", max_length=100) == (train, held_out)
    _, half = split(ROWS[:100])
    assert half == {row["text"] for row in ROWS[:100]} & held_out


def test_equal_rows_fall_on_one_side(gpt2, tmp_path):
    prepared = prepare(DataSpec(rows=ROWS * 2), EvalSpec(fraction=0.5), gpt2, tmp_path)
    assert not set(texts(prepared.train, gpt2)) & set(texts(prepared.evaluation, gpt2))


@pytest.mark.parametrize("fraction", [1e-9, 0.999999999])
def test_a_split_leaves_no_side_empty(fraction, gpt2, tmp_path):
    prepared = prepare(DataSpec(rows=ROWS[:3]), EvalSpec(fraction=fraction), gpt2, tmp_path)
    assert sorted([len(prepared.train), len(prepared.evaluation)]) == [1, 2]
    with pytest.raises(DataError, match="one row cannot be split"):
        prepare(DataSpec(rows=ROWS[:1] * 3), EvalSpec(fraction=fraction), gpt2, tmp_path)


def test_an_evaluation_whose_rows_are_all_trained_on_is_known(gpt2, tmp_path, write_lines):
    train = write_lines(ROWS[:20], "train.jsonl")
    for name, rows, is_known in (
        ("copy", ROWS[:20], True),
        ("part", ROWS[5:9], True),
        ("more", ROWS[15:25], False),
    ):
        held_out = EvalSpec(path=str(write_lines(rows, f"{name}.jsonl")))
        found = prepare(DataSpec(path=str(train)), held_out, gpt2, tmp_path / "cache")
        assert found.evaluates_training_rows is is_known, name
        assert found.add_prefix(3, 0).evaluates_training_rows is is_known
    split = prepare(DataSpec(path=str(train)), EvalSpec(fraction=0.2), gpt2, tmp_path / "cache")
    assert not split.evaluates_training_rows


def test_an_evaluation_file_is_read_with_the_same_settings(gpt2, tmp_path, write_lines):
    path = write_lines([{"prompt": "a", "completion": "the cat"}], "held.jsonl")
    spec = DataSpec(rows=ROWS[:2], max_length=4)
    prepared = prepare(spec, EvalSpec(path=str(path)), gpt2, tmp_path / "cache")
    assert (len(prepared.train), len(prepared.evaluation)) == (2, 1)
    assert prepared.evaluation.mask(0).tolist()[0] is False


def test_mistakes_of_both_files_are_told_at_once(gpt2, tmp_path, write_lines):
    one, two = write_lines([{"text": "a"}, {"text": 1}], "one.jsonl"), write_lines(["{"], "two.jsonl")
    with pytest.raises(DataError) as error:
        prepare(DataSpec(path=str(one)), EvalSpec(path=str(two)), gpt2, tmp_path / "cache")
    assert [mistake.location for mistake in error.value.mistakes] == ["one.jsonl:2", "two.jsonl:1"]


def test_a_mixture_stands_behind_one_index_with_its_weights(gpt2, tmp_path, write_lines):
    one, two = write_lines(ROWS[:4], "one.jsonl"), write_lines(ROWS[4:10], "two.jsonl")
    sources = (Source(path=str(one), weight=2), Source(path=str(two), weight=0.5))
    samples = prepare(DataSpec(path=sources), None, gpt2, tmp_path / "cache").train
    assert texts(samples, gpt2) == [row["text"] for row in ROWS[:10]]
    assert samples.weights.tolist() == [2.0] * 4 + [0.5] * 6
    order = SampleOrder(len(samples), 100, 0, samples.weights)
    assert np.bincount(order.batch(1), minlength=10)[:4].tolist() == [2] * 4
    assert len(order.batch(1)) == 11
    even = prepare(
        DataSpec(path=(Source(path=str(one)), Source(path=str(two)))), None, gpt2, tmp_path / "cache"
    )
    assert even.train.weights is None
    assert even.train.fingerprint != samples.fingerprint
    with pytest.raises(IndexError):
        samples.tokens(10)


def test_files_of_one_name_are_told_apart_by_their_paths(gpt2, tmp_path):
    sources = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
        sources.append(Source(path=str(tmp_path / folder / "rows.jsonl")))
    with pytest.raises(DataError) as error:
        prepare(DataSpec(path=tuple(sources)), None, gpt2, tmp_path / "cache")
    assert [mistake.location for mistake in error.value.mistakes] == [
        f"{source.path}:2" for source in sources
    ]


@pytest.mark.parametrize(
    ("data", "evaluation", "sentence"),
    [
        ({}, None, "give either a path or rows"),
        ({"rows": ROWS, "limit": 0}, None, r"data\.limit: must be at least 1"),
        ({"rows": ROWS, "max_length": 1}, None, r"data\.max_length: must be at least 2"),
        ({"rows": ROWS, "split": "train"}, None, r"data\.split: a single file"),
        ({"path": (Source(path="a", weight=0),)}, None, "weight must be above 0"),
        ({"path": (Source(path="a", weight=float("inf")),)}, None, "weight must be above 0"),
        ({"rows": ROWS}, EvalSpec(fraction=1.0), "must lie between 0 and 1"),
        ({"rows": ROWS}, EvalSpec(), "either a path or a fraction"),
    ],
)
def test_a_spec_that_cannot_be_is_a_sentence(data, evaluation, sentence, gpt2, tmp_path):
    with pytest.raises(DataError, match=sentence):
        prepare(DataSpec(**data), evaluation, gpt2, tmp_path)


def test_a_slow_tokenizer_is_refused_with_a_sentence(tmp_path):
    class Slow:
        is_fast = False

    with pytest.raises(DataError, match="needs a fast tokenizer"):
        prepare(DataSpec(rows=ROWS), None, Slow(), tmp_path)


@pytest.mark.slow
def test_a_dataset_is_never_in_memory_as_a_whole(gpt2, tmp_path):
    path = tmp_path / "large.jsonl"
    size = 60_000_000
    line = json.dumps({"text": "the cat sat on the mat " * 50, "notes": "x" * 60_000}) + "\n"
    with path.open("w") as file:
        for _ in range(size // len(line)):
            file.write(line)
    tracemalloc.start()
    samples = prepare(DataSpec(path=str(path), max_length=4096), None, gpt2, tmp_path / "cache").train
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(samples) == size // len(line)
    assert peak < size / 4


def named(tokenizer) -> Encoder:
    """An encoder whose fingerprint is no matter of the installed libraries."""
    encoder = Encoder(tokenizer)
    encoder.__dict__["fingerprint"] = "a tokenizer"
    return encoder


def test_fingerprints_and_the_rows_held_out_never_change(gpt2, tmp_path, write_lines):
    """A run that goes on under a later release must find its samples; raise build.VERSION otherwise."""
    path, encoder = write_lines(ROWS[:20]), named(gpt2)
    given = prepare(DataSpec(rows=ROWS[:20]), EvalSpec(fraction=0.2), encoder, tmp_path / "cache")
    assert given.train.fingerprint == "a9758a407f846118d1e0fbe36711e3cd"
    assert given.evaluation.fingerprint == "b3baffae551885055aca654dcbbb3819"
    assert texts(given.evaluation, gpt2) == [
        "the cat sat on mat 6",
        "the cat sat on mat 8",
        "the cat sat on mat 14",
    ]
    read = prepare(DataSpec(path=str(path)), EvalSpec(path=str(path)), encoder, tmp_path / "cache")
    assert read.train.fingerprint == read.evaluation.fingerprint == "ae4b79f675676b664fca9329f56def08"
    assert read.evaluation.weights is None


def test_two_different_rows_can_be_split_and_each_side_has_one(gpt2, tmp_path):
    prepared = prepare(DataSpec(rows=ROWS[:2] * 2), EvalSpec(fraction=0.5), gpt2, tmp_path)
    assert (len(prepared.train), len(prepared.evaluation)) == (2, 2)


def test_weights_are_those_of_training_on_both_sides_of_a_split(gpt2, tmp_path, write_lines):
    one, two = write_lines(ROWS[:9], "one.jsonl"), write_lines(ROWS[9:20], "two.jsonl")
    sources = (Source(path=str(one), weight=2), Source(path=str(two)))
    prepared = prepare(DataSpec(path=sources), EvalSpec(fraction=0.5), gpt2, tmp_path / "cache")
    assert set(prepared.train.weights.tolist()) == {1.0, 2.0}
    assert prepared.evaluation.weights is None
    assert prepared.train.fingerprint != prepared.evaluation.fingerprint


def test_notes_name_the_file_where_there_are_several_and_progress_counts_through_all(
    gpt2, tmp_path, write_lines
):
    long = [{"text": "cat " * 40}]
    one, two = write_lines(ROWS[:2] + long, "one.jsonl"), write_lines(long * 2, "two.jsonl")
    seen: list[int] = []
    prepared = prepare(
        *(DataSpec(path=str(one), max_length=16), EvalSpec(path=str(two)), gpt2, tmp_path / "cache"),
        progress=seen.append,
    )
    assert prepared.notes == (
        "1 of 3 rows of one.jsonl were truncated to 16 tokens.",
        "2 of 2 rows of two.jsonl were truncated to 16 tokens.",
    )
    assert seen == [3, 5]


def test_a_file_of_the_same_name_beside_the_training_file_is_told_by_its_path(gpt2, tmp_path, write_lines):
    one = write_lines(ROWS[:2], "rows.jsonl")
    (tmp_path / "held").mkdir()
    two = write_lines([{"text": 1}], "held/rows.jsonl")
    with pytest.raises(DataError) as error:
        prepare(DataSpec(path=str(one)), EvalSpec(path=str(two)), gpt2, tmp_path / "cache")
    assert [mistake.location for mistake in error.value.mistakes] == [f"{two}:1"]


def test_what_is_in_the_cache_is_known_to_be_prepared_with_its_evaluation(gpt2, tmp_path, write_lines):
    one, two = write_lines(ROWS[:2], "one.jsonl"), write_lines(ROWS[2:4], "two.jsonl")
    spec, cache = DataSpec(path=str(one)), tmp_path / "cache"
    prepare(spec, None, gpt2, cache)
    assert SharedData(gpt2, cache).is_prepared(spec, None)
    assert SharedData(gpt2, cache).is_prepared(spec, EvalSpec(fraction=0.5))
    assert not SharedData(gpt2, cache).is_prepared(spec, EvalSpec(path=str(two)))
    assert not SharedData(gpt2, cache, 3).is_prepared(spec, None)
    prepare(spec, EvalSpec(path=str(two)), gpt2, cache)
    assert SharedData(gpt2, cache).is_prepared(spec, EvalSpec(path=str(two)))


def test_rows_can_be_checked_before_there_is_a_tokenizer(write_lines, tmp_path):
    one = write_lines([{"text": "a"}, {"text": 1}], "one.jsonl")
    two = write_lines([{"text": "a"}, {"text": 2}], "two.jsonl")
    sound = write_lines([{"text": "a"}], "sound.jsonl")

    def places(data: DataSpec, evaluation: EvalSpec | None = None, max_bytes: int = 1000) -> list[str]:
        try:
            check_rows(data, evaluation, max_bytes)
        except DataError as error:
            return [mistake.location for mistake in error.mistakes]
        return []

    mixture = (Source(path=str(one)), Source(path=str(sound)))
    assert places(DataSpec(path=mixture), EvalSpec(path=str(two))) == ["one.jsonl:2", "two.jsonl:2"]
    assert places(DataSpec(path=str(sound)), EvalSpec(fraction=0.5)) == []
    assert places(DataSpec(path=str(one), skip_bad_rows=True)) == []
    assert places(DataSpec(path=str(one)), max_bytes=one.stat().st_size) == ["one.jsonl:2"]
    assert places(DataSpec(path=str(one)), max_bytes=one.stat().st_size - 1) == []
    assert places(DataSpec(path=(Source(path="a/dataset"), Source(path=str(one))))) == ["one.jsonl:2"]
    assert places(DataSpec(rows=[{"text": 1}]), EvalSpec(path=str(two))) == ["two.jsonl:2"]
    assert places(DataSpec(path=(Source(path=str(one)), Source(path=str(one))))) == [f"{one}:2"]
    assert places(DataSpec(path=str(sound), limit=0)) == ["data.limit"]


@pytest.mark.parametrize(
    ("data", "evaluation", "sentence"),
    [
        ({"rows": ROWS, "path": "a"}, None, "data: give either a path or rows"),
        ({"path": (Source(path="a", weight=-1.0),)}, None, "its weight must be above 0 and finite, got -1.0"),
        ({"rows": ROWS}, EvalSpec(fraction=0.0), "must lie between 0 and 1, got 0.0"),
        ({"rows": ROWS}, EvalSpec(path="a", fraction=0.5), "eval: give either a path or a fraction"),
    ],
)
def test_a_choice_too_many_or_out_of_bounds_is_a_sentence(data, evaluation, sentence, gpt2, tmp_path):
    with pytest.raises(DataError, match=sentence):
        prepare(DataSpec(**data), evaluation, gpt2, tmp_path)


def test_the_smallest_limit_and_length_are_taken(gpt2, tmp_path):
    prepared = prepare(DataSpec(rows=ROWS, limit=1, max_length=2), None, gpt2, tmp_path)
    assert prepared.train.lengths.tolist() == [2]


def test_a_split_is_of_a_folder_and_not_of_a_file(gpt2, tmp_path, write_lines):
    path = write_lines(ROWS[:3], "train.jsonl")
    with pytest.raises(DataError, match=r"data\.split: a single file or rows from Python have no splits"):
        prepare(DataSpec(path=str(path), split="train"), None, gpt2, tmp_path / "cache")
    (tmp_path / "set").mkdir()
    path.rename(tmp_path / "set" / "train.jsonl")
    folder = DataSpec(path=str(tmp_path / "set"), split="train")
    assert len(prepare(folder, None, gpt2, tmp_path / "cache").train) == 3


def test_rows_and_lengths_that_nobody_chose_are_2048_tokens_at_most(gpt2, tmp_path):
    samples = prepare(DataSpec(rows=[{"input_ids": [5] * 3000}]), None, gpt2, tmp_path).train
    assert samples.lengths.tolist() == [2048]


@pytest.mark.parametrize(
    ("fraction", "border"),
    [(1e-12, 2**40), (0.25, 2**62), (0.5, 2**63), (0.999999999, 2**63 + 7), (1 - 1e-16, 2**63 + 7)],
)
def test_rows_up_to_the_share_of_all_hashes_are_held_out_but_the_lowest_is_in_and_the_highest_is_not(
    fraction, border
):
    hashes = np.array([2**63 + 9, 2**40, 2**41, 2**42, 2**63 + 7, 2**40], dtype=np.uint64)
    assert _hash_threshold(hashes, fraction) == border


@pytest.mark.parametrize(("fraction", "held"), [(1e-9, 1), (0.999999999, 5)])
def test_a_share_near_nothing_is_one_row_and_one_near_all_leaves_one(fraction, held, gpt2, tmp_path):
    prepared = prepare(DataSpec(rows=ROWS[:6]), EvalSpec(fraction=fraction), gpt2, tmp_path)
    assert (len(prepared.evaluation), len(prepared.train)) == (held, 6 - held)


def test_a_label_is_the_name_of_a_file_that_is_there_and_is_the_only_one_of_its_name(tmp_path):
    path = str(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").touch()
    assert _source_label(Source(path=path), Counter(["rows.jsonl", "other"])) == "rows.jsonl"
    assert _source_label(Source(path=path), Counter(["rows.jsonl", "rows.jsonl"])) == path
    assert _source_label(Source(path="an-owner/a-dataset"), Counter(["a-dataset"])) == "an-owner/a-dataset"


def test_the_template_for_tools_is_that_of_the_tokenizer_beside_the_plain_one(tmp_path):
    tokenizer = families.smollm2()
    tokenizer.chat_template = {"default": families.CHATML, "tool_use": families.QWEN25}
    rules = SharedData(tokenizer, tmp_path, 99).rules(DataSpec(rows=ROWS))
    assert (rules.template.source, rules.tool_template.source) == (families.CHATML, families.QWEN25)
    assert (rules.max_tokens, rules.context) == (99, 99)
    tokenizer.chat_template = None
    rules = SharedData(Encoder(tokenizer), tmp_path).rules(DataSpec(rows=ROWS, max_length=7))
    assert (rules.template, rules.tool_template, rules.max_tokens, rules.context) == (None, None, 7, None)


def test_whether_rows_are_prepared_is_not_asked_of_a_spec_that_cannot_be(gpt2, tmp_path):
    with pytest.raises(DataError, match=r"data\.limit: must be at least 1"):
        SharedData(gpt2, tmp_path).is_prepared(DataSpec(rows=ROWS, limit=0), None)


def test_a_column_that_is_not_ours_is_a_sentence(gpt2, tmp_path):
    with pytest.raises(DataError, match="'question' is no column of ours"):
        prepare(DataSpec(rows=ROWS, columns={"question": "text"}), None, gpt2, tmp_path)


def test_what_nobody_says_about_data_is_one_share_of_whole_rows_none_of_them_bad():
    assert Source(path="a").weight == 1.0
    assert (DataSpec().max_length, DataSpec().skip_bad_rows, DataSpec().limit) == (None, False, None)
    assert [DataSpec().max_sample_tokens(context) for context in (None, 4096, 64)] == [2048, 2048, 64]
    assert DataSpec(path="a").sources == (Source(path="a"),)
    assert DataSpec(path=(Source(path="a"), Source(path="b"))).sources == (Source(path="a"), Source(path="b"))


def test_data_that_jobs_share_are_held_once_and_others_apart(gpt2, tmp_path):
    shared = SharedData(gpt2, tmp_path)
    first = shared.prepare(DataSpec(rows=ROWS), None)
    assert shared.prepare(DataSpec(rows=ROWS), None) is first
    held_out = EvalSpec(fraction=0.5, every=2)
    split = shared.prepare(DataSpec(rows=ROWS), held_out)
    assert shared.prepare(DataSpec(rows=ROWS), EvalSpec(fraction=0.5, every=9)) is split
    others = (
        DataSpec(rows=ROWS[:9]),
        DataSpec(rows=ROWS, limit=9),
        DataSpec(rows=ROWS, columns={"text": "text"}),
        DataSpec(rows=ROWS, max_length=7),
    )
    found = [shared.prepare(spec, None) for spec in others]
    assert len({id(one) for one in (first, split, *found)}) == 6
    assert [len(one.train) for one in found] == [9, 9, 200, 200]


def test_what_is_wrong_with_shared_data_is_found_once_and_told_to_each(gpt2, tmp_path, monkeypatch):
    read = []
    real = prepare_module.build_store
    monkeypatch.setattr(prepare_module, "build_store", lambda *args: read.append(args) or real(*args))
    shared = SharedData(gpt2, tmp_path)
    for _ in range(3):
        with pytest.raises(DataError, match="no row format has these columns"):
            shared.prepare(DataSpec(rows=BAD), None)
    assert len(read) == 1


BAD = [{"nothing": 1}]
