"""The element-wise kernels as a GPU gets them: compiled for one here, captured where there is one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weftune.ops.norm import rms_norm, skip_rms_norm
from weftune.ops.rotary import rotary_split
from weftune.ops.swiglu import swiglu

EVERY = (
    *("norm", "norm onto", "norm backward", "norm beside a skip backward"),
    *("swiglu", "swiglu backward", "geglu", "geglu backward"),
    *("rotary", "rotary backward", "rotary of a part", "rotary of a part backward"),
    *("rotary after norms", "rotary after norms backward"),
)
FEW = (
    *("norm onto", "norm beside a skip backward", "swiglu", "geglu backward"),
    *("rotary of a part", "rotary after norms backward"),
)
"""Every kernel once."""


@pytest.mark.parametrize("names", [FEW, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["few", "all"])
def test_kernels_compile_without_a_gpu_and_move_16_bytes_at_a_time(names, tmp_path):
    """In a process of its own, since Triton is either an interpreter or a compiler."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    asked = [sys.executable, "-m", "tests.ops.compiled", *names]
    root = Path(__file__).parents[2]
    done = subprocess.run(asked, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert tuple(found) == names
    for kernel, accesses in found.items():
        # The one float a row of a norm is the only thing that may be narrower.
        narrow = [access for access in accesses if not access.endswith(".v4.b32")]
        assert len(narrow) == kernel.startswith("norm"), (kernel, accesses)
        assert len(accesses) > len(narrow)


def block(h_TD, delta_TD, weight_D, cos_TE, sin_TE):
    """Every op once, forward and backward: (what comes out, the gradients of h and of delta)."""
    # Leaves of this call's stream, and not of the first call's.
    h_TD, delta_TD = h_TD.detach().requires_grad_(), delta_TD.detach().requires_grad_()
    total_TD, n_TD = skip_rms_norm(h_TD + delta_TD, weight_D, 1e-5)
    q_THD, k_TGD, v_TGD = rotary_split(n_TD, cos_TE, sin_TE, 4, 2)
    mixed_TD = torch.cat((q_THD, k_TGD, v_TGD), dim=1).flatten(1) + total_TD
    y_TI = swiglu(rms_norm(mixed_TD, weight_D, 1e-5, 1.0))
    return y_TI, *torch.autograd.grad(y_TI.float().square().sum(), (h_TD, delta_TD))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_graph_replays_to_the_bits_of_the_ops():
    def draw(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    h_TD, delta_TD = draw(77, 512), draw(77, 512)
    angles = (draw(512), draw(77, 64), draw(77, 64))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        block(h_TD, delta_TD, *angles)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = block(h_TD, delta_TD, *angles)
    for _ in range(2):
        h_TD.copy_(draw(77, 512))
        delta_TD.copy_(draw(77, 512))
        graph.replay()
        for replayed, wanted in zip(captured, block(h_TD, delta_TD, *angles), strict=True):
            assert torch.equal(replayed, wanted)
