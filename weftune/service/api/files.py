"""The files endpoints of OpenAI's API. Uploads are written to disk while they arrive, and every row is
checked before the response is sent."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, Response
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from weftune.core.files import sync_folder
from weftune.errors import DataError
from weftune.jobs.store.status import State
from weftune.service.api.context import BEARER, ERRORS, Service, ServiceHere, StrictRoute, Tenant
from weftune.service.api.errors import ApiError, invalid_request, not_found
from weftune.service.api.schemas import File, FileDeleted, FilePage
from weftune.service.ids import new_id
from weftune.service.settings import ServiceSettings
from weftune.service.store.records import EventRow
from weftune.service.store.requests import FileRecord, Submission

MAX_FILENAME = 255
MAX_PAGE = 10_000
MULTIPART_BYTES = 64 << 10
"""Maximum bytes of an upload in addition to the file itself, for multipart headers and other fields."""
UPLOADING = ".uploading"
"""Suffix of a file whose upload is not complete."""
RESULTS = "file-results-"
"""Prefix of the ids of metrics files. A metrics file does not exist on disk: its content is created from the
database when it is requested."""
FIELDS = ("purpose", "file")
COLUMNS = {
    "step": "step",
    "train_loss": "train_loss",
    "train_accuracy": "train_mean_token_accuracy",
    "valid_loss": "valid_loss",
    "valid_mean_token_accuracy": "valid_mean_token_accuracy",
}
"""Maps the first columns of a metrics file, which have OpenAI's names, to the names of the same metrics in
the events of a job."""

UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["purpose", "file"],
                    "properties": {
                        "purpose": {"type": "string", "enum": ["fine-tune"]},
                        "file": {"type": "string", "format": "binary", "description": "JSON Lines."},
                    },
                }
            }
        },
    }
}

router = APIRouter(
    prefix="/v1/files", tags=["Files"], route_class=StrictRoute, dependencies=[BEARER], responses=ERRORS
)


@router.post("", response_model=File, openapi_extra=UPLOAD, summary="Upload rows")
async def upload(request: Request, tenant: Tenant, service: ServiceHere) -> File:
    """Store a JSON Lines file. A row that cannot be trained on is refused with its line number."""
    quotas = service.settings.quotas
    service.settings.files.mkdir(parents=True, exist_ok=True, mode=0o700)
    id = new_id("file")
    path = service.settings.file_path(id)
    part = path.with_suffix(UPLOADING)
    try:
        with part.open("xb") as target:
            received = await _receive(request, target, quotas.file_bytes)
            await asyncio.to_thread(_flush_to_disk, target)
        stored = await asyncio.to_thread(service.requests.stored_bytes, tenant)
        if quotas.stored_bytes is not None and stored + received.bytes > quotas.stored_bytes:
            raise ApiError(
                413,
                f"Your files would take more than {quotas.stored_bytes:,} bytes together; delete some.",
                code="storage_quota_exceeded",
                param="file",
            )
        # The file's name is complete before it is checked, since its ending tells how it is read.
        part.rename(path)
        rows = await asyncio.to_thread(_check_upload, service, path, received.filename)
        record = FileRecord(
            id=id,
            tenant=tenant,
            filename=received.filename,
            purpose="fine-tune",
            bytes=received.bytes,
            rows=rows,
            sha256=received.digest.hexdigest(),
            created_at=time.time(),
        )
        await asyncio.to_thread(sync_folder, path.parent)
        await asyncio.to_thread(service.requests.add_file, record)
    except BaseException:
        for one in (part, path):
            one.unlink(missing_ok=True)
        raise
    return file_view(record)


@router.get("", response_model=FilePage, summary="List files")
def list_files(
    tenant: Tenant,
    service: ServiceHere,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> FilePage:
    found = service.requests.files(tenant, after=after, limit=limit + 1, order=order, purpose=purpose)
    return FilePage(data=[file_view(one) for one in found[:limit]], **page_fields(found, limit))


@router.get("/{file_id}", response_model=File, summary="Get a file")
def get_file(file_id: str, tenant: Tenant, service: ServiceHere) -> File:
    if (job := result_job(file_id)) is not None:
        text, created_at = _result_content(service, tenant, file_id, job)
        return File(
            id=file_id,
            bytes=len(text.encode()),
            created_at=int(created_at),
            filename=f"{job}.csv",
            purpose="fine-tune-results",
        )
    return file_view(_find_file(service, tenant, file_id))


@router.get(
    "/{file_id}/content",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}, "text/csv": {}}}},
    summary="Download a file",
)
def get_content(file_id: str, tenant: Tenant, service: ServiceHere) -> Response:
    """Download an uploaded file, or the metrics of a finished job (`result_files`) as CSV."""
    if (job := result_job(file_id)) is not None:
        text, _ = _result_content(service, tenant, file_id, job)
        return Response(text, media_type="text/csv", headers=ATTACHMENT)
    record = _find_file(service, tenant, file_id)
    path = service.settings.file_path(record.id)
    if not path.is_file():
        raise not_found("file", file_id)
    return FileResponse(path, media_type="application/octet-stream", headers=ATTACHMENT)


@router.delete("/{file_id}", response_model=FileDeleted, summary="Delete a file")
def delete_file(file_id: str, tenant: Tenant, service: ServiceHere) -> FileDeleted:
    record = _find_file(service, tenant, file_id)
    if (job := _file_user(service, tenant, record.id)) is not None:
        raise invalid_request(
            f"{record.id} is used by {job}, which has not ended; cancel the job first.",
            param="file_id",
            code="file_in_use",
        )
    if not service.requests.delete_file(tenant, record.id):
        raise not_found("file", file_id)
    service.settings.file_path(record.id).unlink(missing_ok=True)
    return FileDeleted(id=record.id)


ATTACHMENT = {"Content-Disposition": "attachment"}


def file_view(record: FileRecord) -> File:
    return File(
        id=record.id,
        bytes=record.bytes,
        created_at=int(record.created_at),
        filename=record.filename,
        purpose="fine-tune" if record.purpose == "fine-tune" else "fine-tune-results",
    )


def page_fields(rows: Sequence[Any], limit: int) -> dict[str, Any]:
    """Return all fields of a page of a list except its items. `rows` has `limit` + 1 items if there is a next
    page."""
    shown = rows[:limit]
    return {
        "has_more": len(rows) > limit,
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
    }


def result_job(file_id: str) -> str | None:
    """Return the id of the job whose metrics a file contains, or None for an uploaded file."""
    return file_id.removeprefix(RESULTS) if file_id.startswith(RESULTS) else None


def _find_file(service: Service, tenant: str, id: str) -> FileRecord:
    record = service.requests.file(tenant, id)
    if record is None:
        raise not_found("file", id)
    return record


def open_jobs(service: Service, tenant: str) -> list[Submission]:
    """Return the tenant's jobs that have not ended, including those that the training process has not read
    yet."""
    submitted = service.requests.unprepared_submissions()
    # Prepared jobs that training has not read yet, for example because it is being restarted.
    unread = service.requests.prepared_after(service.training.cursors().get("prepared", 0))
    submitted += [one.submission for one in unread if one.refusal is None]
    found = {one.id: one for one in submitted if one.tenant == tenant}
    ended = [id for id, row in service.training.jobs_by_id(found).items() if row.state.has_ended]
    for id in ended:
        del found[id]
    for row in service.training.jobs(tenant, states=UNFINISHED, limit=None):
        submission = found.get(row.id) or service.requests.submission(tenant, row.id)
        if submission is not None:
            found[row.id] = submission
    return list(found.values())


def _file_user(service: Service, tenant: str, file: str) -> str | None:
    """Return the id of an unfinished job that uses an uploaded file, or None if there is no such job."""
    users = (one.id for one in open_jobs(service, tenant) if file in (one.training_file, one.validation_file))
    return next(users, None)


UNFINISHED = tuple(state for state in State if not state.has_ended)


# -- receiving ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Received:
    filename: str = ""
    bytes: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class _Form:
    """A parser of a multipart upload. It keeps small fields in memory, and writes the content of the uploaded
    file to the file `target`."""

    def __init__(self, boundary: str, target: io.BufferedWriter, max_bytes: int) -> None:
        self.received = _Received()
        self.fields: dict[str, bytes] = {}
        self.has_file = False
        self._target, self._max_bytes = target, max_bytes
        self._name = ""
        self._filename: str | None = None
        self._header = [b"", b""]
        names = ("part_begin", "header_field", "header_value", "header_end", "headers_finished", "part_data")
        callbacks: Any = {f"on_{name}": getattr(self, f"_on_{name}") for name in names}
        self._parser = MultipartParser(boundary, callbacks)

    def write(self, content: bytes) -> None:
        self._parser.write(content)

    def finish(self) -> None:
        self._parser.finalize()

    def _on_part_begin(self) -> None:
        self._name, self._header, self._filename = "", [b"", b""], None

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]

    def _on_header_end(self) -> None:
        name, value = self._header
        self._header = [b"", b""]
        if name.strip().lower() == b"content-disposition":
            parsed = Message()
            parsed["content-disposition"] = value.decode("utf-8", "replace")
            self._name = str(parsed.get_param("name", "", "content-disposition"))
            self._filename = parsed.get_filename()

    def _on_headers_finished(self) -> None:
        if self._name not in FIELDS:
            raise invalid_request(
                f"{self._name[:64]}: is not supported; an upload has purpose and file",
                param=self._name[:64],
                code="unknown_parameter",
            )
        if self._name in self.fields or (self._name == "file" and self.has_file):
            raise invalid_request(f"{self._name}: is given twice", param=self._name)
        if self._name == "file":
            self.has_file = True
            self.received.filename = clean_filename(self._filename)
        else:
            self.fields[self._name] = b""

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name != "file":
            self.fields[self._name] += data[start:end]
            if len(self.fields[self._name]) > MAX_FILENAME:
                raise invalid_request(f"{self._name}: is too long", param=self._name)
            return
        self.received.bytes += end - start
        if self.received.bytes > self._max_bytes:
            raise ApiError(
                413,
                f"file: is larger than {self._max_bytes:,} bytes; split it into parts.",
                code="file_too_large",
                param="file",
                headers={"Connection": "close"},
            )
        piece = data[start:end]
        self.received.digest.update(piece)
        self._target.write(piece)


def clean_filename(text: str | None) -> str:
    """Return the file name that a client sent, without folders and control characters. The name is only
    displayed."""
    name = re.split(r"[/\\]", text or "")[-1]
    name = "".join(letter for letter in name if letter.isprintable())
    return name[:MAX_FILENAME].strip() or "rows.jsonl"


async def _receive(request: Request, target: io.BufferedWriter, max_bytes: int) -> _Received:
    kind = Message()
    kind["content-type"] = request.headers.get("content-type", "")
    boundary = kind.get_boundary()
    if kind.get_content_type() != "multipart/form-data" or not boundary:
        raise ApiError(415, "Send the file as multipart/form-data with the fields purpose and file.")
    try:
        form = _Form(boundary, target, max_bytes)
        async for piece in request.stream():
            form.write(piece)
        form.finish()
    except (FormParserError, UnicodeError, LookupError) as error:
        raise invalid_request(
            f"The body is not multipart/form-data: {error}", code="invalid_multipart"
        ) from None
    purpose = form.fields.get("purpose")
    if purpose is None or not form.has_file:
        missing = "purpose" if purpose is None else "file"
        raise invalid_request(f"{missing}: is required", param=missing, code="missing_parameter")
    if purpose != b"fine-tune":
        shown = purpose.decode("utf-8", "replace")[:40]
        raise invalid_request(
            f'purpose: must be fine-tune, got "{shown}"', param="purpose", code="unsupported_purpose"
        )
    return form.received


def _flush_to_disk(file: io.BufferedWriter) -> None:
    file.flush()
    os.fsync(file.fileno())


def _check_upload(service: Service, path: Path, filename: str) -> int:
    try:
        return service.preparer.check(path, filename, service.settings.quotas.file_rows)
    except DataError as error:
        sentences = [str(mistake) for mistake in error.mistakes[:20]]
        raise invalid_request("\n".join(sentences), param="file", code="invalid_file") from None


def remove_unfinished(settings: ServiceSettings) -> None:
    """Remove the incomplete files of uploads that were interrupted by a shutdown or a crash."""
    for path in settings.files.glob(f"*{UPLOADING}"):
        with suppress(OSError):
            path.unlink()


# -- results --------------------------------------------------------------------------------------------


def _result_content(service: Service, tenant: str, file_id: str, job: str) -> tuple[str, float]:
    """Return the metrics of an ended job as CSV, and the time when the job ended."""
    row = service.training.job(job, tenant)
    if row is None or not row.state.has_ended:
        raise not_found("file", file_id)
    return metrics_csv(service.training.metrics(job)), row.finished_at or row.created_at


def metrics_csv(rows: Sequence[EventRow]) -> str:
    """Return metrics as CSV, with one line per step that has metrics. OpenAI's columns are first, followed by
    all other columns."""
    steps: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row.measured in ("train", "eval") and row.step is not None:
            numbers = {key: value for key, value in row.data.items() if isinstance(value, int | float)}
            steps.setdefault(row.step, {}).update(numbers | {"step": row.step})
    others = sorted({key for values in steps.values() for key in values} - set(COLUMNS.values()))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, *others])
    for _, values in sorted(steps.items()):
        writer.writerow([values.get(key, "") for key in (*COLUMNS.values(), *others)])
    return text.getvalue()
