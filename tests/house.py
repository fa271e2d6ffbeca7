"""Structure and language of the package in numbers: `python -m tests.house`.

A floor is a room (a folder of the package) together with all that it stands on: the highest one is the length
of the longest chain of rooms that import one another. A cycle is a set of modules that import one another,
imports inside functions included, those for annotations alone not. A fragment is a docstring that begins in
the middle of a sentence.

`python -m tests.house --sample 100 --seed 1` prints random docstrings and names for a reader to judge, and
`--unused` lists what only tests and benchmarks call.
"""

from __future__ import annotations

import argparse
import ast
import gc
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "weftune"
FRAGMENT = re.compile(
    r"(Of|The same|Those|Who|Whom|Whose|Whoever|So (many|much|that)|What(ever)?|Which|By|As|Where|From)\b"
)
"""How a docstring begins that is no sentence and no plain noun phrase."""
VAGUE_NAMES = frozenset(
    ("place", "most", "wanted", "ground", "way", "asked", "due", "left", "made", "weave", "settle", "courses")
)
"""Names of parameters, fields and functions that do not say what the thing is."""
FEW_LINES = 6


@dataclass(frozen=True, slots=True)
class House:
    files: int
    lines: int
    root_modules: tuple[str, ...]
    largest_room: tuple[str, int]
    floors: int
    cycles: tuple[tuple[str, ...], ...]
    names_twice: tuple[str, ...]
    docstrings: int
    fragments: tuple[str, ...]
    """Docstrings that begin as a fragment, each with its file and line."""
    vague_names: int
    """Parameters, fields and functions with one of `VAGUE_NAMES`."""
    dataclasses: int
    called_once: int
    """Functions and methods whose name is used in one place only."""
    short_called_once: int
    """Such functions of at most `FEW_LINES` lines."""

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
                f"| cycles | {len(self.cycles)} |",
                f"| class names that occur twice | {len(self.names_twice)} |",
                f"| docstrings that begin as a fragment | {len(self.fragments)} of {self.docstrings:,} |",
                f"| vague names of parameters, fields and functions | {self.vague_names} |",
                f"| dataclasses | {self.dataclasses} |",
                f"| functions used in one place | {self.called_once:,} ({self.short_called_once} short) |",
            )
        )


@cache
def sources() -> Mapping[Path, str]:
    """Return path → text of every file of the package that is not empty."""
    return {path: path.read_text() for path in sorted(ROOT.rglob("*.py")) if path.stat().st_size}


@cache
def trees() -> Mapping[Path, ast.Module]:
    gc.disable()  # Which takes longer than the parser: all that is made stays.
    try:
        return {path: ast.parse(text) for path, text in sources().items()}
    finally:
        gc.enable()


