"""The base class of all adapter kinds: a new kind extends PlainKind.

A kind defines the initial values of its parameters, their effect on a job's rows in plain torch, and their
names and config in PEFT's files.

Shapes: T rows, K inputs, N outputs of a site (an adapted linear); L rows of one job.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weftune.adapters.experts import ExpertBank
from weftune.adapters.files import read_tensors, write_folder
from weftune.adapters.folder import CONFIG, read_config, refuse_slow_patterns, wrap_config_errors
from weftune.adapters.kind import (
    Frozen,
    JobAdapter,
    NewAdapter,
    Parameters,
    Pass,
    SiteBank,
    SiteParts,
    SiteTensors,
    TiledPart,
)
from weftune.adapters.kinds import KINDS
from weftune.adapters.scalar_head import STORED_HEAD, fill_head, stored_head
from weftune.adapters.target import HEAD, TOKENS
from weftune.adapters.token_rows import merge_tokens
from weftune.adapters.vector import SHARED, ParameterShape, VectorLayout
from weftune.core.batch import Segment
from weftune.core.shapes import SiteShape
from weftune.errors import AdapterError
from weftune.ops.accumulate import accumulate_gradient
from weftune.ops.dropout import keep_mask_TK, mask_key
from weftune.ops.site import RowScale, replace_rows

PREFIX = "base_model.model."
KIND, BASE = "weftune_kind", "base_model_name_or_path"
"""Keys that the config file of an adapter has in addition to the keys of its spec, if PEFT does not have the
adapter's kind."""


