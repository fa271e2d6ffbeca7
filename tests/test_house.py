"""The house stays as it was rebuilt: few modules at the root, no cycles, names that one search finds."""

import ast
from pathlib import Path

from tests.house import cycles, every_node, imported, survey, trees

ROOT = Path(__file__).parents[1]


def test_no_modules_import_one_another_in_a_cycle():
    assert survey().cycles == ()


def test_the_root_holds_the_package_its_command_and_its_errors_only():
    assert survey().root_modules == ("__init__", "__main__", "errors")


def test_rooms_floors_and_names_keep_within_bounds():
    found = survey()
    assert found.floors <= 10
    assert found.largest_room[1] <= 24
    assert not found.names_twice, found.names_twice


def test_no_docstring_begins_in_the_middle_of_a_sentence():
    assert survey().fragments == ()


def test_a_cycle_is_found():
    assert [set(one) for one in cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})] == [{"a", "b", "c"}]


def test_imports_inside_functions_count_and_those_for_annotations_do_not():
    lines = (
        "if TYPE_CHECKING:",
        "    from weftune.b import B",
        "def f():",
        "    from weftune import a",
        "    import weftune.c",
    )
    tree = ast.parse("\n".join(lines))
    known = {"weftune.a": 0, "weftune.b": 0, "weftune.c": 0}
    assert set(imported(tree, known)) == {"weftune.a", "weftune.c"}


def test_what_runs_and_trains_is_composed_and_inherits_from_no_class_of_ours():
    """But for protocols, which have no code, and mistakes."""
    every = [node for tree in trees().values() for node in every_node(tree) if isinstance(node, ast.ClassDef)]
    ours = {one.name for one in every if not one.name.endswith("Error")}
    rooms = tuple(ROOT / "weftune" / room for room in ("run", "trainer"))
    inherits = {
        f"{path.stem}.{node.name}"
        for path, tree in trees().items()
        if any(path.is_relative_to(room) for room in rooms)
        for node in every_node(tree)
        if isinstance(node, ast.ClassDef)
        and ours & {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
    }
    assert inherits == set()