@cache
def every_node(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


@cache
def survey() -> House:
    modules = {module_name(path): tree for path, tree in trees().items()}
    rooms = Counter(
        str(path.parent.relative_to(ROOT.parent)) for path in trees() if path.name != "__init__.py"
    )
    imports = {name: set(imported(tree, modules)) - {name} for name, tree in modules.items()}
    classes = Counter(
        node.name for tree in modules.values() for node in every_node(tree) if isinstance(node, ast.ClassDef)
    )
    written = [(path, line, text) for path, tree in trees().items() for line, text in docstrings(tree)]
    once = list(called_once())
    return House(
        files=len(sources()),
        lines=sum(text.count("\n") for text in sources().values()),
        root_modules=tuple(path.stem for path in sources() if path.parent == ROOT),
        largest_room=rooms.most_common(1)[0],
        floors=floors(imports),
        cycles=tuple(cycles(imports)),
        names_twice=tuple(sorted(name for name, count in classes.items() if count > 1)),
        docstrings=len(written),
        fragments=tuple(
            f"{path.relative_to(ROOT.parent)}:{line}: {text.splitlines()[0]}"
            for path, line, text in written
            if FRAGMENT.match(text)
        ),
        vague_names=sum(name in VAGUE_NAMES for tree in modules.values() for name in named_things(tree)),
        dataclasses=sum(is_dataclass(node) for tree in modules.values() for node in every_node(tree)),
        called_once=len(once),
        short_called_once=sum(node.end_lineno - node.lineno < FEW_LINES for node in once),
    )


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring: of modules, classes and functions, and below fields."""
    for node in every_node(tree):
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def named_things(tree: ast.AST) -> Iterator[str]:
    """Yield the names of all functions, their parameters, and the annotated fields of classes."""
    for node in every_node(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
            yield from (one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
        elif isinstance(node, ast.ClassDef):
            fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
            yield from (one.id for one in fields if isinstance(one, ast.Name))


def is_dataclass(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        "dataclass" in ast.unparse(one) for one in node.decorator_list
    )


def called_once() -> Iterator[ast.FunctionDef]:
    """Yield the functions whose name is read in one place of the package."""
    read = read_names()
    for tree in trees().values():
        for node in every_node(tree):
            if isinstance(node, ast.FunctionDef) and read[node.name] == 1:
                yield node


def never_called() -> Iterator[tuple[Path, ast.FunctionDef | ast.ClassDef]]:
    """Yield functions and classes that no module of the package names: only tests and benchmarks use them.

    Methods that Python calls are left out, and so are names in a string, such as those imported on demand.
    """
    read = read_names()
    strings = " ".join(
        node.value
        for tree in trees().values()
        for node in every_node(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    quoted = set(re.findall(r"\w+", strings))
    for path, tree in trees().items():
        for node in every_node(tree):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("__"):
                continue
            if not read[node.name] and node.name not in quoted:
                yield path, node


@cache
def read_names() -> Counter[str]:
    """Count how often each name is read in the package, as a name, as an attribute or by an import."""
    return Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for tree in trees().values()
        for node in every_node(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )


def sample(count: int, seed: int) -> str:
    """Return random docstrings and names of the package, one per line."""
    drawn = random.Random(seed)
    written = [text for tree in trees().values() for _, text in docstrings(tree)]
    names = sorted({name for tree in trees().values() for name in named_things(tree)})
    return "\n".join(
        (
            "Docstrings:",
            *(" ".join(text.split()) for text in drawn.sample(written, count)),
            "Names:",
            *drawn.sample(names, count),
        )
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, known: Mapping[str, object]) -> Iterator[str]:
    """Yield the modules of the package that a module imports."""
    for node in executed(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found = whole if whole in known else node.module
                yield from [found] if found in known else []
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those under `if TYPE_CHECKING`."""
    left = [tree]
    while left:
        node = left.pop()
        annotated = isinstance(node, ast.If) and isinstance(node.test, ast.Name)
        if not (annotated and node.test.id == "TYPE_CHECKING"):
            yield node
            left += ast.iter_child_nodes(node)


def floors(imports: Mapping[str, set[str]]) -> int:
    """Return the length of the longest chain of top-level packages that import one another."""
    below: dict[str, set[str]] = {}
    for name, others in imports.items():
        below.setdefault(room(name), set()).update(room(other) for other in others)

    @cache
    def height(one: str) -> int:
        return 1 + max((height(other) for other in below[one] if other != one), default=0)

    return max(height(one) for one in below if one != "weftune")


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def cycles(imports: Mapping[str, set[str]]) -> Iterator[tuple[str, ...]]:
    """Yield Tarjan's strongly connected components of more than one module."""
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, metavar="COUNT", help="print this many docstrings and names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unused", action="store_true", help="list what no module of the package calls")
    parser.add_argument("--fragments", action="store_true", help="list the docstrings that are fragments")
    options = parser.parse_args()
    if options.sample:
        print(sample(options.sample, options.seed))
    elif options.unused:
        for path, node in never_called():
            count = node.end_lineno - node.lineno + 1
            print(f"{path.relative_to(ROOT.parent)}:{node.lineno}: {node.name}, {count} lines")
    elif options.fragments:
        print("\n".join(survey().fragments))
    else:
        print(survey())
