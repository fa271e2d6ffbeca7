"""Decode steps of many adapters on one GPU, from token ids to token ids, and prefill of their prompts.

    python -m benchmarks.decode [--shape 8b] [--layers N] [--sequences 64] [--cached 512]
                                [--adapters 0,1,8,64] [--rank R] [--steps N] [--transformers] [--toy]

Every sequence has its own random prompt, so that nothing is shared. A row of the result is the mean time of a
decode step, with sampling, at about `--cached` rows per sequence, and its share ρ of the rate at which the
device copies memory: the bytes of weights, adapters and cache that a step reads, over that rate. `0` adapters
is the bare base, with no adapter attached. `--transformers` adds a row with the continuous batching of
transformers, greedy and with one adapter of PEFT.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.registry import adapter_layout
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.bench.baselines import TARGETS
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size, build, toy_size
from weftune.bench.timing import Hardware, bench_hardware, reset_memory, synchronise
from weftune.generate.adapters import attach_frozen_adapter
from weftune.generate.decoder import Decoder
from weftune.generate.sampling import Sampling
from weftune.run.passes.adapted import AdaptedBase

WARM_STEPS = 4
"""Decode steps before the timed ones: kernels are compiled, and graphs captured."""
TOP_P = Sampling(temperature=0.8, top_p=0.95)


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The measured times of one number of adapters."""

    adapters: int
    sampling: str
    step_seconds: float
    prefill_seconds: float
    floor_seconds: float
    """Bytes that a step must read, over the rate of a device copy."""

    def line(self) -> str:
        return (
            f"{self.adapters:>4} adapters, {self.sampling:<7} {1e3 * self.step_seconds:7.2f} ms per step  "
            f"ρ {self.floor_seconds / self.step_seconds:5.2f}  prefill {1e3 * self.prefill_seconds:8.1f} ms"
        )


def copy_rate(hardware: Hardware) -> float:
    """Return the bytes per second that a copy on the device reads and writes."""
    size = (1 << 30) if hardware.device.type == "cuda" else 1 << 24
    source = torch.zeros(size, dtype=torch.uint8, device=hardware.device)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronise(hardware.device)
    began = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    synchronise(hardware.device)
    return 20 * size / (time.perf_counter() - began)


def attach(adapted: AdaptedBase, count: int, rank: int) -> int:
    """Attach random adapters on all linears until there are `count`, and return the bytes of one of them."""
    sites = adapted.base.shape.sites
    spec = LoraSpec(rank=rank, alpha=2.0 * rank, targets="all-linear")
    layout = adapter_layout(spec, sites)
    for number in range(len(adapted.banks.attached), count):
        weights = 0.02 * torch.randn(layout.size, dtype=adapted.base.dtype, device=adapted.base.device)
        attach_frozen_adapter(adapted, JobAdapter(f"adapter{number}", spec, seed=0), layout, weights)
    return layout.size * torch.empty(0, dtype=adapted.base.dtype).element_size()


def run(
    adapted: AdaptedBase, sequences: int, cached: int, adapters: int, steps: int, sampling: Sampling
) -> tuple[float, float]:
    """Return the mean seconds of a decode step, and the seconds of the prefill of all prompts."""
    device = adapted.base.device
    total = WARM_STEPS + steps
    decoder = Decoder(adapted, 64 << 30, max_positions=2 * sequences * (cached + 64))
    generator = torch.Generator().manual_seed(adapters)
    prompt_length = cached - total // 2
    vocabulary = adapted.base.shape.vocabulary

    def submit(max_tokens: int) -> None:
        prompts_SL = torch.randint(3, vocabulary, (sequences, prompt_length), generator=generator).tolist()
        for number, prompt in enumerate(prompts_SL):
            adapter = f"adapter{number % adapters}" if adapters else None
            decoder.submit(prompt, replace(sampling, max_tokens=max_tokens, seed=number), adapter)

    submit(1)  # compiles the kernels of a prefill
    decoder.run_until_idle()
    submit(total + 1)
    synchronise(device)
    began = time.perf_counter()
    while decoder.is_waiting:
        decoder.run_pass()
    synchronise(device)
    prefill = time.perf_counter() - began
    for _ in range(WARM_STEPS):
        decoder.run_pass()
    synchronise(device)
    began = time.perf_counter()
    for _ in range(steps):
        decoder.run_pass()
    synchronise(device)
    return (time.perf_counter() - began) / steps, prefill


