"""Compile the kernels that every class of GPUs would launch, and print what each needs of its device.

    python -m tests.ops.device_classes [--class 8.6] [--kernel site.up] [--quick] [--json FILE]

needs no GPU. The launchers run on tensors without memory, with kernels that record their launches; selection
of kernels and launch parameters is that of `weftune.core.device_class`. Each recorded configuration is
compiled and assembled for the architecture of its class: the assembler refuses instructions that the
architecture lacks. The widths of linears only bound loops, so a configuration is compiled for one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from weftune.core.device_class import CLASSES, DeviceClass, pretend_device_class
from weftune.core.weights import CODES, CodedMatrix
from weftune.ops import adamw, dequantise, fp8, logprobs, norm, rotary, swiglu
from weftune.ops import triton as kernels
from weftune.ops.experts import ExpertSite
from weftune.ops.lora.computed import computed_table
from weftune.ops.lora.experts import ExpertLinears, _apply_gate, _gated_backward, _sum_choices, sort_choices
from weftune.ops.lora.few_rows import TILE_ROWS, few_rows_linear, is_unscaled_lora
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.scales import scale_table
from weftune.ops.lora.table import Group, SlotTable, required_bands
from weftune.ops.lora.tiled import backward, forward
from weftune.ops.lora.tiling import SiteCall, candidate_plans, choose_tiling
from weftune.ops.sampling import Draw, sample_rows

CPU, META = torch.device("cpu"), torch.device("meta")
SLOTS = 8
DECODED = 64
"""Rows of a decode step."""
REGISTERS = 65536
"""Registers of one program, on every class."""
TENSOR_COLUMNS = 512
"""Columns of the tensor memory of a multiprocessor, which only Blackwell for data centres has."""
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.int32: "i32",
    torch.int64: "i64",
    CODES: "fp8e4nv",
}
WIDTHS_ONLY = ("COLUMNS", "WIDTHS", "SHARES")
"""Constants that hold edges of columns."""
BASES = {"1B": (2048, 512, 8192), "8B": (4096, 1024, 14336), "70B": (8192, 1024, 28672)}
"""Maps the size of a model to the widths of its hidden states, of its keys, and of its feed-forward block."""


@dataclass(frozen=True)
class Configuration:
    """One kernel as it is launched: everything that the compiler is told."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    """Arguments that are multiples of 16."""
    options: tuple[tuple[str, Any], ...]

    @property
    def resources_key(self) -> tuple[Any, ...]:
        """Configurations with equal keys differ in the widths of linears only."""
        constants = tuple(
            (name, len(value) if name in WIDTHS_ONLY else value) for name, value in self.constants
        )
        return self.kernel, self.signature, constants, self.options


@dataclass(frozen=True)
class Resources:
    shared: int
    registers: int
    stack: int
    """Bytes of local memory per thread, to which registers are spilled."""
    tensor_columns: int
    words: tuple[str, ...]
    """Instructions of interest in the PTX."""


class Recorder:
    """Stands in for a kernel: a launch is recorded, and nothing runs."""

    def __init__(self, name: str, kernel: Any, found: dict[tuple[Any, ...], Configuration]) -> None:
        self.name, self.kernel, self.found = name, kernel, found

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *arguments: Any, **given: Any) -> None:
        names = self.kernel.arg_names
        values = dict(zip(names, arguments, strict=False)) | {
            name: value for name, value in given.items() if name in names
        }
        options = tuple((name, value) for name, value in given.items() if name not in names)
        constexprs = {parameter.name for parameter in self.kernel.params if parameter.is_constexpr}
        general = {parameter.name for parameter in self.kernel.params if parameter.do_not_specialize}
        signature, constants, aligned = [], [], []
        for name in names:
            value = values[name]
            one = type(value) is int and value == 1 and name not in general
            if name in constexprs or value is None or one:
                signature.append((name, "constexpr"))
                constants.append((name, value))
                continue
            signature.append((name, _type(value)))
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                aligned += [] if name in general else [name]
        made = Configuration(self.name, tuple(signature), tuple(constants), tuple(aligned), options)
        self.found.setdefault(made.resources_key, made)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return f"tensordesc<{TYPES[value.base.dtype]}[{','.join(map(str, value.block_shape))}]>"


@contextmanager
def recording() -> Iterator[dict[tuple[Any, ...], Configuration]]:
    """Record the launches of all kernels inside the context."""
    found: dict[tuple[Any, ...], Configuration] = {}
    # All are imported first: modules import functions from one another.
    modules = {module: getattr(kernels, module) for module in kernels.MODULES}
    with ExitStack() as stack:
        for module, here in modules.items():
            for name, value in list(vars(here).items()):
                if hasattr(value, "arg_names") and value.fn.__module__ == here.__name__:
                    recorder = Recorder(f"{module}.{name}", value, found)
                    stack.enter_context(patch.object(here, name, recorder))
        yield found


@dataclass(frozen=True)
class LinearCase:
    """A group of linears with adapters."""

    features: int
    widths: tuple[int, ...]
    rank: int
    drops: bool
    dtype: torch.dtype
    rows: int
    kind: str = "lora"
    """"lora", "dora", "ia3" (scales of outputs), "ia3 in" (scales of inputs) or "vera"."""
    coded: bool = False


def linear_cases(device_class: DeviceClass, quick: bool) -> Iterator[LinearCase]:
    """Yield the groups of linears of Llama-like models. Ranks up to 16 are padded to 16."""
    bases = [BASES["8B"]] if quick else BASES.values()
    for base, rank in product(bases, (16, 128) if quick else (16, 64, 128)):
        for case in _plain_cases(base, rank, torch.bfloat16):
            yield case
            if case.drops or (quick and len(case.widths) != 1):
                continue
            yield replace(case, kind="dora")
            yield replace(case, kind="vera")
            yield replace(case, kind="ia3")
            if len(case.widths) == 1:
                yield replace(case, kind="ia3 in")
            if device_class.has_fp8:
                yield replace(case, coded=True)
    if not quick:
        for rank, dtype in product((16, 128), (torch.float16, torch.float32)):
            yield from _plain_cases(BASES["8B"], rank, dtype)
        yield from _plain_cases(BASES["8B"], 256, torch.bfloat16)


def _plain_cases(base: tuple[int, int, int], rank: int, dtype: torch.dtype) -> Iterator[LinearCase]:
    hidden, keys, inner = base
    groups = (
        (hidden, (hidden, keys, keys)),
        (hidden, (hidden,)),
        (hidden, (inner, inner)),
        (inner, (hidden,)),
    )
    for (features, widths), drops, rows in product(groups, (False, True), (8192, 512)):
        yield LinearCase(features, widths, rank, drops, dtype, rows)


def launch_linear(case: LinearCase) -> None:
    """Run forward and backward of a group with every plan that its class would try."""
    columns = tuple(pairwise(accumulate(case.widths, initial=0)))
    count, outputs = len(case.widths), sum(case.widths)
    names = [f"site{part}" for part in range(count)]
    group = Group(
        columns,
        SlotTable.empty(names, SLOTS, CPU, bands=required_bands(case.rank)),
        case.rank,
        case.drops,
        g_out=scale_table(count, SLOTS, CPU) if case.kind in ("dora", "ia3") else None,
        g_in=scale_table(count, SLOTS, CPU) if case.kind == "ia3 in" else None,
        has_dora=case.kind == "dora",
        computed_table=computed_table(count, SLOTS, CPU) if case.kind == "vera" else None,
    )
    rows = Rows.empty(case.rows, SLOTS, CPU)
    empty = partial(torch.empty, dtype=case.dtype, device=META)
    x_TK, dy_TN, weight_NK = (
        empty(case.rows, case.features),
        empty(case.rows, outputs),
        empty(outputs, case.features),
    )
    residual_TN = empty(case.rows, outputs) if count == 1 else None
    right = CodedMatrix.quantise(weight_NK) if case.coded else weight_NK
    read_NK = right.codes() if isinstance(right, CodedMatrix) else right
    tiling = choose_tiling(rows, group, case.features, case.dtype)
    for plan, training in product(candidate_plans(read_NK, group, META), (True, False)):
        call = SiteCall(group, rows, training, tiling, plan)
        y_TN, s_TPR, u_TN = forward(x_TK, right, None, residual_TN, call)
        assert y_TN.shape == dy_TN.shape
        if training:
            backward(dy_TN, x_TK, right, s_TPR, call, needs_dx=True, u_TN=u_TN)
    if is_unscaled_lora(group):
        step = Rows.empty(DECODED, SLOTS, CPU, TILE_ROWS)
        residual_TN = None if residual_TN is None else residual_TN[:DECODED]
        few_rows_linear(x_TK[:DECODED], right, None, residual_TN, group, step)


def launch_others(device_class: DeviceClass, quick: bool) -> None:
    """Run the launchers of all other kernels."""
    rows = 8192
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16, torch.float32):
        empty = partial(torch.empty, dtype=dtype, device=META)
        for hidden, keys, inner in [BASES["8B"]] if quick else BASES.values():
            for width in (hidden, 128):
                x_TD, weight_D = empty(rows, width), empty(width)
                n_TD, rstd_T = norm._forward(x_TD, weight_D, 1e-5, 0.0)
                norm._forward(x_TD, weight_D, 1e-5, 0.0, n_TD)
                norm._backward(n_TD, None, x_TD, weight_D, rstd_T, 0.0)
                norm._backward(n_TD, x_TD, x_TD, weight_D, rstd_T, 0.0)
            for gelu in (False, True):
                act_TI = swiglu._forward(empty(rows, 2 * inner), gelu)
                swiglu._backward(act_TI, empty(rows, 2 * inner), gelu)
            heads, groups, width = hidden // 128, keys // 128, 128
            qkv_TN = empty(rows, (heads + 2 * groups) * width)
            for norms in (None, rotary.HeadNorms(empty(width), empty(width), 1e-6)):
                for turned in (width, width // 2):
                    cos_TE = empty(rows, turned)
                    parts = rotary._forward(qkv_TN, cos_TE, cos_TE, heads, groups, norms)
                    given = None if norms is None else qkv_TN
                    rotary._backward(list(parts), cos_TE, cos_TE, given, heads, groups, norms)
            _launch_dequantise(empty(inner, hidden), device_class)
            if device_class.has_fp8:
                fp8.launch_row_codes(empty(rows, hidden), None)
                fp8.launch_row_codes(empty(rows, inner), torch.empty(inner, device=META))
        for softcap, wants_gradient in product((None, 30.0), (True, False)):
            _launch_logprobs(dtype, softcap, wants_gradient)
        _launch_adamw(dtype)
        logits_BV = torch.empty(DECODED, 128256, device=META)
        with patch("weftune.ops.sampling.to_device", lambda tensor, device: tensor):
            sample_rows(logits_BV, logits_BV, [Draw(0.8, 0.9, 1)] * DECODED)
        _launch_experts(dtype, quick)


def _launch_dequantise(out_NK: Tensor, device_class: DeviceClass) -> None:
    codes = torch.empty(out_NK.numel() // 2, 1, dtype=torch.uint8, device=META)
    float_ = partial(torch.empty, device=META)
    blocks = out_NK.numel() // 64
    parts = {"weight": codes, "absmax": float_(blocks), "code": float_(16)}
    dequantise.write_nf4(parts, out_NK)
    nested = {"nested_absmax": float_(blocks // 256), "nested_code": float_(256), "offset": float_(1)}
    dequantise.write_nf4(parts | nested | {"absmax": codes[:blocks]}, out_NK)
    for dtype in (torch.int8, CODES) if device_class.has_fp8 else (torch.int8,):
        of_rows = {"weight": out_NK.new_empty(out_NK.shape, dtype=dtype), "scale": float_(len(out_NK))}
        dequantise.write_rows(of_rows, out_NK)


def _launch_logprobs(dtype: torch.dtype, softcap: float | None, wants_gradient: bool) -> None:
    from weftune.core.weights import Head

    head = Head(torch.empty(128256, 4096, dtype=dtype, device=META), softcap=softcap)
    targets_S = torch.empty(64, dtype=torch.int64, device=META)
    logprobs._run_kernel(torch.empty(64, 4096, dtype=dtype, device=META), targets_S, head, wants_gradient)


def _launch_adamw(dtype: torch.dtype) -> None:
    for size in (1 << 16, (1 << 16) + 1):
        vectors = [torch.empty(size) for _ in range(4)]
        state = adamw.AdamState(*vectors, torch.empty(size, dtype=dtype))
        adamw.square_sums([state.gradient])
        with patch.object(adamw, "kernels_available", lambda vector: True):
            adamw.update([adamw.Update(state, 1, 1e-3, 0.0, 1.0)])


def _launch_experts(dtype: torch.dtype, quick: bool) -> None:
    """Run the launchers of a mixture of 128 experts, 8 per token."""
    experts, hidden, inner, tokens, jobs = 128, 2048, 768, 2048, 8
    empty = partial(torch.empty, dtype=dtype, device=META)
    integers = partial(torch.empty, dtype=torch.int32, device=META)
    chosen_Tk = torch.empty(tokens, 8, dtype=torch.int64, device=META)
    for rank in (16,) if quick else (8, 16, 64, 128):
        choices = sort_choices(chosen_Tk, integers(tokens), integers(jobs + 1), experts, SLOTS * experts)
        for features, outputs in ((hidden, 2 * inner), (inner, hidden)):
            table = SlotTable.empty(["site"], SLOTS * experts, META, bands=required_bands(rank))
            group = Group(((0, outputs),), table, rank, False)
            for own in (group, None):
                site = ExpertSite(empty(experts, outputs, features), own)
                with patch("weftune.ops.lora.experts.grouped_product", _like_grouped_product):
                    linears = ExpertLinears.from_site(site, choices)
                    x_SK, dy_SN = empty(tokens * 8, features), empty(tokens * 8, outputs)
                    _, s_SR = linears.forward(x_SK)
                    ds_SR = linears.ds(dy_SN, s_SR)
                    linears.add_da(x_SK, ds_SR)
                    linears.dx(dy_SN, ds_SR)
        weight_S = empty(tokens * 8)
        act_SI = _apply_gate(empty(tokens * 8, 2 * inner), weight_S)
        _gated_backward(act_SI, empty(tokens * 8, 2 * inner), weight_S)
        _sum_choices(empty(tokens * 8, hidden), choices.sorted_index_Tk)


def _like_grouped_product(x_SK: Tensor, w_EKN: Tensor, stops_E: Tensor) -> Tensor:
    return x_SK.new_empty(len(x_SK), w_EKN.shape[2])


def configurations(device_class: DeviceClass, quick: bool = False) -> list[Configuration]:
    """Return every configuration that a class would launch."""
    with pretend_device_class(device_class), recording() as found, torch.no_grad():
        for case in linear_cases(device_class, quick):
            launch_linear(case)
        launch_others(device_class, quick)
    return list(found.values())


def compiled(made: Configuration, capability: tuple[int, int]) -> Resources:
    """Compile and assemble a configuration. An instruction that the architecture lacks raises an error."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    module, name = made.kernel.split(".")
    kernel = getattr(getattr(kernels, module), name)
    places = {(kernel.arg_names.index(name),): value for name, value in made.constants}
    known = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in made.aligned}
    source = ASTSource(kernel, dict(made.signature), constexprs=places, attrs=known)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    built = compile(source, target=target, options=dict(made.options))
    words = re.findall(r"wgmma|tcgen05|mma\.sync|cp\.async\.bulk|e4m3", built.asm["ptx"])
    tensor_columns = getattr(built.metadata, "tmem_size", None) or 0
    usage = _usage(built.asm["cubin"])
    return Resources(built.metadata.shared, *usage, tensor_columns, tuple(sorted(set(words))))


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack per thread."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        asked = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    (registers, stack) = re.findall(r"REG:(\d+) STACK:(\d+)", said)[-1]
    return int(registers), int(stack)


