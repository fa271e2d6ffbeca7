"""`python -m tests.house`: how the house is built, in numbers: files, lines, rooms, floors, circles, names.

A floor is a room (a folder of the package) together with all that it stands on: the highest one is the length
of the longest chain of rooms that import one another. A circle is a set of modules that import one another,
imports inside functions included, those for annotations alone not.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "weftune"


@dataclass(frozen=True, slots=True)
class House:
    files: int
    lines: int
    root_modules: tuple[str, ...]
    largest_room: tuple[str, int]
    floors: int
    circles: tuple[tuple[str, ...], ...]
    names_twice: tuple[str, ...]

    def __str__(self) -> str:
        room, count = self.largest_room
        return "\n".join(
            (
                "| | |",
                "|---|---|",
                f"| files | {self.files} |",
                f"| lines | {self.lines:,} |",
                f"| modules at the root | {len(self.root_modules)} ({', '.join(self.root_modules)}) |",
                f"| the largest room | {room}, {count} files |",
                f"| floors | {self.floors} |",
                f"| circles | {len(self.circles)} |",
                f"| class names that occur twice | {len(self.names_twice)} |",
            )
        )


@cache
def sources() -> Mapping[Path, str]:
    """Of the package; empty files are none."""
    return {path: path.read_text() for path in sorted(ROOT.rglob("*.py")) if path.stat().st_size}


@cache
def trees() -> Mapping[Path, ast.Module]:
    return {path: ast.parse(text) for path, text in sources().items()}


@cache
def survey() -> House:
    modules = {module_name(path): tree for path, tree in trees().items()}
    rooms = Counter(
        str(path.parent.relative_to(ROOT.parent)) for path in trees() if path.name != "__init__.py"
    )
    imports = {name: set(imported(tree, modules)) - {name} for name, tree in modules.items()}
    classes = Counter(
        node.name for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    return House(
        files=len(sources()),
        lines=sum(text.count("\n") for text in sources().values()),
        root_modules=tuple(path.stem for path in sources() if path.parent == ROOT),
        largest_room=rooms.most_common(1)[0],
        floors=floors(imports),
        circles=tuple(circles(imports)),
        names_twice=tuple(sorted(name for name, count in classes.items() if count > 1)),
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, known: Mapping[str, object]) -> Iterator[str]:
    """The modules of ours that a module imports."""
    for node in executed(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found = whole if whole in known else node.module
                yield from [found] if found in known else []
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    left = [tree]
    while left:
        node = left.pop()
        annotated = isinstance(node, ast.If) and isinstance(node.test, ast.Name)
        if not (annotated and node.test.id == "TYPE_CHECKING"):
            yield node
            left += ast.iter_child_nodes(node)


def floors(imports: Mapping[str, set[str]]) -> int:
    """Of the rooms at the top of the package."""
    below: dict[str, set[str]] = {}
    for name, others in imports.items():
        below.setdefault(room(name), set()).update(room(other) for other in others)

    @cache
    def height(one: str) -> int:
        return 1 + max((height(other) for other in below[one] if other != one), default=0)

    return max(height(one) for one in below if one != "weftune")


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def circles(imports: Mapping[str, set[str]]) -> Iterator[tuple[str, ...]]:
    """Tarjan's strongly connected components of more than one module."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(one: str) -> None:
        number[one] = low[one] = len(number)
        stack.append(one)
        for other in imports[one]:
            if other not in number:
                visit(other)
                low[one] = min(low[one], low[other])
            elif other in stack:
                low[one] = min(low[one], number[other])
        if low[one] == number[one]:
            place = stack.index(one)
            members = tuple(stack[place:])
            del stack[place:]
            if len(members) > 1:
                found.append(members)

    for one in imports:
        if one not in number:
            visit(one)
    return iter(found)


if __name__ == "__main__":
    print(survey())
