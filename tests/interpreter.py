"""Triton's interpreter, for kernels on a machine without a GPU."""

import pytest


def interpret(monkeypatch):
    """Run kernels in the interpreter while the test lasts; it is right in float32 only."""
    pytest.importorskip("triton")
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor, scope):
        # It holds a scalar as an array of one, of which numpy 2.4 no longer makes an int.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", mended)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
