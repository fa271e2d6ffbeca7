"""Paths of a spec: what is a file, what an id on the Hub, and what was probably meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from weftune.jobs.spec.build import (
    is_hub_id,
    is_revision,
    locate_adapter,
    locate_rows,
    locate_template,
    missing_path_message,
    path_exists,
    resolve_path,
)


@pytest.mark.parametrize("text", ["owner/name", "name", "a/b", "o.w-n_er/n.a-me", "x" * 96, "o/v1.5"])
def test_an_owner_and_a_name_or_a_name_alone_can_be_on_the_hub(text: str) -> None:
    assert is_hub_id(text)


@pytest.mark.parametrize(
    "text",
    ["", "a/b/c", "/a", "a/", "./a", "../a", "~/a", "a b", "-a", "a-", ".a", "x" * 97, "a.jsonl", "o/x.GGUF"],
)
def test_what_looks_like_a_path_or_a_file_is_not_taken_for_an_id_on_the_hub(text: str) -> None:
    assert not is_hub_id(text)


def test_a_revision_is_a_branch_a_tag_or_a_commit_and_leads_nowhere_else() -> None:
    for text in ("main", "v1.0", "refs/pr/1", "0f" * 20, "feature/x-1"):
        assert is_revision(text)
    for text in ("", "..", "../main", "a/../b", "/main", "main/", "a//b", "a b", "-x"):
        assert not is_revision(text)


def test_a_path_is_made_absolute_from_its_folder_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert resolve_path(tmp_path, "link/../rows.jsonl") == tmp_path / "rows.jsonl"
    assert resolve_path(tmp_path, "link/rows") == tmp_path / "link" / "rows"
    assert resolve_path(tmp_path, "/elsewhere/rows") == Path("/elsewhere/rows")
    assert resolve_path(tmp_path, "~/rows") == Path.home() / "rows"


@pytest.mark.parametrize("text", ["x" * 5000, "a/" * 3000, "\0", "\ud800"])
def test_a_path_that_no_system_can_have_is_not_there_and_is_a_sentence(tmp_path: Path, text: str) -> None:
    assert not path_exists(resolve_path(tmp_path, text))
    assert fault(locate_rows, tmp_path, text)


def test_a_zero_byte_is_named_since_nobody_sees_it(tmp_path: Path) -> None:
    assert missing_path_message(tmp_path, "a\0b") == "holds a zero byte, which no path can"


def test_a_path_that_leads_nowhere_is_told_with_the_folder_it_was_looked_for_in(tmp_path: Path) -> None:
    mend = "write a path relative to the jobs file, or an absolute one"
    assert (
        missing_path_message(tmp_path, "rows.jsonl") == f'there is no file "rows.jsonl" in {tmp_path}; {mend}'
    )
    assert missing_path_message(tmp_path, "/no/rows.jsonl") == f'there is no file "/no/rows.jsonl"; {mend}'
    assert missing_path_message(tmp_path, "~/no/x", "folder") == f'there is no folder "~/no/x"; {mend}'


def test_a_file_that_may_be_meant_is_named_by_a_path_that_can_be_written_there(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("train.jsonl", "train.csv", "held_out.jsonl"):
        (tmp_path / "sub" / name).touch()
    assert missing_path_message(tmp_path, "sub/trian.jsonl").endswith("; did you mean sub/train.jsonl?")
    assert missing_path_message(tmp_path, "sub/held_out").endswith("; did you mean sub/held_out.jsonl?")
    assert missing_path_message(tmp_path, "sub/held_out.json").endswith("; did you mean sub/held_out.jsonl?")
    assert "did you mean" not in missing_path_message(tmp_path, "sub/valid.jsonl")
    assert "did you mean" not in missing_path_message(tmp_path, "nowhere/train.jsonl")


def test_no_near_file_is_looked_for_where_the_folder_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    assert "did you mean" not in missing_path_message(tmp_path, "rows.jsonl/train.jsonl")
    assert "did you mean" not in missing_path_message(tmp_path, f"{'x' * 5000}/train.jsonl")


def fault(locate: Callable[[Path, str], str], folder: Path, text: str) -> str:
    with pytest.raises(ValueError) as found:
        locate(folder, text)
    return str(found.value)


def test_rows_are_a_file_that_exists_before_they_are_an_id(tmp_path: Path) -> None:
    assert locate_rows(tmp_path, "owner/name") == "owner/name"
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").touch()
    assert locate_rows(tmp_path, "owner/name") == str(tmp_path / "owner" / "name")
    assert fault(locate_rows, tmp_path, "rows.jsonl") == missing_path_message(tmp_path, "rows.jsonl")


def test_a_chat_template_is_chatml_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").touch()
    (tmp_path / "chatml").touch()
    (tmp_path / "folder.d").mkdir()
    (tmp_path / "plain").touch()
    assert locate_template(tmp_path, "chatml") == "chatml", "a file of that name is no template"
    assert locate_template(tmp_path, "chat.jinja") == str(tmp_path / "chat.jinja")
    assert locate_template(tmp_path, "plain") == str(tmp_path / "plain")
    assert fault(locate_template, tmp_path, "llama3") == 'must be chatml or a Jinja file, got "llama3"'
    for path in ("folder.d", "sub/chat", "other.jinja"):
        assert fault(locate_template, tmp_path, path) == missing_path_message(tmp_path, path)


def test_an_adapter_to_start_from_is_a_folder_with_its_configuration_and_its_weights(tmp_path: Path) -> None:
    assert fault(locate_adapter, tmp_path, "old") == missing_path_message(tmp_path, "old", "folder")
    (tmp_path / "old").mkdir()
    found = fault(locate_adapter, tmp_path, "old")
    assert found == '"old" holds no adapter_config.json; name a PEFT adapter folder'
    (tmp_path / "old" / "adapter_config.json").touch()
    assert fault(locate_adapter, tmp_path, "old") == f"{tmp_path / 'old'} holds no adapter_model.safetensors"
    (tmp_path / "old" / "adapter_model.safetensors").touch()
    assert locate_adapter(tmp_path, "old") == str(tmp_path / "old")
