"""Files of every kind become the same rows."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from weftune.data import tables
from weftune.data.json_rows import CHUNK_SIZE, read_json, read_lines
from weftune.data.prepare import prepare
from weftune.data.row import Row
from weftune.data.spec import DataSpec
from weftune.data.tables import open_path, open_rows, read_csv, read_parquet, read_python_rows
from weftune.errors import DataError

ROWS = [{"prompt": f"Question {n}:", "completion": f" answer, {n}\n“é”"} for n in range(5)]


def values(table):
    rows = list(table.rows())
    assert all(row.problem is None for row in rows)
    return [dict(row.value) for row in rows]


def write(folder, ending):
    path = folder / f"rows{ending}"
    if ending in (".jsonl", ".ndjson"):
        path.write_text("\n".join(json.dumps(row) for row in ROWS))
    elif ending == ".json":
        path.write_text(json.dumps(ROWS, indent=2))
    elif ending == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]), delimiter="\t" if ending == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(ROWS)
    return path


@pytest.mark.parametrize("ending", [".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows_and_samples(ending, tmp_path, smollm2):
    path = write(tmp_path, ending)
    assert values(open_path(str(path), None, "rows")) == ROWS
    samples = prepare(DataSpec(path=str(path)), None, smollm2, tmp_path / "cache").train
    given = prepare(DataSpec(rows=ROWS), None, smollm2, tmp_path / "cache").train
    assert [samples.tokens(i).tolist() for i in range(5)] == [given.tokens(i).tolist() for i in range(5)]


def test_a_dataset_given_from_python_gives_the_same_rows(tmp_path, smollm2):
    from datasets import Dataset

    assert values(open_rows(Dataset.from_list(ROWS))) == ROWS
    assert open_rows(Dataset.from_list(ROWS)).digest == open_rows(ROWS).digest


def test_a_column_that_a_table_fills_with_null_counts_as_absent():
    from datasets import Dataset

    rows = Dataset.from_list([{"text": "a", "messages": None}])
    assert values(open_rows(rows)) == [{"text": "a"}]


def test_rows_name_the_line_on_which_they_start(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('text\n"two\nlines"\nlast\n')
    assert [row.location for row in open_path(str(path), None, "rows.csv").rows()] == [
        "rows.csv:2",
        "rows.csv:4",
    ]
    path = tmp_path / "rows.json"
    path.write_text('[\n{"text":\n"a"},\n\n{"text": "b"}]')
    assert [row.location for row in open_path(str(path), None, "rows.json").rows()] == [
        "rows.json:2",
        "rows.json:5",
    ]


def test_a_csv_row_with_a_field_too_many_is_bad(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion\na,b\na,b,c\na\n")
    problems = [row.problem for row in open_path(str(path), None, "rows").rows()]
    assert problems[0] is None
    assert "3 fields" in problems[1]
    assert "1 fields" in problems[2]


def test_a_json_array_larger_than_the_window_is_read_piece_by_piece(tmp_path):
    path = tmp_path / "rows.json"
    rows = [{"text": "x" * n, "n": n} for n in (10, CHUNK_SIZE // 2, 3 * CHUNK_SIZE, 5, CHUNK_SIZE - 11, 7)]
    path.write_text(json.dumps(rows))
    assert [dict(row.value) for row in read_json(path, "rows")] == rows


@pytest.mark.parametrize(
    "text",
    [
        '[{"text": "a"}',
        '[{"text": "a"} {"text": "b"}]',
        '[{"text": "a"}] 1',
        '[{"text": NaN}]',
        '[{"text": "a"},]',
        "[{]",
        '[{"a": 1, "a": 2}]',
    ],
)
def test_a_json_array_that_is_broken_is_a_sentence_with_its_line(text, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("\n" + text)
    with pytest.raises(DataError, match="rows:2: "):
        list(read_json(path, "rows"))


def test_an_array_may_hold_rows_that_are_no_objects_and_they_are_bad(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "a"}, 17, "x"]')
    problems = [row.problem for row in read_json(path, "rows")]
    assert problems[0] is None
    assert "not a number" in problems[1]
    assert "not text" in problems[2]


def test_a_folder_is_read_file_by_file_and_by_split(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train-00000.jsonl").write_text('{"text": "a"}\n')
    (folder / "train-00001.jsonl").write_text('{"text": "b"}\n')
    (folder / "test.jsonl").write_text('{"text": "c"}\n')
    (folder / "README.md").write_text("no rows")
    assert [row["text"] for row in values(open_path(str(folder), None, "set"))] == ["c", "a", "b"]
    table = open_path(str(folder), "train", "set")
    assert [row.location for row in table.rows()] == ["set/train-00000.jsonl:1", "set/train-00001.jsonl:1"]
    with pytest.raises(DataError, match="of the split validation"):
        open_path(str(folder), "validation", "set")


def test_what_cannot_be_read_is_a_sentence(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        open_path(str(tmp_path / "absent.jsonl"), None, "absent.jsonl")
    (tmp_path / "rows.txt").write_text("a")
    with pytest.raises(DataError, match=r"Weftune reads \.jsonl, .*, not \.txt"):
        open_path(str(tmp_path / "rows.txt"), None, "rows.txt")
    (tmp_path / "rows.parquet").write_text("a")
    with pytest.raises(DataError, match="not a Parquet file"):
        list(open_path(str(tmp_path / "rows.parquet"), None, "rows").rows())
    for rows in (iter(ROWS), {"train": ROWS}, "rows", 5):
        with pytest.raises(DataError, match="must be a list of dicts"):
            open_rows(rows)


def test_a_hub_id_that_cannot_be_had_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="There is no file or folder nobody/nothing here, and the Hub cannot"):
        open_path("nobody/nothing", None, "nobody/nothing")


def test_a_row_longer_than_the_limit_is_bad_and_the_next_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("weftune.data.json_rows.MAX_ROW_SIZE", 100)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "x" * 1000}) + '\n{"text": "a"}\n')
    first, second = open_path(str(path), None, "rows").rows()
    assert "longer than" in first.problem
    assert dict(second.value) == {"text": "a"}
    assert second.location == "rows:2"


COLUMNS = {
    '{"text": ': 9,
    '{"text": "a"': 13,
    '{"text": "a': 10,
    '{"text": "a", }': 13,
    '{"text": "a" "b": 1}': 14,
    "{'text': 1}": 2,
    '{"text": "a"} x': 15,
    '{"te NaN xt": "NaN", "n": NaN}': 27,
    '{"é猫": -Infinity}': 8,
    '{"text": [1, 1e999]}': 14,
    "hello": 1,
}


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "  \n"])
@pytest.mark.parametrize("line", COLUMNS)
def test_a_broken_line_is_told_with_the_column_where_it_breaks(line, end, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(('{"text": "a"}\n' + line + end).encode())
    problem = list(read_lines(path, "rows"))[1].problem
    # An unfinished text breaks where it starts; from Python 3.13 on a comma too many is found at the comma.
    assert problem.startswith("not valid JSON: ")
    assert problem.endswith(f" at column {COLUMNS[line]}") or (
        line.endswith(", }") and problem.endswith(f" at column {COLUMNS[line] + 2}")
    )
    assert " at at " not in problem


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[{"text": "a"}\n  {"text": "b"}]', "rows:2: not valid JSON: expected ',', found '{' at column 3"),
        (
            '[{"text": "a"},\n {"text":\n  "b"\n "c"}]',
            "rows:4: not valid JSON: expecting ',' delimiter at column 2",
        ),
        ('[{"text": "a"},\n', "rows:2: not valid JSON: expecting value at column 1"),
        (
            '\n[{"text": "a"} ',
            "rows:2: not valid JSON: expected ',', found 'the end of the file' at column 16",
        ),
        (
            '[{"text": "' + "x" * CHUNK_SIZE + '" 1}]',
            f"rows:1: not valid JSON: expecting ',' delimiter at column {CHUNK_SIZE + 14}",
        ),
        (
            '[{"text": "' + "x" * CHUNK_SIZE + '"},\n {"a": 1,\n"b" 1}]',
            "rows:3: not valid JSON: expecting ':' delimiter at column 5",
        ),
        ('[{"text": "a"}] 1', "rows:1: something stands after the end of the array"),
    ],
)
def test_a_broken_array_is_told_with_the_line_and_column_where_it_breaks(text, place, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        list(read_json(path, "rows"))
    assert str(error.value) == place


def test_a_key_that_stands_twice_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1, "b": 2, "c": 3, "b": 4}\n{"a": {"x": 1, "x": 2}}\n')
    problems = [row.problem for row in read_lines(path, "rows")]
    assert problems == [f"not valid JSON: the key {key!r} stands twice in one object" for key in "bx"]


def test_a_row_of_16_mebibytes_is_too_long_and_one_a_byte_shorter_is_not(tmp_path):
    path, most = tmp_path / "rows.jsonl", 16 * 2**20
    longest = b'{"text": "' + b"x" * (most - 13) + b'"}\n'
    assert len(longest) == most
    path.write_bytes(longest + b'{"text": "x' + longest[11:] + longest[:-3] + b'xxxx"}\n' + b"[]\n")
    first, second, third, last = read_lines(path, "rows")
    assert (first.problem, second.problem, last.location) == (None, None, "rows:4")
    assert (third.problem, third.location) == ("the row is longer than 16 MiB", "rows:3")


def test_a_row_of_an_array_without_end_is_a_sentence_and_not_read_to_its_end(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "a"},\n{"text": "' + "x" * (34 * 2**20) + '"}]')
    rows = read_json(path, "rows")
    assert next(rows).value == {"text": "a"}
    with pytest.raises(DataError, match=r"^rows:2: the row is longer than 16 MiB$"):
        next(rows)


def test_a_byte_order_mark_is_no_part_of_a_first_row_and_of_others_it_is(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"text": "a"}\n\ufeff{"text": "b"}\n')
    first, second = read_lines(path, "rows")
    assert first.value == {"text": "a"}
    assert second.problem.startswith("not valid JSON")


def test_an_array_may_be_empty_spaced_and_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "rows.json"
    for text, count in (("[]", 0), (" [ ] \n", 0), ('\ufeff\t[ {"a": 1} \r\n, {"a": 2}\n]\n ', 2)):
        path.write_text(text, newline="")
        assert len(list(read_json(path, "rows"))) == count
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert [row.location for row in read_json(path, "rows")] == ["rows:1", "rows:2"]
    path.write_text("[" + "[" * 70 + "]" * 70 + "]")
    with pytest.raises(DataError, match=r"^rows:1: not usable JSON: nested more than 64 levels deep"):
        list(read_json(path, "rows"))


def test_a_number_at_the_end_of_a_piece_goes_on_in_the_next(tmp_path):
    path = tmp_path / "rows.json"
    for less in range(4):
        head = '[{"text": "' + "x" * (CHUNK_SIZE - 15 - less) + '"}, '
        path.write_text(head + "1234]")
        problems = [row.problem for row in read_json(path, "rows")]
        assert problems == [None, "a row must be an object with named columns, not a number"]


def test_a_name_with_the_ending_of_a_file_is_no_dataset_of_the_hub(monkeypatch):
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr("weftune.data.tables._open_hub", lambda *given: asked.append(given))
    for name in ("absent.jsonl", "absent/rows.CSV", "../absent", "a/b/c"):
        with pytest.raises(DataError, match=f"mine: there is no file {name}"):
            open_path(name, None, "mine")
    open_path("nobody/nothing", None, "mine")
    open_path("nothing.v2", "test", "mine")
    assert asked == [("nobody/nothing", "train"), ("nothing.v2", "test")]


def test_the_digest_of_rows_is_that_of_their_content_and_never_changes(tmp_path):
    path = write(tmp_path, ".jsonl")
    assert open_path(str(path), None, "rows").digest == "5d3deaf2261e8ed4e9614f3a4444459b"
    assert open_rows(ROWS).digest == open_rows([dict(reversed(row.items())) for row in ROWS]).digest
    assert open_rows([*ROWS, "torn"]).digest == "d46d277c90167cc8c7e1059650f746f3"
    path.rename(tmp_path / "other.ndjson")
    assert (
        open_path(str(tmp_path / "other.ndjson"), None, "rows").digest != "5d3deaf2261e8ed4e9614f3a4444459b"
    )
    (tmp_path / "rows").write_text("{}")
    with pytest.raises(DataError, match="not files without an ending"):
        open_path(str(tmp_path / "rows"), None, "rows")


def test_a_number_that_json_does_not_know_is_named_with_its_column(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": NaN}\n{"n": 1e400}\n')
    assert [row.problem for row in read_lines(path, "rows")] == [
        "not valid JSON: NaN is not a number that JSON knows at column 7",
        "not valid JSON: 1e400 is too large for a number at column 7",
    ]


def test_a_dataset_of_the_hub_is_its_rows_or_the_first_line_of_why_it_cannot_be_had(monkeypatch):
    import datasets

    def refuses(name: str, split: str) -> None:
        raise RuntimeError(f"no {split} in {name}\nand much more")

    monkeypatch.setattr("weftune.data.tables.absence_reason", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: datasets.Dataset.from_list(ROWS))
    assert values(open_path("nobody/nothing", None, "mine")) == ROWS
    monkeypatch.setattr(datasets, "load_dataset", refuses)
    with pytest.raises(DataError, match=r"^nobody/nothing: .* \(split test\): no test in nobody/nothing$"):
        open_path("nobody/nothing", "test", "mine")


def test_a_line_that_is_no_object_is_a_bad_row_that_says_what_it_is(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n[1]\n"a"\n5\nnull\n{}\n')
    rows = list(read_lines(path, "rows"))
    assert [row.problem for row in rows] == [
        None,
        *(
            f"a row must be an object with named columns, not {kind}"
            for kind in ("a list", "text", "a number")
        ),
        "a row must be an object with named columns, not null",
        None,
    ]
    assert [(row.location, dict(row.value)) for row in rows if row.problem is None] == [
        ("rows:1", {"a": 1}),
        ("rows:6", {}),
    ]


def rows_of(tmp_path: Path, text: str) -> list[Row]:
    path = tmp_path / "rows.csv"
    path.write_text(text, newline="")
    return list(read_csv(path, "rows"))


def test_a_torn_line_is_a_bad_row_and_those_behind_it_are_read(tmp_path):
    first, torn, last = rows_of(tmp_path, 'text,b\na,b\n"a"c,b\nd,e\n')
    assert (first.value, last.value) == ({"text": "a", "b": "b"}, {"text": "d", "b": "e"})
    assert (torn.location, torn.problem[:15], last.location) == ("rows:3", "not valid CSV: ", "rows:4")


def test_a_line_is_as_long_as_it_may_be_and_one_longer_is_passed_over_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_LINE_LENGTH", 10)
    text = "text\n" + "x" * 9 + "\n" + "y" * 10 + "\n" + "z" * 35 + "\n\nb\n" + "c" * 9
    rows = rows_of(tmp_path, text)
    assert [row.value.get("text") for row in rows] == ["x" * 9, None, None, "b", "c" * 9]
    assert [row.location for row in rows] == ["rows:2", "rows:3", "rows:4", "rows:6", "rows:7"]
    assert rows[2].problem == "not valid CSV: the line is longer than 0 Mi characters"
    with pytest.raises(DataError, match="rows:1: the header is not valid CSV: the line is longer"):
        rows_of(tmp_path, "h" * 30)


def test_a_field_may_be_longer_than_the_csv_module_takes_by_itself(tmp_path):
    (row,) = rows_of(tmp_path, "text\n" + "x" * 200_000)
    assert len(row.value["text"]) == 200_000
    assert rows_of(tmp_path, "") == rows_of(tmp_path, "text\n") == []


def test_rows_of_parquet_are_counted_from_one_and_empty_cells_are_absent(tmp_path):
    table = pyarrow.table({"text": ["a", None, "c"], "n": [1.0, 2.0, math.nan]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    rows = list(read_parquet(tmp_path / "rows.parquet", "rows"))
    assert [row.location for row in rows] == ["rows:1", "rows:2", "rows:3"]
    assert [row.value for row in rows] == [{"text": "a", "n": 1.0}, {"n": 2.0}, {"text": "c"}]


def test_a_parquet_file_that_breaks_while_it_is_read_is_a_sentence(tmp_path, monkeypatch):
    def torn(_: Path) -> None:
        raise OSError("torn\nat 5")

    monkeypatch.setattr(tables, "refuse_expansion", lambda *_: None)
    monkeypatch.setattr(tables, "read_batches", torn)
    with pytest.raises(DataError, match=r"^rows: not a Parquet file that can be read: torn$"):
        list(read_parquet(tmp_path / "rows.parquet", "rows"))


def test_given_rows_that_are_too_deep_or_no_rows_are_bad_by_their_number():
    deep: list = []
    for _ in range(80):
        deep = [deep]
    good, bad, none = read_python_rows([{"a": 1, "b": None}, {"a": deep}, 5], "rows")
    assert (good.location, good.value) == ("rows:1", {"a": 1})
    assert (bad.location, bad.problem) == ("rows:2", "the row is nested more than 64 levels deep")
    assert (none.location, none.problem) == (
        "rows:3",
        "a row must be an object with named columns, not a number",
    )


def test_a_dataset_is_read_through_all_of_its_batches():
    from datasets import Dataset

    rows = [{"n": n, "text": str(n)} for n in range(600)]
    assert [dict(row.value) for row in read_python_rows(Dataset.from_list(rows), "rows")] == rows
