"""What the server of forks imports: it must leave CUDA alone, or no process that it forks can use a GPU."""

import subprocess
import sys

import pytest

ASKED = """
import sys, traceback
import torch
from weftune.launch.supervise import PRELOADED

def spy(module, name):
    def asked(*_, **__):
        where = [frame for frame in traceback.extract_stack() if "importlib" not in frame.filename][-2]
        print(f"{name} is asked by {where.filename}:{where.lineno}")
        sys.exit(1)
    setattr(module, name, asked)

# Each of these starts CUDA, or only its driver, in whoever asks: none survives a fork.
for name in ("is_available", "_lazy_init", "init", "current_device", "get_device_properties", "mem_get_info"):
    spy(torch.cuda, name)
for name in ("_cuda_getDeviceCount", "_cuda_init"):
    if hasattr(torch._C, name):
        spy(torch._C, name)
for name in (*PRELOADED, "transformers.models.llama.modeling_llama"):
    __import__(name)
"""


@pytest.mark.slow
def test_what_the_server_of_forks_imports_asks_nothing_of_cuda():
    """Torch's own words: after `is_available` a forked process meets an initialization error."""
    ended = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