def attempt(made: Configuration, capability: tuple[int, int]) -> Resources | str:
    try:
        return compiled(made, capability)
    except Exception as error:  # whatever the compiler raises is a finding
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


@dataclass
class Row:
    """The configurations of one kernel on one class."""

    architecture: str
    kernel: str
    configurations: int = 0
    shared: int = 0
    """Largest shared memory in bytes."""
    limit: int = 0
    registers: int = 0
    """Largest number of registers per thread."""
    stack: int = 0
    """Largest number of bytes per thread in local memory."""
    spilling: int = 0
    """Number of configurations that spill registers."""
    words: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    def add(self, made: Configuration, found: Resources | str) -> None:
        self.configurations += 1
        if isinstance(found, str):
            self.failures += (f"{described(made)}: {found}",)
            return
        warps = dict(made.options).get("num_warps", 4)
        # Registers are assigned to warps in units of 256.
        registers = 32 * warps * (-(-found.registers // 8) * 8)
        if found.shared > self.limit or registers > REGISTERS or found.tensor_columns > TENSOR_COLUMNS:
            self.failures += (f"{described(made)}: {found}",)
        self.shared, self.registers = max(self.shared, found.shared), max(self.registers, found.registers)
        self.stack, self.spilling = max(self.stack, found.stack), self.spilling + (found.stack > 0)
        self.words = tuple(sorted({*self.words, *found.words}))


def described(made: Configuration) -> str:
    constants = {name: value for name, value in made.constants if value is not None and name.isupper()}
    types = sorted({kind for _, kind in made.signature if "fp" in kind or "bf" in kind})
    return f"{constants} {dict(made.options)} {types}"


def table(
    classes: list[DeviceClass], quick: bool, processes: int, sample: int | None, kernel: str | None
) -> list[Row]:
    """Compile everything, one kernel, or a sample of each class. Return one row per class and kernel."""
    rows = []
    with ProcessPoolExecutor(processes) as pool:
        for one in classes:
            found = [made for made in configurations(one, quick) if kernel in (None, made.kernel)]
            if sample is not None:
                found = found[:: -(-len(found) // sample)]
            by_kernel: dict[str, Row] = {}
            results = pool.map(partial(attempt, capability=one.capability), found, chunksize=4)
            for made, resources in zip(found, results, strict=True):
                new = Row(one.architecture, made.kernel, limit=one.shared_memory)
                by_kernel.setdefault(made.kernel, new).add(made, resources)
            rows += sorted(by_kernel.values(), key=lambda row: row.kernel)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = {f"{one.capability[0]}.{one.capability[1]}": one for one in CLASSES}
    parser.add_argument(
        "--class", dest="classes", action="append", choices=names, help="one class; default: all"
    )
    parser.add_argument("--kernel", help="only this kernel; default: all")
    parser.add_argument("--quick", action="store_true", help="one model, two ranks, bfloat16")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--sample", type=int, help="compile only this many configurations of each class")
    given = parser.parse_args()
    classes = [names[name] for name in given.classes or names]
    rows = table(classes, given.quick, given.processes, given.sample, given.kernel)
    print("| class | kernel | configurations | shared, KiB | registers | stack, bytes | spilling | uses |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        shared = f"{row.shared / 1024:.1f} of {row.limit >> 10}"
        numbers = f"{row.configurations} | {shared} | {row.registers} | {row.stack} | {row.spilling}"
        print(f"| {row.architecture} | {row.kernel} | {numbers} | {', '.join(row.words)} |")
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    failures = [f"{row.architecture} {row.kernel}: {line}" for row in rows for line in row.failures]
    print("\n".join(failures), file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
