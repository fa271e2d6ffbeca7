"""Pages of the cache: shared by equal beginnings, reused when memory is short, never by two writers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weftune.generate.cache import PAGE_ROWS, PagePool, page_keys

TOKENS = list(range(3 * PAGE_ROWS + 5))


def test_keys_are_equal_only_for_the_same_adapter_version_and_tokens():
    keys = page_keys("a", 1, TOKENS)
    assert len(keys) == 3
    assert keys == page_keys("a", 1, TOKENS[: 3 * PAGE_ROWS])
    for other in (page_keys("b", 1, TOKENS), page_keys("a", 2, TOKENS), page_keys(None, 1, TOKENS)):
        assert not set(keys) & set(other)
    changed = page_keys("a", 1, [*TOKENS[:PAGE_ROWS], 99, *TOKENS[PAGE_ROWS + 1 :]])
    assert [own == other for own, other in zip(keys, changed, strict=True)] == [True, False, False]


def test_a_published_page_is_found_until_its_memory_is_needed():
    pool, keys = PagePool(4), page_keys("a", 0, TOKENS)
    pages, known = pool.acquire_pages(keys, 3)
    assert known == 0
    for page, key in zip(pages, keys, strict=True):
        pool.publish_page(page, key)
    pool.release_pages(pages)
    assert pool.available_pages == 4
    again, known = pool.acquire_pages(keys[:2], 3)
    assert (again[:2], known) == (pages[:2], 2)
    assert pool.acquire_pages((), 2) is None
    (last,), _ = pool.acquire_pages((), 1)
    assert {*again, last} == set(range(4))
    pool.release_pages([*again, last])
    assert pool.acquire_pages(keys, 3)[1] == 2


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans()), max_size=60))
def test_no_page_has_two_writers_and_none_is_lost(steps):
    pool, held = PagePool(8), []
    for prompt, count, ends in steps:
        keys = page_keys(None, 0, [prompt] * (count * PAGE_ROWS))
        if (found := pool.acquire_pages(keys[: count - 1], count)) is not None:
            pages, known = found
            written = set(pages[known:])
            assert not any(written & set(other) for other in held)
            for page, key in zip(pages, keys, strict=True):
                pool.publish_page(page, key)
            held.append(pages)
        if ends and held:
            pool.release_pages(held.pop(0))
        in_use = {page for pages in held for page in pages}
        assert pool.available_pages == 8 - len(in_use)
