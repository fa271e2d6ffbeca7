"""Ids, and the names under which adapters answer."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftune.service.ids import AdapterName, new_id, parse_adapter_name

PARTS = st.text("abcz019-", min_size=1, max_size=12)


def test_ids_differ_and_name_folders_everywhere():
    ids = {new_id("ftjob") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(r"ftjob-[0-9a-f]{24}", one) for one in ids)


@given(
    base=st.text("abc/.:-019", min_size=1, max_size=20).filter(lambda text: not text.endswith(":")),
    tenant=PARTS,
    suffix=PARTS | st.just(""),
    job=PARTS,
    step=st.none() | st.integers(0, 10**6),
)
def test_a_name_is_parsed_into_its_parts(base, tenant, suffix, job, step):
    name = AdapterName(base, tenant, suffix, job, step)
    assert parse_adapter_name(str(name)) == name


def test_names_have_the_form_of_openai():
    name = AdapterName("Qwen/Qwen3-8B", "acme", "support", "ftjob-1")
    assert str(name) == "ft:Qwen/Qwen3-8B:acme:support:ftjob-1"
    assert str(AdapterName("base", "acme", "", "ftjob-1", 20)) == "ft:base:acme::ftjob-1:ckpt-step-20"


@pytest.mark.parametrize(
    "text", ["", "gpt-4o", "ft:", "ft:base:acme:x", "xt:base:acme:x:ftjob-1", "ft::a:b:c"]
)
def test_other_names_are_none(text):
    assert parse_adapter_name(text) is None
