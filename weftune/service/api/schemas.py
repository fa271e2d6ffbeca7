"""Requests and responses of OpenAI's API, with the fields that OpenAI's client has. The OpenAPI document is
generated from these classes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from weftune.core.bounds import SEED, format_value
from weftune.jobs.spec.keys import nearest_word
from weftune.service.api.errors import UNKNOWN_KEY

MAX_SUFFIX = 64
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_EPOCHS = 1000
MAX_BATCH = 1_000_000

Auto = Literal["auto"]
Id = Annotated[str, Field(min_length=1, max_length=64)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[int, Field(ge=0, description="Seconds since 1970.")]
JobState = Literal["validating", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
"""State of a job in Weftune's own API."""
State = Literal["validating_files", "queued", "running", "succeeded", "failed", "cancelled"]
Purpose = Literal["fine-tune", "fine-tune-results"]


class Body(BaseModel):
    """The body of a request. Unknown keys are refused, and types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        known = list(cls.model_fields)
        for key in values if isinstance(values, dict) else ():
            if key not in known:
                near = nearest_word(key, known)
                hint = f"did you mean {near}?" if near else f"known keys are {', '.join(known)}"
                raise PydanticCustomError(
                    UNKNOWN_KEY, "is not known; {hint}", {"key": format_value(key)[1:-1], "hint": hint}
                )
        return values


# -- files ----------------------------------------------------------------------------------------------


class File(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: Count
    created_at: Seconds
    filename: str
    purpose: Purpose
    status: Literal["uploaded", "processed", "error"] = "processed"
    expires_at: Seconds | None = None
    status_details: str | None = None


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class Page(BaseModel):
    """A part of a list. The next part is requested with `after`, the id of the last item."""

    object: Literal["list"] = "list"
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class FilePage(Page):
    data: list[File]


# -- jobs -----------------------------------------------------------------------------------------------


class Hyperparameters(Body):
    n_epochs: Auto | Annotated[int, Field(ge=1, le=MAX_EPOCHS)] = "auto"
    batch_size: Auto | Annotated[int, Field(ge=1, le=MAX_BATCH)] = "auto"
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0, le=1e6)] = "auto"


class DpoHyperparameters(Hyperparameters):
    beta: Auto | Annotated[float, Field(gt=0, le=1e6)] = "auto"


class SupervisedMethod(Body):
    hyperparameters: Hyperparameters | None = None


class DpoMethod(Body):
    hyperparameters: DpoHyperparameters | None = None


class Method(Body):
    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: SupervisedMethod | None = None
    dpo: DpoMethod | None = None
    reinforcement: Any = Field(default=None, description="Refused.")


class Extension(Body):
    """Weftune's own keys of a job, with the names and ranges that they have in jobs.yaml. They take values
    only: a key that names a file or a module of the server does not exist here."""

    adapter: dict[str, Any] | None = Field(
        default=None, description="Keys of `adapter` in jobs.yaml except init_from.", examples=[{"rank": 16}]
    )
    objective: str | dict[str, Any] | None = Field(
        default=None,
        description="Keys of `objective` in jobs.yaml.",
        examples=["orpo", {"kind": "dpo", "beta": 0.2}],
    )
    priority: int | None = Field(default=None, ge=-(10**9), le=10**9)
    learning_rate: float | None = Field(
        default=None, gt=0, description="Instead of learning_rate_multiplier."
    )
    steps: int | None = Field(default=None, ge=1, description="Optimizer steps, instead of n_epochs.")
    epochs: float | None = Field(default=None, gt=0, le=1e9, description="Instead of n_epochs.")
    schedule: Literal["linear", "cosine", "constant"] | None = None
    warmup: float | None = Field(default=None, ge=0)
    weight_decay: float | None = Field(default=None, ge=0)
    betas: list[float] | None = None
    eps: float | None = Field(default=None, gt=0)
    clip: float | None = Field(default=None, ge=0)
    eval: dict[str, Any] | None = Field(
        default=None,
        description="`fraction` and `every` of `eval` in jobs.yaml.",
        examples=[{"fraction": 0.1}],
    )
    early_stop: int | dict[str, Any] | None = None
    keep: Literal["best", "last"] | None = None
    sweep: dict[str, Any] | None = Field(
        default=None,
        description="Keys of `sweep` in jobs.yaml; `search` is grid or random. The job becomes a sweep, and "
        "its trials are jobs.",
        examples=[
            {"over": {"learning_rate": [1e-4, 1e-3], "adapter.rank": [8, 64]}},
            {
                "search": "random",
                "trials": 24,
                "over": {"learning_rate": {"min": 1e-5, "max": 1e-3, "log": True}},
                "halving": {"at": [0.1, 0.3], "keep": 0.33},
            },
        ],
    )
    max_length: int | None = Field(default=None, ge=2, description="Maximum tokens of a sample.")
    train_on: Literal["assistant", "all", "completion"] | None = None
    token_budget: int | None = Field(
        default=None,
        ge=1,
        le=10**15,
        description="Maximum number of tokens that the job trains on; of a sweep, each trial.",
    )
    deadline: float | None = Field(
        default=None,
        gt=0,
        le=1e11,
        description="Time by which the job should have ended, in seconds since 1970.",
    )


class JobRequest(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "demo",
                    "training_file": "file-abc123",
                    "suffix": "support",
                    "seed": 7,
                    "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3}}},
                    "weftune": {"adapter": {"rank": 16}, "priority": 1},
                }
            ]
        }
    )

    model: str = Field(min_length=1, max_length=512)
    training_file: Id
    validation_file: Id | None = None
    suffix: str | None = Field(
        default=None, min_length=1, max_length=MAX_SUFFIX, pattern=r"^[A-Za-z0-9._-]+$"
    )
    seed: int | None = Field(default=None, ge=SEED.at_least, le=2**63 - 1)
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=MAX_METADATA_KEY)],
                Annotated[str, Field(max_length=MAX_METADATA_VALUE)],
            ],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    method: Method | None = None
    hyperparameters: Hyperparameters | None = Field(default=None, description="Older form of `method`.")
    integrations: list[Any] | None = Field(default=None, description="Refused unless empty.")
    weftune: Extension | None = Field(default=None, description="Keys that OpenAI's API does not have.")


class JobError(BaseModel):
    code: str
    message: str
    param: str | None = None


class UsedHyperparameters(BaseModel):
    """The hyperparameters of a job, in which `auto` has been replaced by numbers."""

    n_epochs: Auto | int | None = None
    batch_size: Auto | int | None = None
    learning_rate_multiplier: Auto | float | None = None
    beta: Auto | float | None = None


class UsedMethod(BaseModel):
    class Used(BaseModel):
        hyperparameters: UsedHyperparameters | None = None

    type: Literal["supervised", "dpo"]
    supervised: Used | None = None
    dpo: Used | None = None


class JobDetails(BaseModel):
    """Fields of a job that OpenAI's API does not have."""

    suffix: str | None = None
    state: Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
    reason: str = Field(default="", description="Why the job waits, is paused, failed or was cancelled.")
    step: Count = 0
    steps: Count = Field(default=0, description="Total number of steps; 0 until the rows are counted.")
    priority: int = 0
    eval_loss: float | None = None
    warning: str = ""
    sweep: str | None = Field(
        default=None, description="Of a trial: the job of its sweep. Of the job of a sweep: its own id."
    )
    trial: dict[str, Any] | None = Field(
        default=None, description="Of a trial: the values in which it differs from other trials."
    )
    job: dict[str, Any] = Field(description="The job with the keys of jobs.yaml, without paths.")


