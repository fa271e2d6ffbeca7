"""Compile the element-wise kernels for a GPU that need not be there, and print how each reaches its memory.

    python -m tests.ops.compiled [NAME ...]

compiles what has these names and prints one JSON object: {what was compiled: [the global loads and stores of
its PTX]}.
"""

import json
import re
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from weftune.ops.triton import norm, rotary, swiglu

TARGET = GPUTarget("cuda", 90, 32)
NORM = dict(WIDTH=4096, ROWS=1, BLOCK=4096)
SWIGLU = dict(WIDTH=14336, BLOCK=1024, GELU=False)
GEGLU = SWIGLU | dict(GELU=True)
ROTARY = dict(HEADS=32, GROUPS=8, WIDTH=128, HALF=64, CHUNK=16, HALF_BLOCK=64, REST_BLOCK=1)
PARTLY = ROTARY | dict(HALF=32, CHUNK=32, HALF_BLOCK=32, REST_BLOCK=64)
NO_NORMS = dict(q_weight=None, k_weight=None)
NOTHING_NORMED = NO_NORMS | dict(qkv=None)
FLOATS = ("eps", "offset")
UNKNOWN = ("rows",)
"""Integers of which nothing is known; strides are multiples of 16, as those of every base."""


def accesses(kernel, warps, pointers, constants):
    """The loads and stores of a kernel with bfloat16 pointers, but for rstd in float32."""
    signature, known = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = ("*fp32" if name == "rstd" else "*bf16") if name in pointers else "i32"
            if name not in UNKNOWN:
                known[(place,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places, attrs=known)
    made = compile(source, target=TARGET, options={"num_warps": warps})
    return re.findall(r"(?:ld|st)\.global\S*", made.asm["ptx"])


def main():
    forward, backward = norm.norm_forward, norm.norm_backward
    turn, turn_back = rotary.rotary_forward, rotary.rotary_backward
    wanted = {
        "norm": (forward, 8, "x weight n rstd", NORM | dict(residual=None)),
        "norm onto": (forward, 8, "x weight n rstd residual", NORM),
        "norm backward": (backward, 8, "dn x weight rstd dx", NORM | dict(dskip=None)),
        "norm beside a skip backward": (backward, 8, "dn dskip x weight rstd dx", NORM),
        "swiglu": (swiglu.swiglu_forward, 4, "gate_up act", SWIGLU),
        "swiglu backward": (swiglu.swiglu_backward, 4, "dact gate_up dgate_up", SWIGLU),
        "geglu": (swiglu.swiglu_forward, 4, "gate_up act", GEGLU),
        "geglu backward": (swiglu.swiglu_backward, 4, "dact gate_up dgate_up", GEGLU),
        "rotary": (turn, 4, "qkv cos sin q k v", ROTARY | NO_NORMS),
        "rotary backward": (turn_back, 4, "dq dk dv cos sin dqkv", ROTARY | NOTHING_NORMED),
        "rotary of a part": (turn, 4, "qkv cos sin q k v", PARTLY | NO_NORMS),
        "rotary of a part backward": (
            turn_back,
            4,
            "dq dv cos sin dqkv",
            PARTLY | NOTHING_NORMED | dict(dk=None),
        ),
        "rotary after norms": (turn, 4, "qkv cos sin q k v q_weight k_weight", ROTARY),
        "rotary after norms backward": (
            turn_back,
            4,
            "dq dk dv cos sin dqkv qkv q_weight k_weight",
            ROTARY,
        ),
    }
    found = {
        name: accesses(kernel, warps, pointers.split(), constants)
        for name in sys.argv[1:] or wanted
        for kernel, warps, pointers, constants in [wanted[name]]
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
