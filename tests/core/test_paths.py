from __future__ import annotations

from pathlib import Path

from weftune.core.paths import cache_folder


def test_the_cache_lies_where_the_user_says_else_where_caches_lie(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("WEFTUNE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/weftune")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/weftune")
    monkeypatch.setenv("WEFTUNE_CACHE", "~/mine")
    assert cache_folder() == Path("/home/someone/mine")
