"""The command line's client of a service. It does not need OpenAI's package."""

from __future__ import annotations

import json
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from weftune.data.formats import rename_columns
from weftune.data.spec import DataSpec
from weftune.data.tables import open_path
from weftune.errors import DataError, Mistake, SpecError, UserError
from weftune.jobs.spec.layer import plain_values
from weftune.jobs.spec.spec import JobSpec, RunSpec, resolve_job
from weftune.jobs.sweeps.read import trial_job
from weftune.jobs.sweeps.spec import Sweep, Trial
from weftune.service.settings import public_name

TIMEOUT_SECONDS = 120.0
ATTEMPTS = 3
"""Number of times that a request is sent if the service does not respond or is temporarily unavailable."""
RETRIED = (408, 429, 502, 503, 504)
MAX_WAIT_SECONDS = 30.0
"""Maximum seconds between two attempts to send a request."""
PAGE = 100
EXTENSION_KEYS = (
    "adapter", "objective", "epochs", "steps", "priority", "learning_rate", "schedule", "warmup",
    "weight_decay", "betas", "eps", "eval", "early_stop", "keep",
)  # fmt: skip
"""Keys of jobs.yaml that a request to a service contains under `weftune`."""


class ServiceClient:
    def __init__(self, url: str, key: str) -> None:
        parsed = urllib.parse.urlsplit(url)
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            raise UserError(f"--url {url}: is no address of a service; write http://HOST:PORT")
        self._url, self._key = url.rstrip("/").removesuffix("/v1"), key

    # -- requests ----------------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Send a request and return the JSON of the response, or raise a UserError with the service's
        message."""
        content = None if body is None else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        return json.loads(self._send_request(method, path, content, {**kind, **(headers or {})}))

    def _send_request(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]
    ) -> bytes:
        whole = {**headers, "Authorization": f"Bearer {self._key}"}
        for attempt in range(ATTEMPTS):
            is_last = attempt == ATTEMPTS - 1
            request = urllib.request.Request(self._url + path, content, dict(whole), method=method)
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                    return bytes(answer.read())
            except urllib.error.HTTPError as error:
                if error.code not in RETRIED or is_last:
                    raise UserError(_http_error_sentence(error)) from None
                wait = error.headers.get("Retry-After", "")
                time.sleep(min(MAX_WAIT_SECONDS, float(wait) if wait.isdecimal() else 2.0**attempt))
            except OSError as error:
                if is_last:
                    reason = getattr(error, "reason", error)
                    raise UserError(
                        f"{self._url} does not answer ({reason}); is weftune serve running?"
                    ) from None
                time.sleep(2.0**attempt)
        raise AssertionError("the last attempt returns or raises")

    def upload(self, path: str, data: DataSpec) -> str:
        """Upload rows as JSON Lines, with Weftune's column names, and return the file's id."""
        content = b"".join(_row_lines(path, data))
        boundary = f"weftune-{secrets.token_hex(16)}"
        name = urllib.parse.quote(Path(path).with_suffix(".jsonl").name, safe=" ")
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
            "Content-Type: application/jsonl\r\n\r\n"
        )
        body = b"".join([head.encode(), content, f"\r\n--{boundary}--\r\n".encode()])
        kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        return str(json.loads(self._send_request("POST", "/v1/files", body, kind))["id"])

    def list_items(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield all items of a list, page by page."""
        after = ""
        while True:
            page = self.request("GET", f"{path}?limit={PAGE}{after}")
            yield from page["data"]
            if not page["has_more"] or not page["data"]:
                return
            after = f"&after={urllib.parse.quote(page['data'][-1]['id'])}"

    # -- jobs --------------------------------------------------------------------------------------------

    def submit(self, run: RunSpec) -> Iterator[dict[str, Any]]:
        """Submit all jobs and sweeps of a jobs file, and yield them as the service answers. Rows that several
        jobs share are uploaded once."""
        refuse_unsupported_jobs(run)
        if (base := self._read_base()) != public_name(run.base):
            raise SpecError(
                Mistake("base", f"is {public_name(run.base)}, and the service trains on {base}; write that")
            )
        uploaded: dict[Any, str] = {}
        for job, sweep in submitted_jobs(run):
            files = {"training_file": job.data.sources[0].path}
            if job.eval is not None and job.eval.path is not None:
                files["validation_file"] = job.eval.path
            body = job_request(job)
            if sweep is not None:
                body["weftune"]["sweep"] = plain_values(sweep.keys.values["sweep"])
            for name, path in files.items():
                key = (path, job.data.limit, tuple(sorted(job.data.columns.items())))
                if key not in uploaded:
                    uploaded[key] = self.upload(path, job.data)
                body[name] = uploaded[key]
            # The key makes it safe to send the request again if its answer is lost.
            headers = {"Idempotency-Key": secrets.token_hex(16)}
            body["model"] = base
            yield self.request("POST", "/v1/fine_tuning/jobs", body, headers)

    def _read_base(self) -> str:
        return str(self.request("GET", "/v1/models")["data"][0]["id"])

    def job(self, name: str) -> dict[str, Any]:
        """Return the service's record of the job with the id `name` or, if there is none, of the newest job
        with this suffix."""
        if name.startswith("ftjob-"):
            return dict(self.request("GET", f"/v1/fine_tuning/jobs/{urllib.parse.quote(name, safe='')}"))
        for job in self.list_items("/v1/fine_tuning/jobs"):
            if job.get("weftune", {}).get("suffix") == name:
                return job
        raise UserError(f"there is no job {name}; see weftune jobs list")

    def change_job(self, id: str, verb: str) -> dict[str, Any]:
        path = f"/v1/fine_tuning/jobs/{urllib.parse.quote(id, safe='')}/{verb}"
        return dict(self.request("POST", path))

    def adapter(self, id: str) -> bytes:
        """Return the adapter of a finished job as a tar archive."""
        return self._send_request("GET", f"/api/jobs/{urllib.parse.quote(id, safe='')}/adapter", None, {})

    def events(self, id: str) -> Sequence[dict[str, Any]]:
        """Return all events of a job, the oldest first."""
        return list(self.list_items(f"/v1/fine_tuning/jobs/{urllib.parse.quote(id, safe='')}/events"))[::-1]


