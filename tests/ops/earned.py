"""The yardstick of a fast path: an error against float64 at most twice that of plain torch in its dtype."""

import torch


def outcomes(function, inputs, gradients):
    """What a function gives for its inputs, and the gradient of each input; None gradients stay out of it."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    asked = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if dy is not None]
    gradients = torch.autograd.grad([y for y, _ in asked], leaves, [dy for _, dy in asked])
    return [y.detach() for y in outputs] + list(gradients)


def assert_earned(fast, plain, exact, inputs, gradients):
    """`fast` and `plain` take the inputs as they are, `exact` the same values in float64."""
    wide = [x.detach().double() for x in inputs]
    wide_gradients = [None if dy is None else dy.double() for dy in gradients]
    truths = outcomes(exact, wide, wide_gradients)
    fasts, plains = outcomes(fast, inputs, gradients), outcomes(plain, inputs, gradients)
    for got, usual, truth in zip(fasts, plains, truths, strict=True):
        assert (got.dtype, got.shape) == (usual.dtype, usual.shape)
        rounding = torch.finfo(got.dtype).eps / 2 * truth.norm()
        allowed = max(2 * (usual.double() - truth).norm(), rounding)
        assert (got.double() - truth).norm() <= allowed


def saved_bytes(function, *inputs):
    """What a function keeps for its backward beyond its inputs and outputs."""
    kept = {}

    def note(x):
        kept[x.untyped_storage().data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for x in (*inputs, *outputs):
        if isinstance(x, torch.Tensor):
            kept.pop(x.untyped_storage().data_ptr(), None)
    return sum(kept.values())
