"""Kernels that note how they are launched instead of running: their grids, strides and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    kernel: str
    grid: tuple[int, ...]
    given: tuple[Any, ...]
    constants: dict[str, Any]

    def of(self, *names: str) -> tuple[Any, ...]:
        return tuple(self.constants[name] for name in names)


class Noted:
    """Stands where a kernel stands."""

    def __init__(self, kernel: str, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *given, **constants: self.launches.append(Launch(self.kernel, grid, given, constants))


def noted(monkeypatch, module, *kernels: str) -> list[Launch]:
    """The launches of these kernels of a module while the test lasts, in order."""
    launches: list[Launch] = []
    for kernel in kernels:
        assert hasattr(module, kernel)
        monkeypatch.setattr(module, kernel, Noted(kernel, launches))
    return launches


class Failing:
    """Stands in for a kernel that needs too much shared memory."""

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, **constants):
        from triton.runtime.errors import OutOfResources

        raise OutOfResources(200_000, 101_376, "shared memory")