def submitted_jobs(run: RunSpec) -> Iterator[tuple[JobSpec, Sweep | None]]:
    """Yield the jobs to submit from a jobs file, each with its sweep if it has one. A sweep is submitted as
    one job; the service creates the sweep's trials (one job for each combination of values)."""
    sweeps = {trial.name: sweep for sweep in run.sweeps for trial in sweep.trials}
    for job in run.jobs:
        if (sweep := sweeps.get(job.name)) is None:
            yield job, None
        elif job.name == sweep.trials[0].name:
            yield trial_job(sweep, Trial(sweep.name, {})), sweep


def job_request(job: JobSpec) -> dict[str, Any]:
    """Return the body of the request that submits a job. The ids of its files and the name of its base are
    still missing in it."""
    values = resolve_job(job)
    extension = {key: values[key] for key in EXTENSION_KEYS if values.get(key) is not None}
    extension["clip"] = 0 if job.clip is None else job.clip
    # The service reads held-out rows from an uploaded file, and the objective adds a reward model's head.
    omitted = ("path", "modules_to_save")
    for key in ("adapter", "eval"):
        if key in extension:
            extension[key] = {
                name: value
                for name, value in values[key].items()
                if value is not None and name not in omitted
            }
    extension |= {key: values["data"][key] for key in ("max_length", "train_on") if values["data"].get(key)}
    extension = {key: value for key, value in extension.items() if value != {}}
    return {
        "suffix": job.name,
        "seed": job.seed,
        "hyperparameters": {"batch_size": job.batch_size},
        "weftune": extension,
    }


def refuse_unsupported_jobs(run: RunSpec) -> None:
    """Raise an error for jobs that a service does not support: those with local files other than rows, with
    mixtures of datasets, or with another job to start from."""
    mistakes: list[Mistake] = []
    for sweep in run.sweeps:
        if sweep.spec.search == "tpe":
            sentence = "a service takes no tpe; write search: random, or train the sweep with weftune train"
            mistakes.append(Mistake(f"{sweep.name} sweep.search", sentence))
    defaults = {item.name: getattr(DataSpec(), item.name) for item in fields(DataSpec)}
    for job in run.jobs:
        data, place = job.data, run.locate
        if len(data.sources) != 1 or not Path(data.sources[0].path).is_file():
            sentence = "a service takes one local file of rows for each job; write its path"
            mistakes.append(Mistake(place(job.name, "data"), sentence))
        for key in ("split", "chat_template", "skip_bad_rows", "format"):
            if getattr(data, key) != defaults[key]:
                mistakes.append(
                    Mistake(place(job.name, "data", key), "is not taken by a service; leave it out")
                )
        if job.adapter.init_from is not None:
            sentence = "is not taken by a service; start from the model name of a finished job instead"
            mistakes.append(Mistake(place(job.name, "adapter", "init_from"), sentence))
    if mistakes:
        raise SpecError(mistakes)


def _row_lines(path: str, data: DataSpec) -> Iterator[bytes]:
    """Yield the rows of a file, in any format that training reads, as JSON Lines."""
    table = open_path(path, None, Path(path).name)
    for number, row in enumerate(table.rows()):
        if data.limit is not None and number == data.limit:
            return
        if row.problem is not None:
            raise DataError(Mistake(row.location, row.problem))
        yield json.dumps(rename_columns(row.value, data.columns), ensure_ascii=False).encode() + b"\n"


def _http_error_sentence(error: urllib.error.HTTPError) -> str:
    try:
        found = json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{error.url} answered {error.code} {error.reason}, which is no answer of a service"
    return str(found)