@dataclass(frozen=True, slots=True)
class JobAt:
    """A job's adapter at one linear in one pass: the job's rows, and access to the adapter's weights and
    gradients."""

    adapter: JobAdapter
    site: SiteShape
    segment: Segment
    active_pass: Pass
    weights: Parameters
    frozen: Frozen
    cache: dict[tuple[str, str], Tensor]
    """Maps (site, name) to a tensor that `once` has computed for that linear."""

    def trained(self, name: str) -> Tensor:
        """Return a parameter of this linear, whose gradient autograd adds to the job's accumulator."""
        return self._trainable_weight(self.site.name, name)

    def shared(self, name: str) -> Tensor:
        """Return a parameter that all linears share, whose gradient autograd adds to the job's
        accumulator."""
        return self._trainable_weight(SHARED, name)

    def detached_parameter(self, name: str) -> Tensor:
        """Return a parameter of this linear that autograd does not track. Its gradient is added by calling
        `add_gradient`."""
        return self.weights[self.site.name, name]

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Add `gradient` to the accumulated gradient of a parameter of this linear."""
        self.active_pass.totals[self.adapter.job][self.site.name, name].add_(gradient)

    def constant(self, name: str) -> Tensor:
        """Return a constant tensor of the adapter's kind (such as a random matrix of VeRA) by its name."""
        return self.weights[SHARED, name]

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of `make`, a function of the linear's frozen weight. The function is called once
        per linear, and its result is cached under `name`."""
        if (self.site.name, name) not in self.cache:
            self.cache[self.site.name, name] = make()
        return self.cache[self.site.name, name]

    def over_all_inputs(self, sum_N: Tensor) -> Tensor:
        """Return a sum over all inputs of the linear. `sum_N` is the sum over the inputs that are on this
        shard (a worker's part of the linear)."""
        if not self.site.sums_outputs:
            return sum_N
        assert self.active_pass.sum_over_shards is not None, "the site is divided among shards"
        total_N = sum_N.detach().clone()
        self.active_pass.sum_over_shards(total_N)
        return total_N

    @property
    def drops(self) -> bool:
        return self.active_pass.training and self.adapter.spec.dropout > 0.0

    def dropped(self, x_LK: Tensor) -> Tensor:
        """Apply the job's dropout to x in training. Return x unchanged in evaluation."""
        probability = self.adapter.spec.dropout
        if not self.drops:
            return x_LK
        index_L = self.active_pass.microbatch.token_index_T[self.segment.rows]
        own = mask_key(self.adapter.seed, self.segment.step, self.site.name)
        kept = keep_mask_TK(own, index_L, x_LK.shape[1], probability, self.site.first_input)
        return torch.where(kept, x_LK, 0.0) / (1.0 - probability)

    def _trainable_weight(self, site: str, name: str) -> Tensor:
        total = self.active_pass.totals[self.adapter.job][site, name]
        return accumulate_gradient(self.weights[site, name], total, self.active_pass.anchor)


@dataclass(frozen=True, slots=True)
class JobPart:
    """A job's changes to its rows of a linear: y = after(g_out ⊙ ((x ⊙ g_in)Wᵀ + add(x)) + b), with scales
    g_in and g_out and functions `add` and `after`. Any of these changes may be absent."""

    add: Callable[[Tensor], Tensor] | None = None
    """Function that maps the inputs x_LK to values that are added to the outputs, [L, N]."""
    g_in_K: Tensor | None = None
    g_out_N: Tensor | None = None
    scales_bias: bool = False
    """Whether g_out also scales the bias b."""
    after: Callable[[Tensor], Tensor] | None = None
    """Function that maps the linear's outputs y_LN to the outputs that replace them."""


class PlainBank(SiteBank):
    def __init__(self, sites: Sequence[SiteShape], part: Callable[[JobAt], JobPart]) -> None:
        super().__init__(sites)
        self._part = part
        self._cache: dict[tuple[str, str], Tensor] = {}

    def parts(self, site: str, frozen: Frozen, active_pass: Pass) -> SiteParts:
        added, g_in, g_out, behind = [], [], [], []
        for segment in self.segments(active_pass):
            adapter, weights = self._attached[segment.adapter_job or ""]
            job_site = JobAt(adapter, self._sites[site], segment, active_pass, weights, frozen, self._cache)
            part = self._part(job_site)
            others = part.add is part.g_in_K is part.g_out_N is None
            assert others or adapter.job not in active_pass.gathered_rows, (
                "only outputs are changed in gathered rows"
            )
            start, stop = segment.start, segment.stop
            if part.add is not None:
                added.append((segment.rows, part.add))
            if part.after is not None:
                behind.append((active_pass.gathered_rows.get(adapter.job, segment.rows), part.after))
            if part.g_in_K is not None:
                g_in.append(RowScale(start, stop, part.g_in_K))
            if part.g_out_N is not None:
                g_out.append(RowScale(start, stop, part.g_out_N, part.scales_bias))

        def add(x_TK: Tensor, y_TN: Tensor) -> Tensor:
            return replace_rows(y_TN, [(rows, y_TN[rows] + one(x_TK[rows])) for rows, one in added])

        return SiteParts(add if added else None, tuple(g_in), tuple(g_out), tuple(behind))


@dataclass(frozen=True, slots=True)
class MergeAt:
    """A linear of the base and the trained adapter that is to be merged into it. All tensors are float64."""

    spec: Any
    site: SiteShape
    weight_NK: Tensor
    bias_N: Tensor | None
    own: Mapping[str, Tensor]
    """Maps names to the adapter's parameters at this linear and to the kind's constants."""


class PlainKind:
    """A kind of adapter, such as LoRA. The methods that every kind has to define come first."""

    name: str
    """Name of the kind, which is the value of the key `kind` in an adapter spec."""

    # -- what a kind defines -----------------------------------------------------------------------------

    def part(self, job_site: JobAt) -> JobPart:
        """Return the changes that a job's adapter makes to the job's rows at one adapted linear."""
        raise NotImplementedError

    def start(self, new_adapter: NewAdapter) -> None:
        """Set the initial values of all parameters of a new adapter."""
        raise NotImplementedError

    def merged(self, merge_site: MergeAt) -> tuple[Tensor, Tensor | None]:
        """Return the weight and the bias of a linear after the adapter has been merged into them."""
        raise self._unmergeable_error()

    # -- how it is stored: as in PEFT, if PEFT has the kind ----------------------------------------------

    def stored_name(self, site: str, name: str) -> str:
        """Return the name that a parameter has in an adapter file."""
        return f"{PREFIX}{site}.{name}"

    def config(self, spec: Any, adapted_sites: Sequence[str], sites: Sequence[SiteShape], base: str) -> Any:
        """Return the adapter's config: an object of PEFT's config class, or a mapping if PEFT does not have
        the kind."""
        keys = {item.name: getattr(spec, item.name) for item in fields(spec)}
        return {KIND: keys.pop("kind"), BASE: base, **keys, "init_from": None}

    def read_spec(self, config: Mapping[str, Any]) -> Any:
        """Return the spec (kind and settings) that an adapter folder's config describes."""
        own = {key: value for key, value in config.items() if key not in (KIND, BASE)}
        lists = {key: tuple(value) for key, value in own.items() if isinstance(value, list)}
        return KINDS[config[KIND]](**{**own, **lists})

    def to_stored(self, spec: Any, site: str, name: str, value: Tensor) -> Tensor:
        return value

    def from_stored(self, spec: Any, site: str, name: str, value: Tensor) -> Tensor:
        return value

    extra_tensor_names: tuple[str, ...] = ()
    """Names of the tensors that `extra_tensors` returns, as they occur in adapter files."""

    def extra_tensors(self, spec: Any, sites: Sequence[SiteShape]) -> Mapping[str, Tensor]:
        """Return the tensors, besides the trained parameters, that adapter files of this kind contain."""
        return {}

    # -- common to all kinds -----------------------------------------------------------------------------

    def layout(self, spec: Any, sites: Sequence[SiteShape]) -> VectorLayout:
        outside = {
            SHARED: spec.shapes_outside_linears(sites),
            **spec.embedding_row_shapes(sites),
            **spec.scalar_head_shapes(sites),
        }
        found = [
            ParameterShape(site, name, shape, rate=self.rate(spec, name))
            for site, shapes in outside.items()
            for name, shape in shapes.items()
        ]
        for site in filter(spec.adapts, sites):
            active = site.active_matrices if site.experts else None
            for name, shape in spec.shapes_at(site).items():
                found.append(ParameterShape(site.name, name, shape, self.rate(spec, name), active))
        return VectorLayout(tuple(found))

    def rate(self, spec: Any, name: str) -> float:
        """Return the factor by which the job's learning rate is multiplied for the parameter `name`."""
        return 1.0

    def adapts(self, spec: Any, site: str) -> bool:
        """Return whether the adapter changes the outputs of this linear."""
        return bool(spec.targets_site(site))

    def rows_before(self, spec: Any) -> int:
        """Return the number of virtual tokens that the adapter inserts before every sample. Their embeddings
        are the adapter's parameter ROWS."""
        return int(spec.rows_before)

    def constants_key(self, spec: Any) -> Hashable | None:
        """Return a key of the kind's constant tensors, which jobs with equal keys share. None if the kind has
        no constants."""
        return None

    def constants(self, spec: Any, sites: Sequence[SiteShape], like: Tensor) -> Mapping[str, Tensor]:
        """Return the kind's constant tensors by name. All linears read them, and they are neither trained nor
        saved. They have the dtype and the device of `like`."""
        return {}

    def before_step(self, adapter: JobAdapter, step: int, masters: Callable[[], Parameters]) -> None:
        """Change the master weights before the optimizer step `step` if a phase of training ends there. Kinds
        whose training has no phases do nothing."""

    def bank(self, sites: Sequence[SiteShape]) -> SiteBank:
        return PlainBank(sites, self._adapted_part)

    def _adapted_part(self, job_site: JobAt) -> JobPart:
        return self.part(job_site) if self.adapts(job_site.adapter.spec, job_site.site.name) else JobPart()

    def expert_bank(self, sites: Sequence[SiteShape]) -> ExpertBank:
        """Return an empty object for the parameters of all jobs' adapters on a layer's experts. Called only
        for adapters that have parameters at experts."""
        raise AssertionError(f"a {self.name} adapter has no parameters at experts")

    def is_tiled(self, spec: Any) -> bool:
        """Return whether the tiled kernels can compute adapters of this spec. Other adapters are computed in
        plain torch, as `part` describes them."""
        return False

    def tiled_part(self, tensors: SiteTensors) -> TiledPart | None:
        """Return the adapter at one linear as input of the tiled kernels, or None if the linear is not
        adapted."""
        raise AssertionError(f"a {self.name} adapter is not tiled")

    def gathers(self, spec: Any) -> bool:
        """Return whether a CUDA graph can contain adapters of this spec although the tiled kernels do not
        compute them. True only if the adapters change nothing about linears but their outputs, by an
        `ops.site.RowChange`."""
        return False

    def initialise(self, new_adapter: NewAdapter, sites: Sequence[SiteShape]) -> None:
        """Initialise the parameters of a new adapter from its job's seed or from the folder `init_from`.
        `sites` are the linears of the whole base. The scalar head is drawn unless it is in that folder."""
        fill_head(new_adapter)
        if new_adapter.adapter.spec.init_from is None:
            self.start(new_adapter)
            return
        found = self.read_start(new_adapter.adapter.spec, sites)
        for (site, name), value in new_adapter.parameters.items():
            if name != HEAD or (site, name) in found:
                value.copy_(found[site, name])

    def check_start(self, spec: Any, sites: Sequence[SiteShape]) -> None:
        """Raise AdapterError if the folder `spec.init_from` cannot initialise an adapter on the linears in
        `sites`."""
        if isinstance(spec.init_from, str):
            self.read_start(spec, sites)

    def read_start(self, spec: Any, sites: Sequence[SiteShape]) -> dict[tuple[str, str], Tensor]:
        """Return the parameters in the folder `spec.init_from`. They must have the names and shapes of the
        job's adapter."""
        assert isinstance(spec.init_from, str), "the adapter of a job has a folder when it is read"
        return self.read(Path(spec.init_from), spec, sites)

    def read(self, folder: Path, spec: Any, sites: Sequence[SiteShape]) -> dict[tuple[str, str], Tensor]:
        """Return the parameters in an adapter folder, except a scalar head, in the shapes that training
        uses."""
        tensors = read_tensors(folder)
        parameters = (one for one in self.layout(spec, sites).parameters if one.name != HEAD)
        own = {self.stored_name(one.site, one.name): one for one in parameters}
        others = {STORED_HEAD, *self.extra_tensor_names}
        self.refuse_other_tensors(folder, spec, tensors.keys() - others, own.keys())
        found = {}
        for stored, one in own.items():
            value = self.from_stored(spec, one.site, one.name, tensors[stored])
            if value.shape != one.shape:
                raise AdapterError(
                    f"{folder} does not fit: {stored} is {list(tensors[stored].shape)}, and the adapter "
                    f"has {list(one.shape)} there"
                )
            found[one.site, one.name] = value
        return found

    def refuse_other_tensors(
        self, folder: Path, spec: Any, stored_names: Set[str], own_names: Set[str]
    ) -> None:
        """Raise AdapterError if the names of the folder's tensors, `stored_names`, are not the names
        `own_names` that the adapter expects."""
        if not (odd := sorted(stored_names ^ own_names)):
            return
        where = "only in the folder" if odd[0] in stored_names else "not in the folder"
        more = f", and {len(odd) - 1} more differ" if len(odd) > 1 else ""
        if spec.init_from is None:
            raise AdapterError(
                f"{folder} is for another base, or its {CONFIG} is of another adapter: on this base {odd[0]} "
                f"is {where}{more}"
            )
        raise AdapterError(
            f"{folder} and the job's {self.name} adapter do not have the same weights: {odd[0]} is "
            f"{where}{more}; set adapter.kind, adapter.targets and adapter.layers as the folder has them"
        )

    def save(
        self, folder: Path, spec: Any, parameters: Parameters, sites: Sequence[SiteShape], base: str
    ) -> None:
        """Write an adapter folder, in PEFT's format if PEFT has the kind."""
        adapted_sites = list(dict.fromkeys(site for site, name in parameters if name != HEAD))
        tensors = {
            self.stored_name(site, name): self.to_stored(spec, site, name, value)
            for (site, name), value in parameters.items()
            if name != HEAD
        }
        config = self.config(spec, adapted_sites, sites, base)
        more = {**stored_head(parameters), **self.extra_tensors(spec, sites)}
        write_folder(folder, {**tensors, **more}, config)

    def portable(self, folder: Path, target: Path) -> int:
        """Write to `target` an equivalent of the adapter in `folder` that has one rank and one alpha at all
        linears, for servers that support only such adapters. Return the rank."""
        remedy = "nor can it be merged into a model that they load"
        if KINDS[self.name].is_mergeable:
            remedy = "for a model that they load, run weftune export --merged"
        raise AdapterError(f"{folder} is a {self.name} adapter, which servers do not load; {remedy}")

    def merge(self, folder: Path, modules: Mapping[str, nn.Module], sites: Sequence[SiteShape]) -> None:
        """Merge the adapter in `folder` into the weights of `modules`, which maps names of linears to the
        base's modules."""
        if not KINDS[self.name].is_mergeable:
            raise self._unmergeable_error()
        spec = self.spec_of(folder)
        refuse_slow_patterns(folder, spec, [site.name for site in sites])
        with wrap_config_errors(folder):
            adapted = self.layout(spec, sites).parameters
        if not adapted:
            raise AdapterError(f"{folder} is for another base: it adapts no module of this one")
        parameters = self.read(folder, spec, sites)
        constants = self.constants(spec, sites, torch.zeros((), dtype=torch.float64))
        for site in sites:
            own = {name: value.double() for (where, name), value in parameters.items() if where == site.name}
            if own:
                self._merge_site(spec, site, modules[site.name], {**constants, **own})
        for (path, name), value in parameters.items():
            if name == TOKENS:
                merge_tokens(folder, path, spec.trained_tokens, value, modules)

    def spec_of(self, folder: Path) -> Any:
        """Return the spec (kind and settings) from an adapter folder's config. The config is checked, since
        it is not trusted."""
        config = read_config(folder)
        with wrap_config_errors(folder):
            return self.read_spec(config)

    def _unmergeable_error(self) -> AdapterError:
        return AdapterError(f"a {self.name} adapter cannot be merged into the weights of a base")

    def _merge_site(self, spec: Any, site: SiteShape, module: nn.Module, own: Mapping[str, Tensor]) -> None:
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        weight_NK = (weight.T if site.fan_in_fan_out else weight).double()
        bias_N = bias.double() if isinstance(bias, Tensor) else None
        merged_NK, merged_N = self.merged(MergeAt(spec, site, weight_NK, bias_N, own))
        if bias_N is None and merged_N is not None:
            raise AdapterError(
                f"the base has no bias at {site.name} that a {self.name} adapter can be merged into"
            )
        merged = merged_NK.T.contiguous() if site.fan_in_fan_out else merged_NK
        # New parameters: written in place, the change would reach anything tied to the weight.
        module.weight = nn.Parameter(merged.to(weight.dtype), requires_grad=False)
        if merged_N is not None:
            module.bias = nn.Parameter(merged_N.to(weight.dtype), requires_grad=False)
