"""Compile the kernels of the tiled route, as its launchers call them, for a GPU that need not be there.

    python -m tests.ops.lora.tiled_compiled [few | every]

compiles every kernel once, or with every kind of blocks, and prints one JSON object: {kernel: {"shared":
bytes of shared memory, "ptx": the words of interest in its PTX, "spilled": bytes of registers in memory,
"serialized": whether its tensor cores wait needlessly}}.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.ops.lora.site_cases import Case, Job, attached, frozen_weight, values
from weftune.core.weights import CODES
from weftune.ops.lora.tiled import backward, forward
from weftune.ops.lora.tiling import ProductPlan, SiteCall, choose_tiling, product_blocks
from weftune.ops.triton import large, product, site, site_gradients

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
TYPES[CODES] = "fp8e4nv"
ALIGNED = [["tt.divisibility", 16]]
KERNELS = (
    *("down", "sum_rows", "up", "ds_db", "ds_alone", "da", "add_dx", "add_gradients"),
    *("large_y", "large_dx", "product"),
)


class Compiled:
    """Stands where a kernel stood: a launch compiles it and runs nothing."""

    def __init__(self, kernel, found):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, num_warps, num_stages=3, **constants):
        signature, places, known = {}, {}, {}
        for place, name in enumerate(self.kernel.arg_names):
            value = constants[name] if name in constants else arguments[place]
            if name in constants or value is None:
                signature[name], places[(place,)] = "constexpr", value
                continue
            signature[name] = type_of(value)
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                known[(place,)] = ALIGNED
        source = ASTSource(self.kernel, signature, constexprs=places, attrs=known)
        made = compile(source, target=TARGET, options={"num_warps": num_warps, "num_stages": num_stages})
        name = self.kernel.fn.__name__ + " backward" * constants.get("BACKWARD", False)
        name += " of codes" * any("fp8" in type for type in signature.values())
        words = sorted(set(re.findall(r"wgmma|mma\.sync|ld\.global\S*|e4m3\.e4m3", made.asm["ptx"])))
        entry = {"shared": made.metadata.shared, "ptx": words, **assembled(made.asm["ptx"])}
        worst = self.found.setdefault(name, entry)
        for number in ("shared", "spilled", "serialized"):
            worst[number] = max(worst[number], entry[number])


def type_of(value):
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}[{','.join(map(str, value.block_shape))}]>"
    return "*" + TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"


def assembled(ptx):
    """What the assembler has to say about it."""
    asked = [knobs.nvidia.ptxas.path, "-v", "--gpu-name", "sm_90a", "-o", "/dev/null", "-"]
    said = subprocess.run(asked, input=ptx, capture_output=True, text=True, check=True).stderr
    spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", said))
    return {"spilled": spilled, "serialized": "are serialized" in said}


def main(every):
    found = {}
    for module in (site, site_gradients, large, product):
        for name in KERNELS:
            if hasattr(module, name):
                setattr(module, name, Compiled(getattr(module, name), found))
    case = Case([Job(60, rank=16, dropout=0.1)], features=512, widths=(512, 128, 128), dtype=torch.bfloat16)
    made = values(case)
    _, group, rows = attached(case, made)
    chosen = choose_tiling(rows, group, case.features, case.dtype)
    for one_read in (True, False):
        call = SiteCall(group, rows, True, replace(chosen, reads_dy_once=one_read))
        _, s, _ = forward(made.x, made.weight, None, None, call)
        backward(made.dy, made.x, made.weight, s, call, needs_dx=one_read)
    for rank, drops in ((128, False), (256, True)) if every else ():
        laden(ProductPlan.wide, rank, drops)
    fused = ((128, 128, True), (16, 128, True), (32, 256, True), (64, 256, False), (128, 256, False))
    for rank, columns, drops in fused if every else fused[:1]:
        laden(ProductPlan.fused, rank, drops, columns)
    for rank, columns, drops in fused[1:4] if every else fused[1:2]:
        laden(ProductPlan.fused, rank, drops, columns, coded=True)
    print(json.dumps(found))


def laden(plan, rank, drops, columns=128, coded=False):
    """A plan with all that it can take; the columns are those of a fused product."""
    case = Case(
        [Job(60, rank=rank, dropout=0.1 * drops)],
        features=512,
        widths=(512, 256, 256),
        bias=True,
        residual=True,
        dtype=torch.bfloat16,
        coded=coded,
    )
    made = values(case)
    _, group, rows = attached(case, made)
    blocks = product_blocks(columns, case.dtype, programs=132)
    chosen = replace(choose_tiling(rows, group, case.features, case.dtype), y=blocks, dx=blocks)
    call = SiteCall(group, rows, True, chosen, plan)
    weight = frozen_weight(case, made)
    _, s, _ = forward(made.x, weight, made.bias, made.residual, call)
    backward(made.dy, made.x, weight, s, call, needs_dx=True)


if __name__ == "__main__":
    main(every=sys.argv[1:] != ["few"])