class Job(BaseModel):
    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: Seconds
    model: str
    organization_id: str = Field(description="The tenant.")
    status: State
    training_file: str
    validation_file: str | None = None
    hyperparameters: UsedHyperparameters
    method: UsedMethod
    seed: int
    metadata: dict[str, str] | None = None
    fine_tuned_model: str | None = None
    finished_at: Seconds | None = None
    estimated_finish: Seconds | None = None
    trained_tokens: Count | None = None
    result_files: list[str] = []
    error: JobError | None = None
    integrations: list[Any] = []
    weftune: JobDetails


class JobPage(Page):
    data: list[Job]


class JobEvent(BaseModel):
    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: Seconds
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any] = {}


class EventPage(Page):
    data: list[JobEvent]


class CheckpointMetrics(BaseModel):
    step: float | None = None
    train_loss: float | None = None
    train_mean_token_accuracy: float | None = None
    valid_loss: float | None = None
    valid_mean_token_accuracy: float | None = None
    full_valid_loss: float | None = None
    full_valid_mean_token_accuracy: float | None = None


class Checkpoint(BaseModel):
    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: Seconds
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    metrics: CheckpointMetrics
    step_number: Count


class CheckpointPage(Page):
    data: list[Checkpoint]


# -- models and chat ------------------------------------------------------------------------------------


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: Seconds
    owned_by: str


class ModelPage(Page):
    data: list[Model]


class ModelDeleted(BaseModel):
    id: str
    object: Literal["model"] = "model"
    deleted: bool = True


class Error(BaseModel):
    """The body of every response with a status of 400 or above."""

    class Content(BaseModel):
        message: str
        type: str
        param: str | None
        code: str | None

    error: Content
