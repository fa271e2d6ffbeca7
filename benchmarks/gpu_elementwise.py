"""The fused norms, activation and rotation of the Llama-3.1-8B shape, beside the same in plain transformers.

Each is timed inside a CUDA graph, over inputs that take turns so that the cache does not help. GB/s counts
once each tensor that must be read or written; a backward is the time of both passes less the forward.

    python -m benchmarks.gpu_elementwise [--rows N] [--toy] [--json FILE]

Shapes: T rows, D width, H heads, G groups, I width of the activation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned
from weftune.ops.norm import rms_norm
from weftune.ops.rotary import rotary_split
from weftune.ops.swiglu import swiglu

EPS = 1e-5
TURNS = 3
"""Sets of inputs that take turns."""
REPLAYS = 30
WARMUP = 3

Function = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Sizes:
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    groups: int = 8
    head: int = 128


@dataclass(frozen=True, slots=True)
class Side:
    """One way to compute an op: the function, and the shapes of what it takes."""

    function: Function
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """An op both ways, and the values that a pass must at least read or write."""

    name: str
    ours: Side
    theirs: Side
    forward_values: int
    backward_values: int


@dataclass(frozen=True, slots=True)
class Seconds:
    forward: float
    backward: float


def normalisation(name: str, rows: int, width: int, device: torch.device, dtype: torch.dtype) -> Case:
    norm = LlamaRMSNorm(width, eps=EPS).to(device, dtype).requires_grad_(False)
    values, shapes = rows * width, ((rows, width),)
    ours = Side(lambda x: rms_norm(x, norm.weight, EPS), shapes)
    return Case(name, ours, Side(norm, shapes), 2 * values, 3 * values)


def activation(rows: int, width: int) -> Case:
    """transformers' gate and up come from two linears, so they are two tensors there."""

    def plain(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate_TI) * up_TI

    values = rows * width
    ours = Side(swiglu, ((rows, 2 * width),))
    return Case("swiglu", ours, Side(plain, ((rows, width), (rows, width))), 3 * values, 5 * values)


def rotation(rows: int, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    """transformers' q, k and v come from three linears; its v needs no work at all."""
    angle_TE = torch.arange(rows, device=device)[:, None] * torch.linspace(
        1.0, 1e-4, sizes.head, device=device
    )
    cos_TE, sin_TE = angle_TE.cos().to(dtype), angle_TE.sin().to(dtype)

    def fused(qkv_TN: Tensor) -> tuple[Tensor, ...]:
        return rotary_split(qkv_TN, cos_TE, sin_TE, sizes.heads, sizes.groups)

    def plain(q_TN: Tensor, k_TN: Tensor) -> tuple[Tensor, ...]:
        q_1HTD, k_1GTD = (x.view(1, rows, -1, sizes.head).transpose(1, 2) for x in (q_TN, k_TN))
        return apply_rotary_pos_emb(q_1HTD, k_1GTD, cos_TE[None], sin_TE[None])

    q, k = sizes.heads * sizes.head, sizes.groups * sizes.head
    values = 2 * rows * (q + 2 * k) + 2 * rows * sizes.head
    ours, theirs = Side(fused, ((rows, q + 2 * k),)), Side(plain, ((rows, q), (rows, k)))
    return Case("rotary_split", ours, theirs, values, values)


def all_cases(rows: int, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[Case]:
    return [
        normalisation("rms_norm", rows, sizes.width, device, dtype),
        normalisation("head rms_norm", rows * sizes.heads, sizes.head, device, dtype),
        activation(rows, sizes.hidden),
        rotation(rows, sizes, device, dtype),
    ]


def measured(side: Side, device: torch.device, dtype: torch.dtype) -> Seconds:
    """Seconds of one forward and of one backward."""
    sets = [
        [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in side.shapes]
        for _ in range(TURNS)
    ]
    gradients = [torch.randn_like(y) for y in _outputs(side, sets[0])]

    def forward() -> None:
        for inputs in sets:
            _outputs(side, inputs)

    def both() -> None:
        for inputs in sets:
            torch.autograd.grad(_outputs(side, inputs), inputs, gradients)

    ahead, together = seconds_of(forward, device) / TURNS, seconds_of(both, device) / TURNS
    return Seconds(ahead, together - ahead)


def _outputs(side: Side, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    outputs = side.function(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The median time of `work`, which is captured once and replayed on a GPU: launches cost nothing."""
    if device.type == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(WARMUP):
            work()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return statistics.median(_replayed(graph) for _ in range(WARMUP + REPLAYS))


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    graph.replay()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a plain copy: what a memory-bound op can hope for."""
    x = torch.empty((1 << 30) if device.type == "cuda" else (1 << 20), dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() / seconds_of(lambda: y.copy_(x), device)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--toy", action="store_true", help="small sizes on the CPU: shows only that it runs")
    options = parser.parse_args()
    if not options.toy and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --toy runs on the CPU")
    device, dtype = (torch.device("cuda", 0), torch.bfloat16)
    rows, sizes = options.rows, Sizes()
    if options.toy:
        device, dtype, rows = torch.device("cpu"), torch.float32, 16
        sizes = Sizes(width=64, hidden=96, heads=4, groups=2, head=16)
    copy = copy_rate(device)
    table, numbers = [], {}
    for case in all_cases(rows, sizes, device, dtype):
        ours, theirs = (measured(side, device, dtype) for side in (case.ours, case.theirs))
        for name, values in (("forward", case.forward_values), ("backward", case.backward_values)):
            taken, usual = getattr(ours, name), getattr(theirs, name)
            rate = values * dtype.itemsize / taken
            numbers[f"{case.name} {name}"] = {"seconds": taken, "transformers": usual, "bytes_a_second": rate}
            cells = (f"{taken * 1e6:.1f}", f"{rate / 1e9:,.0f}", f"{rate / copy:.2f}", f"{usual * 1e6:.1f}")
            table.append((case.name, name, *cells, f"{usual / taken:.1f}"))
    print(f"{rows} rows, {str(dtype).removeprefix('torch.')}; a copy moves {copy / 1e9:,.0f} GB/s\n")
    print(aligned(("op", "pass", "µs", "GB/s", "of copy", "transformers µs", "× faster"), table))
    finish({"rows": rows, "copy": copy, "ops": numbers}, options.json)


if __name__ == "__main__":
    main()
