"""The experts of one layer, forward + backward, with adapters of many jobs on them and without.

python -m benchmarks.gpu_experts [--shape NAME] [--jobs N] [--tokens N] [--rank R] [--breakdown] [--json FILE]

Rows: transformers' own forward of the frozen experts; the kernels with a product of our own and with the
library's, with adapters and without. --breakdown: the kernels of each by the time they take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from benchmarks.where import spent, traced
from weftune.adapters.experts import ExpertBank
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.apply import Lora
from weftune.adapters.lora.spec import LoraSpec
from weftune.bench.baselines import EXPERTS
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size, build, toy_size
from weftune.bench.table import aligned, number
from weftune.bench.timing import Hardware, Repeats, bench_hardware, measure, repeat_step
from weftune.core.shapes import SiteShape
from weftune.ops.experts import ExpertSite
from weftune.ops.lora.experts import lora_experts
from weftune.ops.lora.tiling import ProductPlan
from weftune.ops.triton import kernels_available


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's experts, tokens for them, and adapters of some jobs, each of which has as many tokens."""

    module: torch.nn.Module
    sites: tuple[SiteShape, ...]
    bank: ExpertBank
    owner_T: Tensor
    jobs: tuple[str, ...]
    x_TD: Tensor
    chosen_Tk: Tensor
    weights_Tk: Tensor

    def plain(self) -> None:
        forward = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        self._backward(partial(forward, self.module))

    def lora(self, order: ProductPlan, adapted: bool) -> None:
        device, anchor = self.x_TD.device, torch.zeros((), device=self.x_TD.device, requires_grad=True)
        sites = [
            ExpertSite(self.weight(site), self.bank.group(site.name, device) if adapted else None)
            for site in self.sites
        ]
        indices_J = (
            self.bank.adapter_indices(self.jobs, device)
            if adapted
            else self.owner_T.new_full((len(self.jobs),), -1)
        )

        def forward(x_TD: Tensor, chosen_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
            return lora_experts(x_TD, chosen_Tk, weights_Tk, anchor, sites, self.owner_T, indices_J, order)

        self._backward(forward)

    def weight(self, site: SiteShape) -> Tensor:
        return getattr(self.module, site.name.rpartition(".")[2])

    def _backward(self, forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        x_TD, weights_Tk = (tensor.detach().requires_grad_() for tensor in (self.x_TD, self.weights_Tk))
        y_TD = forward(x_TD, self.chosen_Tk, weights_Tk)
        y_TD.backward(self.x_TD)


def layer_number(size: Size, jobs: int, tokens: int, rank: int, hardware: Hardware) -> Layer:
    module = build(size, hardware).get_submodule("model.layers.0.mlp.experts")
    names, shapes = ("gate_up_proj", "down_proj"), size.expert_sites
    sites = tuple(
        SiteShape(f"mlp.experts.{name}", *shape, experts=size.experts, active_matrices=size.active)
        for name, shape in zip(names, shapes, strict=True)
    )
    bank, kind, spec = ExpertBank(sites), Lora(), LoraSpec(rank=rank, target_parameters=tuple(EXPERTS))
    layout = kind.layout(spec, sites)
    for job in range(jobs):
        weights = torch.randn(layout.size, device=hardware.device, dtype=hardware.dtype) * 0.01
        totals = torch.zeros(layout.size, device=hardware.device)
        bank.attach(
            JobAdapter(str(job), spec, job), layout.parameter_views(weights), layout.parameter_views(totals)
        )
    scores_TE = torch.randn(tokens, size.experts, device=hardware.device)
    weights_Tk, chosen_Tk = scores_TE.softmax(dim=-1).topk(size.active, dim=-1)
    owner_T = torch.arange(tokens, device=hardware.device) * jobs // tokens
    return Layer(
        module=module,
        sites=sites,
        bank=bank,
        owner_T=owner_T.int(),
        jobs=tuple(map(str, range(jobs))),
        x_TD=torch.randn(tokens, size.hidden, device=hardware.device, dtype=hardware.dtype),
        chosen_Tk=chosen_Tk,
        weights_Tk=weights_Tk.to(hardware.dtype),
    )


def main() -> None:
    parser = arguments(__doc__ or "")
    mixtures = [name for name, size in SIZES.items() if size.experts]
    parser.add_argument("--shape", choices=mixtures, default=mixtures[0])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--breakdown", action="store_true", help="the kernels of each row")
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU")
    options = parser.parse_args()
    hardware = bench_hardware(options.toy)
    if hardware is None:
        parser.error("no CUDA device that torch can use; --toy runs on the CPU")
    size, pace, tokens = SIZES[options.shape], Repeats(), options.tokens
    if options.toy:
        size, pace = toy_size(size), Repeats(0, 1, 1)
    layer = layer_number(replace(size, layers=1), options.jobs, tokens, options.rank, hardware)
    steps: dict[str, Callable[[], None]] = {"transformers, frozen": layer.plain}
    if kernels_available(layer.x_TD):
        for order, product in ((ProductPlan.fused, "our product"), (ProductPlan.wide, "the library's")):
            steps[f"kernels, frozen, {product}"] = partial(layer.lora, order, adapted=False)
            steps[f"kernels, {options.jobs} adapters, {product}"] = partial(layer.lora, order, adapted=True)
    found = {name: measure(repeat_step(step), hardware, pace).seconds or 0.0 for name, step in steps.items()}
    print(f"{size.name}: {options.jobs} jobs of rank {options.rank}, {tokens} tokens, one layer's experts\n")
    frozen = found["transformers, frozen"]
    lines = [(name, number(time, scale=1e3), number(time / frozen, ".2f")) for name, time in found.items()]
    print(aligned(("", "ms", "× frozen"), lines))
    for name, step in steps.items() if options.breakdown else ():
        print(f"\n{name}:")
        for one in spent(traced(step, hardware.device)).heaviest:
            print(f"  {one.microseconds:8.0f} µs  {one.name[:100]}")
    finish({"shape": size.name, "jobs": options.jobs, "tokens": tokens, "seconds": found}, options.json)


if __name__ == "__main__":
    main()
