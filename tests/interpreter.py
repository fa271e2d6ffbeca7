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
    _share_constants(monkeypatch)
    _unwrap_at_once(monkeypatch, interpreter)
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

    @cache
    def broadcast_sizes(left, right):
        """The sizes of both together; None where that takes more than to repeat what is there once."""
        fits = len(left) == len(right) and all(
            one == other or 1 in (one, other) for one, other in zip(left, right, strict=True)
        )
        return tuple(map(max, left, right)) if fits else None

    def broadcast_unless_equal(self, left, right):
        if not (left.type.is_block() and right.type.is_block()):
            return broadcast(self, left, right)
        if left.type.shape is right.type.shape:
            return left, right
        sizes = broadcast_sizes(tuple(left.type.shape.values), tuple(right.type.shape.values))
        if sizes is None:
            return broadcast(self, left, right)
        return tuple(
            one
            if tuple(one.type.shape.values) == sizes
            else core.tensor(
                self.builder.create_broadcast(one.handle, sizes), core.block_type(one.type.scalar, sizes)
            )
            for one in (left, right)
        )

    monkeypatch.setattr(core.block_type, "__init__", init_block_type)
    monkeypatch.setattr(core.tensor, "__init__", init)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_unless_equal)


def _share_constants(monkeypatch):
    """Operands of one type need no conversion, and a number beside a tensor of some type is always the same
    tensor; it would find out anew what both are converted to."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    find_operands, converted = TritonSemantic.binary_op_type_checking_impl, {}

    def operands(
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
    ):
        flags = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        left, right = type(lhs) is core.tensor, type(rhs) is core.tensor
        if left and right:
            # A division of numbers in 16 bits is one in 32.
            if not div_or_mod and type(lhs.dtype) is core.dtype and lhs.dtype == rhs.dtype:
                return self.broadcast_impl_value(lhs, rhs)
            if allow_lhs_ptr and lhs.dtype.is_ptr() and rhs.dtype.is_int():
                return self.broadcast_impl_value(lhs, rhs)
        elif left or right:
            tensor, number = (lhs, rhs) if left else (rhs, lhs)
            key = (left, tensor.type.name, type(number), number, flags)
            if key in converted:
                return (tensor, converted[key]) if left else (converted[key], tensor)
            found = find_operands(self, lhs, rhs, *flags)
            if found[1 - left] is tensor:
                converted[key] = found[left]
            return found
        return find_operands(self, lhs, rhs, *flags)

    monkeypatch.setattr(TritonSemantic, "binary_op_type_checking_impl", operands)


def _unwrap_at_once(monkeypatch, interpreter):
    """Most values are tensors or numbers, and most calls have no keyword to leave out."""
    from triton.language import core

    unwrap, plain = core._unwrap_if_constexpr, {core.tensor, int, float, bool, str, type(None)}

    def unwrap_at_once(value):
        if type(value) in plain:
            return value
        return value.value if type(value) is core.constexpr else unwrap(value)

    def patch_attr(obj, name, member, builder, scope):
        semantic, function = interpreter.TritonSemantic(builder), getattr(member, "__wrapped__", member)

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    monkeypatch.setattr(core, "_unwrap_if_constexpr", unwrap_at_once)
    monkeypatch.setattr(interpreter, "_patch_attr", patch_attr)
