"""Routes for the dashboard's static files, which load nothing from other servers."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from fastapi.responses import Response

from weftune.service.api.errors import not_found

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

router = APIRouter(include_in_schema=False)


def _dashboard_files() -> dict[str, Traversable]:
    """Return a mapping from the name of each served file to the file. Reports and the dashboard share a style
    sheet."""
    own = {
        one.name: one for one in files("weftune.service.dashboard").iterdir() if not one.name.startswith("_")
    }
    return own | {"page.css": files("weftune.report").joinpath("page.css")}


@router.get("/")
def index(request: Request) -> Response:
    return _page_response(request, "index.html")


@router.get("/dashboard/{name}")
def dashboard_file(name: str, request: Request) -> Response:
    return _page_response(request, name)


def _page_response(request: Request, name: str) -> Response:
    found = _dashboard_files().get(name)
    if found is None or name.rpartition(".")[2] not in TYPES:
        raise not_found("file", name)
    content = found.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    # The files of a version belong together: a browser asks each time, and an upgrade is seen at once.
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=TYPES[name.rpartition(".")[2]], headers=headers)
