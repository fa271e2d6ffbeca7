"""The common part of the kinds written in plain torch: a new kind extends PlainKind.

A kind defines the initial values of its parameters, what a job does to its rows, and how PEFT stores them.
Shapes: T rows, K inputs, N outputs of a site.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weftune.adapters.files import read_tensors, write_folder
from weftune.adapters.folder import CONFIG, damage_told, read_config, refuse_slow
from weftune.adapters.form import SiteTensors, TiledPart
from weftune.adapters.kind import ExpertBank, JobAdapter, NewAdapter, Parameters
from weftune.adapters.kinds import KINDS
from weftune.adapters.own_config import OwnConfig
from weftune.adapters.plain import JobAt, JobPart, PlainBank
from weftune.adapters.token_rows import merge_tokens
from weftune.adapters.tokens import TOKENS
from weftune.adapters.vector import SHARED, ParameterShape, VectorLayout
from weftune.core.shapes import SiteShape
from weftune.errors import AdapterError

PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class MergeAt:
    """A site of the base into which a finished adapter is merged; all tensors are float64."""

    spec: Any
    site: SiteShape
    weight_NK: Tensor
    bias_N: Tensor | None
    own: Mapping[str, Tensor]
    """Name → parameter of the adapter there, or constant of the kind."""


class PlainKind:
    """A kind that computes in plain torch. The methods that a new kind has to define come first."""

    name: str
    """Name of the kind in jobs: `kind` of its spec."""

    # -- what a kind defines -----------------------------------------------------------------------------

    def part(self, at: JobAt) -> JobPart:
        """Return what a job does to its rows at a site that it adapts."""
        raise NotImplementedError

    def start(self, new: NewAdapter) -> None:
        """Fill the parameters of a new adapter."""
        raise NotImplementedError

    def merged(self, at: MergeAt) -> tuple[Tensor, Tensor | None]:
        """Return the weight and the bias of a site with the adapter merged into them."""
        raise self._not_merged()

    # -- how it is stored: as in PEFT, if PEFT has the kind ----------------------------------------------

    def stored_name(self, site: str, name: str) -> str:
        """Return the name of a parameter in an adapter file."""
        return f"{PREFIX}{site}.{name}"

    def config(self, spec: Any, targeted: Sequence[str], sites: Sequence[SiteShape], base: str) -> Any:
        """Return PEFT's config of the adapter, or one of Weftune's own."""
        return OwnConfig(spec, base)

    def read_spec(self, config: Mapping[str, Any]) -> Any:
        """Return the spec that such a config describes."""
        return OwnConfig.spec_in(config)

    def to_stored(self, spec: Any, site: str, name: str, value: Tensor) -> Tensor:
        return value

    def from_stored(self, spec: Any, site: str, name: str, value: Tensor) -> Tensor:
        return value

    names_beside: tuple[str, ...] = ()
    """Names of the tensors of `beside`."""

    def beside(self, spec: Any, sites: Sequence[SiteShape]) -> Mapping[str, Tensor]:
        """Return tensors that its files hold besides its parameters."""
        return {}

    # -- common to all kinds -----------------------------------------------------------------------------

    def layout(self, spec: Any, sites: Sequence[SiteShape]) -> VectorLayout:
        own = [(site.name, spec.shapes_at(site)) for site in sites if spec.adapts(site)]
        embedded = spec.shapes_in_embedding(sites).items()
        return VectorLayout(
            tuple(
                ParameterShape(site, name, shape, rate=self.rate(spec, name))
                for site, shapes in [(SHARED, spec.shapes_outside(sites)), *embedded, *own]
                for name, shape in shapes.items()
            )
        )

    def rate(self, spec: Any, name: str) -> float:
        """Return the factor by which the job's learning rate is multiplied for a parameter."""
        return 1.0

    def adapts(self, spec: Any, site: str) -> bool:
        return bool(spec.targets_site(site))

    def rows_before(self, spec: Any) -> int:
        return int(spec.rows_before)

    def constants_key(self, spec: Any) -> Hashable | None:
        return None

    def constants(self, spec: Any, sites: Sequence[SiteShape], like: Tensor) -> Mapping[str, Tensor]:
        return {}

    def before_step(self, adapter: JobAdapter, step: int, masters: Callable[[], Parameters]) -> None:
        """Do nothing: only the step itself changes the weights."""

    def bank(self, sites: Sequence[SiteShape]) -> PlainBank:
        return PlainBank(sites, self._part)

    def is_tiled(self, spec: Any) -> bool:
        return False

    def gathers(self, spec: Any) -> bool:
        return False

    def tiled_part(self, adapter: JobAdapter, at: SiteTensors) -> TiledPart | None:
        raise AssertionError(f"a {self.name} adapter is not tiled")

    def _part(self, at: JobAt) -> JobPart:
        return self.part(at) if self.adapts(at.adapter.spec, at.site.name) else JobPart()

    def expert_bank(self, sites: Sequence[SiteShape]) -> ExpertBank:
        raise AssertionError(f"a {self.name} adapter has no parameters at experts")

    def initialise(self, new: NewAdapter, sites: Sequence[SiteShape]) -> None:
        if new.adapter.spec.init_from is None:
            self.start(new)
            return
        found = self.read_start(new.adapter.spec, sites)
        for place, value in new.parameters.items():
            value.copy_(found[place])

    def check_start(self, spec: Any, sites: Sequence[SiteShape]) -> None:
        if isinstance(spec.init_from, str):
            self.read_start(spec, sites)

    def read_start(self, spec: Any, sites: Sequence[SiteShape]) -> dict[tuple[str, str], Tensor]:
        """Return the parameters of the folder that a job starts from, which must be exactly the job's own."""
        assert isinstance(spec.init_from, str), "the adapter of a job has a folder when it is read"
        return self.read(Path(spec.init_from), spec, sites)

    def read(self, folder: Path, spec: Any, sites: Sequence[SiteShape]) -> dict[tuple[str, str], Tensor]:
        """Return the parameters of an adapter folder, as a bank holds them."""
        tensors = read_tensors(folder)
        wanted = {self.stored_name(one.site, one.name): one for one in self.layout(spec, sites).parameters}
        self.refuse_others(folder, spec, tensors.keys() - set(self.names_beside), wanted.keys())
        found = {}
        for stored, one in wanted.items():
            value = self.from_stored(spec, one.site, one.name, tensors[stored])
            if value.shape != one.shape:
                raise AdapterError(
                    f"{folder} does not fit: {stored} is {list(tensors[stored].shape)}, and the adapter "
                    f"has {list(one.shape)} there"
                )
            found[one.site, one.name] = value
        return found

    def refuse_others(self, folder: Path, spec: Any, found: Set[str], wanted: Set[str]) -> None:
        """Raise if the folder does not have the weights that `spec` has on this base."""
        if not (odd := sorted(found ^ wanted)):
            return
        where = "only in the folder" if odd[0] in found else "not in the folder"
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
        targeted = list(dict.fromkeys(site for site, _ in parameters))
        tensors = {
            self.stored_name(site, name): self.to_stored(spec, site, name, value)
            for (site, name), value in parameters.items()
        }
        config = self.config(spec, targeted, sites, base)
        write_folder(folder, {**tensors, **self.beside(spec, sites)}, config)

    def portable(self, folder: Path, target: Path) -> int:
        merged = "for a model that they load, run weftune export --merged"
        way = merged if KINDS[self.name].merges else "nor can it be merged into a model that they load"
        raise AdapterError(f"{folder} is a {self.name} adapter, which servers do not load; {way}")

    def merge(self, folder: Path, modules: Mapping[str, nn.Module], sites: Sequence[SiteShape]) -> None:
        if not KINDS[self.name].merges:
            raise self._not_merged()
        spec = self.spec_of(folder)
        refuse_slow(folder, spec, [site.name for site in sites])
        with damage_told(folder):
            adapted = self.layout(spec, sites).parameters
        if not adapted:
            raise AdapterError(f"{folder} is for another base: it adapts no module of this one")
        parameters = self.read(folder, spec, sites)
        constants = self.constants(spec, sites, torch.zeros((), dtype=torch.float64))
        for site in sites:
            own = {name: value.double() for (where, name), value in parameters.items() if where == site.name}
            if own:
                self._merge_at(spec, site, modules[site.name], {**constants, **own})
        for (path, name), value in parameters.items():
            if name == TOKENS:
                merge_tokens(folder, path, spec.trained_tokens, value, modules)

    def spec_of(self, folder: Path) -> Any:
        """Return the spec that the folder's config describes. The config is untrusted."""
        config = read_config(folder)
        with damage_told(folder):
            return self.read_spec(config)

    def _not_merged(self) -> AdapterError:
        return AdapterError(f"a {self.name} adapter cannot be merged into the weights of a base")

    def _merge_at(self, spec: Any, site: SiteShape, module: nn.Module, own: Mapping[str, Tensor]) -> None:
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