def read_bytes(size: Size, sequences: int, cached: int, adapter_bytes: int) -> int:
    """Return the bytes that a decode step must read: linears and head, adapters, keys and values."""
    weights = size.layers * size.layer_weights + size.hidden * size.vocabulary
    cache = 2 * size.layers * size.kv_heads * size.head_width * sequences * cached
    return 2 * (weights + cache) + adapter_bytes


def measure(
    size: Size, hardware: Hardware, counts: Sequence[int], sequences: int, cached: int, rank: int, steps: int
) -> list[DecodeResult]:
    rate = copy_rate(hardware)
    print(f"device copy {rate / 1e12:.2f} TB/s")
    base = Base.from_model(build(size, hardware), BaseSpec(model="random"), hardware.device)
    adapted = AdaptedBase(base)
    found = []
    for count in sorted(counts):
        own_bytes = attach(adapted, count, rank) if count else 0
        read = read_bytes(size, sequences, cached, count * own_bytes)
        for name, sampling in (("greedy", Sampling()), ("top-p", TOP_P)):
            step, prefill = run(adapted, sequences, cached, count, steps, sampling)
            found.append(DecodeResult(count, name, step, prefill, read / rate))
            print(found[-1].line(), flush=True)
            reset_memory(hardware.device)
    return found


def transformers_step(
    size: Size, hardware: Hardware, sequences: int, cached: int, rank: int, steps: int
) -> float:
    """Return the median seconds between tokens of a sequence with the continuous batching of transformers.
    Counted are those of the sequence that was admitted last."""
    model: Any = build(size, hardware)
    get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS)).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(
        3, size.vocabulary, (sequences, cached - steps // 2), generator=generator
    ).tolist()
    config = GenerationConfig(max_new_tokens=2 * steps, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with torch.no_grad():  # In inference mode, its own thread may not write into its buffers.
        answers = model.generate_batch(inputs=prompts, generation_config=config, record_timestamps=True)
    if not all(one.timestamps for one in answers.values()):
        raise RuntimeError("its continuous batching failed")
    last = max((one.timestamps for one in answers.values()), key=lambda times: times[0])
    return statistics.median(after - before for before, after in pairwise(last))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shape", choices=SIZES, default="8b")
    parser.add_argument("--layers", type=int, help="keep only so many layers")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--cached", type=int, default=512, help="rows of each sequence in the cache")
    parser.add_argument("--adapters", default="0,1,8,64", help="numbers of adapters, separated by commas")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--transformers", action="store_true", help="also its continuous batching")
    parser.add_argument("--toy", action="store_true", help="a tiny base on the CPU, to try the script")
    options = parser.parse_args()
    if (hardware := bench_hardware(options.toy)) is None:
        parser.error("no GPU is found here; --toy runs on the CPU")
    size = SIZES[options.shape]
    size = toy_size(size) if options.toy else replace(size, layers=options.layers or size.layers)
    counts = [int(count) for count in options.adapters.split(",")]
    work = options.sequences, options.cached
    numbers: dict[str, Any] = {"size": asdict(size)}
    if options.transformers:  # First, since Weftune changes the attention of transformers.
        try:
            step = transformers_step(size, hardware, *work, options.rank, options.steps)
            numbers["transformers_step_seconds"] = step
            print(f"transformers, 1 adapter, greedy {1e3 * step:7.2f} ms per step", flush=True)
        except Exception as error:  # Weftune is measured all the same.
            print(f"transformers, 1 adapter: {error!r}", flush=True)
        reset_memory(hardware.device)
    found = measure(size, hardware, counts, *work, options.rank, options.steps)
    finish({**numbers, "results": [asdict(one) for one in found]}, options.json)


if __name__ == "__main__":
    main()
