"""The routers of a mixture of experts, recorded and replayed.

Two experts may be almost equally good for a token; a different rounding then sends it elsewhere. When two
ways of computing the same are compared, the second takes the decisions of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weftune.base.decoders.mixtures import MIXTURES, ROUTER

Decision = tuple[Tensor, ...]
"""Output of a router: logits, weights and indices of the experts of every token."""


class Routing:
    def __init__(self, model: PreTrainedModel) -> None:
        mixes = model.config.model_type in MIXTURES
        found = model.named_modules() if mixes else ()
        self._made: dict[nn.Module, list[Decision]] = {
            module: [] for name, module in found if name.endswith(f".{ROUTER}")
        }

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the decisions of all passes inside."""

        def keep(router: nn.Module, _: Any, decision: Decision) -> None:
            self._made[router].append(decision)

        with self._hooked(keep):
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Make a pass over all those tokens, concatenated, take the recorded decisions."""

        def give(router: nn.Module, _: Any, __: Decision) -> Decision:
            return tuple(torch.cat(parts) for parts in zip(*self._made[router], strict=True))

        with self._hooked(give):
            yield

    @contextmanager
    def _hooked(self, hook: Callable[..., Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for router in self._made:
                stack.enter_context(router.register_forward_hook(hook))
            yield
