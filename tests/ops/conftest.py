"""Where kernels run in tests: on the GPU if there is one, else on the CPU by Triton's interpreter."""

import pytest
import torch

from tests.interpreter import interpret


@pytest.fixture
def device(monkeypatch):
    """Kernels run on its tensors while the test lasts. The interpreter is right in float32 only."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    interpret(monkeypatch)
    return torch.device("cpu")
