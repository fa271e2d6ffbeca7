"""Triton's interpreter, for kernels on a machine without a GPU."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch


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
    _hasten(monkeypatch, interpreter)


def _hasten(monkeypatch, interpreter):
    """Leave out what it does again and again, or for nothing: two thirds of its time."""
    patch_lang, patched = interpreter._patch_lang, set()

    class UntilTheEnd:
        """What is patched stays so while the test lasts."""

        def set_attr(self, obj, name, value):
            monkeypatch.setattr(obj, name, value, raising=False)

        def restore(self):
            pass

    def patch_once(fn):
        """It would patch the whole language at each call of a function inside a kernel."""
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            patch_lang(fn)
        return UntilTheEnd()

    monkeypatch.setattr(interpreter, "_LangPatchScope", UntilTheEnd)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    # It would compute whether integers overflow, and assert it only where `debug` is set.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    np_dtype, known = interpreter._get_np_dtype, {}

    def known_dtype(type):
        """It would make a table of all of them at each call."""
        name = type.scalar.name
        if name not in known:
            known[name] = np_dtype(type)
        return known[name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", known_dtype)
    _share_shapes(monkeypatch)
    _round_to_8_bits(monkeypatch, interpreter)


def _round_to_8_bits(monkeypatch, interpreter):
    """It rounds to 8-bit floats wrongly, numbers above the largest and NaN most of all; torch does it."""
    convert = interpreter._convert_float

    def rightly(data, given, wanted, rounding):
        if not (given.is_fp32() and wanted.is_fp8e4nv()):
            return convert(data, given, wanted, rounding)
        return torch.from_numpy(data.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rightly)


def _share_shapes(monkeypatch):
    """Tensors of one shape share it and its constants, of which it would make new ones for each."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    @cache
    def block_shape(sizes):
        shape = core.tuple(sizes)
        return shape, core.validate_block_shape(shape), str(shape)

    def init_block_type(self, element_ty, shape):
        self.element_ty = element_ty
        self.shape, self.numel, name = block_shape(tuple(map(core._unwrap_if_constexpr, shape)))
        self.name = f"<{name}, {element_ty}>"

    @cache
    def constants(shape):
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def init(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = constants(type.shape if type.is_block() else ())

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_unless_equal(self, left, right):
        if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
            return left, right
        return broadcast(self, left, right)

    monkeypatch.setattr(core.block_type, "__init__", init_block_type)
    monkeypatch.setattr(core.tensor, "__init__", init)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_unless_equal)
