"""A YAML file as plain values, with the line of every key. Numbers and booleans follow YAML 1.2: `2e-4` is a
number, and `no` and dates are strings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from weftune.errors import Mistake, SpecError
from weftune.jobs.spec.layer import Loc, Place, dotted_name

MAX_NODES = 50_000
"""Maximum number of values in a YAML file. Without a limit, nested aliases could expand a few lines to
billions of values."""
MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 50
"""Maximum nesting depth of lists and mappings in a YAML file. The time that the YAML reader takes per token
is proportional to the depth."""

TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  # the parent class declares it so
    depth = 0

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= MAX_DEPTH:
            raise RecursionError
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise RecursionError
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _add_yaml_resolver(tag: str, pattern: str, first_characters: str) -> None:
    _Loader.add_implicit_resolver(TAG + tag, re.compile(rf"(?:{pattern})\Z"), list(first_characters))


_add_yaml_resolver("bool", "true|True|TRUE|false|False|FALSE", "tTfF")
_add_yaml_resolver("null", "~|null|Null|NULL|", "~nN")
_Loader.add_implicit_resolver(TAG + "null", re.compile(r"\Z"), [""])
_add_yaml_resolver("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", "-+0123456789")
_add_yaml_resolver(
    "float",
    r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "-+.0123456789",
)
_add_yaml_resolver("merge", "<<", "<")


class Document:
    """A YAML file as plain values, with the line of every key and the errors that were found in it."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.values: Any = None
        self.lines: dict[Loc, int] = {}
        self.faults: list[Mistake] = []
        self._nodes = 0
        self._open: set[int] = set()

    def read(self, node: yaml.Node) -> None:
        self.lines[()] = node.start_mark.line + 1
        self.values = self._read_value(node, ())

    def _add_fault(self, node: yaml.Node, location: Loc, sentence: str) -> None:
        place = Place(self.file, node.start_mark.line + 1, dotted_name(location))
        self.faults.append(place.mistake(sentence))

    def _read_value(self, node: yaml.Node, location: Loc) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise SpecError(
                Mistake(self.file, f"holds more than {MAX_NODES} values once aliases are followed")
            )
        if isinstance(node, yaml.ScalarNode):
            return self._read_scalar(node, location)
        if id(node) in self._open:
            # The node is the anchored value, which begins further up than its alias.
            place = Place(self.file, self.lines[location], dotted_name(location))
            self.faults.append(place.mistake("an alias stands inside the thing it names; remove it"))
            return None
        self._open.add(id(node))
        try:
            return (
                self._read_mapping(node, location)
                if isinstance(node, yaml.MappingNode)
                else self._read_sequence(node, location)
            )
        finally:
            self._open.discard(id(node))

    def _read_sequence(self, node: yaml.Node, location: Loc) -> list[Any]:
        for index, item in enumerate(node.value):
            self.lines[(*location, index)] = item.start_mark.line + 1
        return [self._read_value(item, (*location, index)) for index, item in enumerate(node.value)]

    def _read_mapping(self, node: yaml.MappingNode, location: Loc) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == TAG + "merge":
                result = self._merge_values(value, location) | result
        first: dict[str, int] = {}
        for key, value in node.value:
            if key.tag == TAG + "merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                self._add_fault(key, location, "a key must be plain text")
                continue
            line = key.start_mark.line + 1
            here = (*location, key.value)
            if key.value in first:
                self._add_fault(key, here, f"is written twice, first on line {first[key.value]}; remove one")
                continue
            first[key.value] = self.lines[here] = line
            result[key.value] = self._read_value(value, here)
        return result

    def _merge_values(self, node: yaml.Node, location: Loc) -> dict[str, Any]:
        """Return the values that YAML's merge key `<<` adds, from one mapping or a list of mappings. Earlier
        mappings take precedence."""
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: dict[str, Any] = {}
        for part in reversed(parts):
            if isinstance(part, yaml.MappingNode):
                result |= self._read_value(part, location) or {}
            else:
                self._add_fault(part, location, "<< takes a mapping, or a list of mappings")
        return result

    def _read_scalar(self, node: yaml.ScalarNode, location: Loc) -> Any:
        text, tag = node.value, node.tag
        try:
            if tag == TAG + "null":
                return None
            if tag == TAG + "bool":
                return text.lower() == "true"
            if tag == TAG + "int":
                return int(text, 16 if text.startswith("0x") else 10)
            if tag == TAG + "float":
                return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
        except ValueError:
            self._add_fault(node, location, "is a number that cannot be read")
            return None
        if tag not in (TAG + "str", TAG + "merge"):
            self._add_fault(node, location, f"the tag {tag} means nothing here; remove it")
            return None
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            self._add_fault(node, location, "holds half a surrogate pair, which is no text; remove it")
            return None
        return text


def read_yaml(path: Path) -> Document:
    """Read a YAML file. Raise SpecError with the line if it is not valid YAML."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise SpecError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise SpecError(f"{path} is a folder; name the YAML file in it") from None
    except UnicodeDecodeError as error:
        raise SpecError(Mistake(path.name, f"is not UTF-8 text (byte {error.start})")) from None
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    return parse_yaml(text, path.name)


def parse_yaml(text: str, file: str) -> Document:
    document = Document(file)
    if len(text) > MAX_CHARACTERS:
        raise SpecError(Mistake(file, f"has more than {MAX_CHARACTERS:,} characters; write shorter files"))
    try:
        node = _Loader(text).get_single_node()
        if node is not None:
            document.read(node)
    except yaml.MarkedYAMLError as error:
        raise SpecError(_syntax_mistake(error, file)) from None
    except yaml.YAMLError as error:
        raise SpecError(Mistake(file, f"is not YAML: {str(error).splitlines()[0]}")) from None
    except RecursionError:
        raise SpecError(Mistake(file, "is nested too deeply")) from None
    return document


def _syntax_mistake(error: yaml.MarkedYAMLError, file: str) -> Mistake:
    mark = error.problem_mark or error.context_mark
    problem = error.problem or "it cannot be read"
    if "'\\t'" in problem:
        problem = "a tab stands where YAML wants spaces; indent with spaces"
    elif problem == "mapping values are not allowed here":
        problem = "a colon stands where no key can be; put the text in quotes, or mend the indentation"
    return Mistake(f"{file}:{mark.line + 1}" if mark else file, f"is not YAML: {problem}")
