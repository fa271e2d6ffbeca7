"""The keys of `objective` in a jobs file, with the names and defaults of TRL. This module does not import
torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from weftune.core.bounds import Bound
from weftune.data.spec import RowKind

PAIR_METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
"""Names of the metrics of objectives over preference pairs, each a mean over pairs."""
KTO_METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "kl",
)
"""Names of the metrics of KTO. Metrics of chosen answers are means over the answers with the label true, and
metrics of rejected answers over those with the label false. They are omitted if there are no such answers."""
REWARD_METRICS = ("mean_reward", "accuracy", "margin", "min_reward", "max_reward")
"""Names of the metrics of reward models. The last two are the minimum and the maximum over all samples."""
OBJECTIVE_METRICS = tuple(dict.fromkeys((*PAIR_METRICS, *KTO_METRICS, *REWARD_METRICS)))
"""Names of the metrics of all objectives."""
MAX_METRICS = 6
"""Maximum number of values (sums and maxima) from which the metrics of one objective are computed."""
BETA = Bound(above=0)
SMOOTHING = Bound(at_least=0, below=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSpec:
    """Base class of the settings (keys in a jobs file) of all objectives."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    implementation: ClassVar[str]
    """Import path `package.module:Class` of the objective. The class is imported only for training, because
    it needs torch."""
    learning_rate: ClassVar[float] = 1e-6
    """Default learning rate of jobs with this objective, if the user sets none."""
    row_kind: ClassVar[RowKind] = "pairs"
    """Kind of dataset rows that the objective requires, such as preference pairs."""
    supervises_prompts: ClassVar[bool] = False
    """Whether the prompt tokens of chosen samples are supervised in addition to their answers."""
    needs_reference: ClassVar[bool] = False
    """Whether the objective needs the log-probabilities of a reference policy."""
    scalar_head: ClassVar[bool] = False
    """Whether the objective trains a scalar head in addition to the adapter."""
    metrics: ClassVar[tuple[str, ...]] = PAIR_METRICS
    """Names of the metrics that the objective reports in addition to the loss."""
    max_metric_count: ClassVar[int] = 0
    """Number of metrics, at the end of `metrics`, that are maxima over rows. All others are means."""

    kind: str

    @property
    def mismatched_samples(self) -> bool:
        """Whether the objective needs mismatched samples, which are prompts with answers to other prompts."""
        return False

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield each key that contradicts another key, with the error message."""
        yield from ()

    def named_metrics(self, metric_means: Sequence[float]) -> dict[str, float]:
        """Return a dict from metric name to value. `metric_means` has the values of the objective's metrics
        (means, then maxima), and may be longer, filled up with zeros."""
        return dict(zip(self.metrics, metric_means, strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSpec(ObjectiveSpec):
    """Settings of supervised fine-tuning."""

    learning_rate: ClassVar[float] = 2e-4
    row_kind: ClassVar[RowKind] = "answers"
    metrics: ClassVar[tuple[str, ...]] = ()

    kind: Literal["sft"] = "sft"


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoSpec(ObjectiveSpec):
    """Settings of direct preference optimisation (DPO) against a reference policy."""

    implementation: ClassVar[str] = "weftune.objectives.dpo:Dpo"
    needs_reference: ClassVar[bool] = True

    kind: Literal["dpo"] = "dpo"
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid"
    beta: Annotated[float, BETA] = 0.1
    label_smoothing: Annotated[float, SMOOTHING] = 0.0
    """Assumed probability that the labels of a preference pair are swapped. Used with `loss_type: robust`
    only."""

    def faults(self) -> Iterator[tuple[str, str]]:
        if self.label_smoothing and self.loss_type != "robust":
            yield "label_smoothing", "is used with loss_type: robust only; write that, or leave it out"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpoSpec(ObjectiveSpec):
    """Settings of contrastive preference optimisation (CPO). With `loss_type: simpo` and `cpo_alpha: 0`, this
    is SimPO."""

    implementation: ClassVar[str] = "weftune.objectives.cpo:Cpo"

    kind: Literal["cpo"] = "cpo"
    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    beta: Annotated[float, BETA] = 0.1
    label_smoothing: Annotated[float, SMOOTHING] = 0.0
    """Assumed probability that the labels of a preference pair are swapped. Used with `sigmoid` and `simpo`
    only."""
    cpo_alpha: Annotated[float, Bound(at_least=0)] = 1.0
    """Weight of the mean negative log-probability of the chosen answers' tokens."""
    simpo_gamma: Annotated[float, Bound(at_least=0)] = 0.5
    """Target margin between the rewards of the chosen and of the rejected answer. Used with `loss_type:
    simpo` only."""

    def faults(self) -> Iterator[tuple[str, str]]:
        if self.label_smoothing and self.loss_type not in ("sigmoid", "simpo"):
            yield "label_smoothing", "is used with loss_type: sigmoid or simpo only; leave it out"
        if self.simpo_gamma != CpoSpec().simpo_gamma and self.loss_type != "simpo":
            yield "simpo_gamma", "is used with loss_type: simpo only; write that, or leave it out"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrpoSpec(ObjectiveSpec):
    """Odds ratio preference optimisation: supervised fine-tuning on the chosen samples, prompts included, and
    a penalty on the odds of rejected answers."""

    implementation: ClassVar[str] = "weftune.objectives.orpo:Orpo"
    supervises_prompts: ClassVar[bool] = True

    kind: Literal["orpo"] = "orpo"
    beta: Annotated[float, BETA] = 0.1
    """Weight of the odds ratio term, the paper's λ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KtoSpec(ObjectiveSpec):
    """Kahneman-Tversky optimisation against a reference policy, from single answers with a label."""

    implementation: ClassVar[str] = "weftune.objectives.kto:Kto"
    row_kind: ClassVar[RowKind] = "labelled"
    needs_reference: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = KTO_METRICS

    kind: Literal["kto"] = "kto"
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    beta: Annotated[float, BETA] = 0.1
    desirable_weight: Annotated[float, Bound(at_least=0)] = 1.0
    """Weight of the losses of answers with the label true."""
    undesirable_weight: Annotated[float, Bound(at_least=0)] = 1.0
    """Weight of the losses of answers with the label false."""

    @property
    def mismatched_samples(self) -> bool:
        return self.loss_type == "kto"

    def named_metrics(self, metric_means: Sequence[float]) -> dict[str, float]:
        if not metric_means:
            return {}
        share, chosen_reward, rejected_reward, chosen_logp, rejected_logp, kl = metric_means
        found = {"kl": kl}
        if share > 0:
            found |= {"rewards/chosen": chosen_reward / share, "logps/chosen": chosen_logp / share}
        if share < 1:
            rest = 1 - share
            found |= {"rewards/rejected": rejected_reward / rest, "logps/rejected": rejected_logp / rest}
        if 0 < share < 1:
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return {name: found[name] for name in self.metrics if name in found}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec(ObjectiveSpec):
    """Training of a reward model, whose scalar head gives the chosen answer of a pair the higher reward."""

    implementation: ClassVar[str] = "weftune.objectives.reward:Reward"
    learning_rate: ClassVar[float] = 1e-4
    scalar_head: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = REWARD_METRICS
    max_metric_count: ClassVar[int] = 2

    kind: Literal["reward"] = "reward"
    center_rewards_coefficient: Annotated[float | None, Bound(at_least=0)] = None
    """Weight of a loss term that keeps rewards near zero: the squared sum of a pair's rewards. None disables
    the term."""

    def named_metrics(self, metric_means: Sequence[float]) -> dict[str, float]:
        """Return a dict from metric name to value. The minimum reward is the negative of the fourth value in
        `metric_means`, the maximum of the negative rewards."""
        named = ObjectiveSpec.named_metrics(self, metric_means)
        return named | {"min_reward": -named["min_reward"]} if named else {}


SFT_SPEC = SftSpec()
OBJECTIVES: dict[str, type[ObjectiveSpec]] = {
    "sft": SftSpec,
    "dpo": DpoSpec,
    "cpo": CpoSpec,
    "orpo": OrpoSpec,
    "kto": KtoSpec,
    "reward": RewardSpec,
}
"""Maps the name of each objective to its spec."""
ANSWER_OBJECTIVES = tuple(name for name, spec in OBJECTIVES.items() if spec.row_kind != "answers")
"""Names of the objectives whose rows are preference pairs or labelled answers."""
