"""The mutants of a module: its source with one small change each, by the operators of cosmic-ray and two of
our own.

Some places are left alone, since what stands there changes no behaviour on a CPU: annotations and what is
imported for them, which mypy reads; the arguments of decorators, such as whether a record is frozen; `zip`'s
strictness and the `*` before keywords, which are assertions; and what only concerns the speed of a GPU.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Name, PythonNode

Position = tuple[int, int]


class RemoveStatement(Operator):
    """A call or an augmented assignment that stands by itself becomes `pass`."""

    def mutation_positions(self, node: object) -> Iterator[tuple[Position, Position]]:
        if isinstance(node, PythonNode) and node.type == "simple_stmt" and _acts(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: PythonNode, index: int) -> PythonNode:
        gone = node.children[0]
        node.children[0] = Name("pass", gone.start_pos, prefix=gone.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("f(x)\n", "pass\n"), Example("x += 1\n", "pass\n"))


def _acts(statement: parso.tree.NodeOrLeaf) -> bool:
    if statement.type in ("atom_expr", "power"):
        last = statement.children[-1]
        return last.type == "trailer" and last.children[0].value == "("
    if statement.type == "expr_stmt":
        middle = statement.children[1]
        return getattr(middle, "value", "=") not in ("=", ":") and middle.type == "operator"
    return False


class TurnMembership(Operator):
    """`in` becomes `not in`, and the other way round."""

    def mutation_positions(self, node: object) -> Iterator[tuple[Position, Position]]:
        if isinstance(node, PythonNode) and node.type == "comparison" and _membership(node):
            yield node.children[1].start_pos, node.children[1].end_pos

    def mutate(self, node: PythonNode, index: int) -> PythonNode:
        turned = "not in" if _membership(node) == "in" else "in"
        node.children[1] = Name(turned, node.children[1].start_pos, prefix=" ")
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("a in b", "a not in b"), Example("a not in b", "a in b"))


def _membership(comparison: PythonNode) -> str | None:
    word = " ".join(comparison.children[1].get_code().split())
    return word if word in ("in", "not in") else None


OWN = {"RemoveStatement": RemoveStatement, "TurnMembership": TurnMembership}

BINARY = (
    "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul LShift_RShift RShift_LShift "
    "BitOr_BitAnd BitAnd_BitOr BitXor_BitOr"
)
COMPARISON = "Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is"
OPERATORS = (
    *(f"ReplaceBinaryOperator_{pair}" for pair in BINARY.split()),
    *(f"ReplaceComparisonOperator_{pair}" for pair in COMPARISON.split()),
    *(f"ReplaceUnaryOperator_Delete_{one}" for one in ("USub", "Invert", "Not")),
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ExceptionReplacer",
    "NumberReplacer",
    "RemoveDecorator",
    "ZeroIterationForLoop",
    *OWN,
)
"""Of cosmic-ray's replacements of one operator those that are nearest to it: `+` by `-`, not by `|`, which
any test finds. `==` by `is`, and `is` by `==`, are the same for what we compare."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change to a module, not yet made."""

    module: str
    """Its path from the root."""
    operator: str
    occurrence: int
    line: int

    def source(self, original: str) -> str | None:
        """The changed source; None where it cannot be made or compiled."""
        try:
            changed = mutate_code(original, _operator(self.operator), self.occurrence)
            ast.parse(changed)
        except (SyntaxError, TypeError, AttributeError):
            # cosmic-ray knows no exceptions with a dot in their names.
            return None
        return changed


@cache
def _operator(name: str) -> Operator:
    return OWN[name]() if name in OWN else get_operator(f"core/{name}")()


def mutants_of(module: str, source: str) -> list[Mutant]:
    """In the order of their operators, then of their places."""
    nodes = list(ast_nodes(get_ast(source)))
    spared = list(_spared(source))
    called_by_class = set(_static_methods(source))
    found = []
    for name in OPERATORS:
        operator = _operator(name)
        places = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, (start, stop) in enumerate(places):
            inside = any(first <= start and stop <= last for first, last in spared)
            left_alone = start[0] in called_by_class if name == "RemoveDecorator" else inside
            if not left_alone:
                found.append(Mutant(module, name, occurrence, start[0]))
    return found


def _static_methods(source: str) -> Iterator[int]:
    """The lines of `@staticmethod`: what is called by its class, as ours are, is the same without it."""
    for node in ast.walk(ast.parse(source)):
        for one in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(one, ast.Name) and one.id == "staticmethod":
                yield one.lineno


def _spared(source: str) -> Iterator[tuple[Position, Position]]:
    """From where to where nothing is changed."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.args.kwonlyargs:
            yield _before_keywords(node)
        for one in _left_alone(node):
            assert one.end_lineno is not None
            assert one.end_col_offset is not None
            yield (one.lineno, one.col_offset), (one.end_lineno, one.end_col_offset)


def _before_keywords(function: ast.FunctionDef) -> tuple[Position, Position]:
    """Where the `*` stands behind which arguments have to be named: an assertion, too."""
    taken = function.args
    positional = [*taken.posonlyargs, *taken.args, *taken.defaults]
    ends = [(one.end_lineno or 0, one.end_col_offset or 0) for one in positional]
    first = taken.kwonlyargs[0]
    return max(ends, default=(function.lineno, function.col_offset)), (first.lineno, first.col_offset)


def _left_alone(node: ast.AST) -> Iterable[ast.expr]:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        yield node.test
    if isinstance(node, ast.FunctionDef):
        yield from node.decorator_list
        if node.returns is not None:
            yield node.returns
    if isinstance(node, ast.ClassDef):
        yield from node.decorator_list
    if isinstance(node, ast.keyword) and node.arg in ("strict", "non_blocking", "pin_memory", "num_warps"):
        yield node.value
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield node.annotation


def changes(original: str, changed: str) -> tuple[str, str]:
    """The lines that a mutant replaces and those that it puts there, without indentation."""
    gone, come = [], []
    for line in difflib.ndiff(original.splitlines(), changed.splitlines()):
        if line.startswith("- "):
            gone.append(line[2:].strip())
        elif line.startswith("+ "):
            come.append(line[2:].strip())
    return "\n".join(filter(None, gone)), "\n".join(filter(None, come))
