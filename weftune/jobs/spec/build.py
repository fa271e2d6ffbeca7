"""The checks that turn the keys of one job into a dataclass: numbers, files, types, and contradicting
keys."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from weftune.adapters.folder import CONFIG, WEIGHTS, missing_weights_message
from weftune.adapters.kinds import BROKEN, KINDS
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.target import ALL_LINEAR, layer_numbers
from weftune.base.spec import ROPE_KEYS
from weftune.core.bounds import Bound, format_value
from weftune.core.limited import slow_pattern_error, suffix_expression
from weftune.core.shapes import SCORE
from weftune.data.spec import EXACT_MATCH, RESERVED_NAMES
from weftune.errors import Mistake
from weftune.jobs.spec.keys import SECTIONS, name_fault, nearest_word, shared_value_reason, unknown_key
from weftune.jobs.spec.layer import ROWS, Fault, Layer, Loc, child_value, dotted_name, find_source_location
from weftune.jobs.spec.schema import EXPECTED, bound_of_key, build, choice_sentence, number_faults
from weftune.objectives.spec import ANSWER_OBJECTIVES, OBJECTIVES, SFT_SPEC

HUB_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
FILE_SUFFIXES = (
    ".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".zip", ".xz",
    ".bz2", ".yaml", ".yml", ".gguf", ".safetensors", ".bin", ".pt", ".jinja", ".md",
)  # fmt: skip


CHATML = "chatml"
"""Name of the built-in chat template."""


Locate = Callable[[Path, str], str]
"""Function that resolves a path relative to a folder, and raises ValueError with a message for the user if it
cannot."""


def is_hub_id(text: str) -> bool:
    """Return whether `text` has the form of a repository id on the Hugging Face Hub (`owner/name` or `name`)
    and not of a path."""
    return re.fullmatch(f"(?:{HUB_PART}/)?{HUB_PART}", text) is not None and not text.lower().endswith(
        FILE_SUFFIXES
    )


def is_revision(text: str) -> bool:
    """Return whether `text` is a valid revision on the Hugging Face Hub. Invalid ones must be refused, since
    the Hub's client builds a path from the revision."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*", text) is not None


def resolve_path(folder: Path, text: str) -> Path:
    """Return the absolute path of `text`, relative to `folder`. Links are not followed, since in the Hub's
    cache a GGUF file is a link to a file without a suffix."""
    return Path(os.path.normpath((folder / Path(os.path.expanduser(text))).absolute()))


def path_exists(path: Path) -> bool:
    """Return whether a path exists. Return False for invalid paths, for which `Path.exists` raises an
    error."""
    return os.path.exists(path)


def missing_path_message(folder: Path, text: str, description: str = "file") -> str:
    """Return the error message for a path that does not exist. The message names the most similar existing
    file."""
    if "\0" in text:
        return "holds a zero byte, which no path can"
    path = resolve_path(folder, text)
    sentence = f"there is no {description} {format_value(text)} in {folder.absolute()}"
    if Path(os.path.expanduser(text)).is_absolute():
        sentence = f"there is no {description} {format_value(text)}"
    try:
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    except OSError:
        beside = []
    # Compared without the suffix: a suffix that they share would make all of them near.
    by_stem = {Path(name).stem: name for name in beside if Path(name).suffix == path.suffix}
    by_stem |= {name: name for name in beside if Path(name).stem == path.stem}
    near = nearest_word(path.stem, by_stem) or nearest_word(path.name, by_stem)
    if near:
        return f"{sentence}; did you mean {Path(text).parent / by_stem[near]}?"
    return f"{sentence}; write a path relative to the jobs file, or an absolute one"


def locate_rows(folder: Path, text: str) -> str:
    """Return the absolute path of a file or folder with rows, or `text` itself if it is a repository id on
    the Hugging Face Hub."""
    path = resolve_path(folder, text)
    if path_exists(path):
        return str(path)
    if not is_hub_id(text):
        raise ValueError(missing_path_message(folder, text))
    return text


def locate_template(folder: Path, text: str) -> str:
    path = resolve_path(folder, text)
    if text == CHATML:
        return text
    if path_exists(path) and path.is_file():
        return str(path)
    if "." not in text and "/" not in text:
        raise ValueError(f"must be chatml or a Jinja file, got {format_value(text)}")
    raise ValueError(missing_path_message(folder, text))


def locate_metric(folder: Path, text: str) -> str:
    """Return the name of a metric: `exact_match`, or `FILE.py:FUNCTION` with the absolute path of the
    file."""
    file, _, function = text.rpartition(":")
    if text == EXACT_MATCH:
        return text
    if not file.endswith(".py") or not function.isidentifier():
        near = nearest_word(text, [EXACT_MATCH])
        hint = f"; did you mean {near}?" if near else ""
        raise ValueError(f"must be {EXPECTED['eval', 'metric']}, got {format_value(text)}{hint}")
    if function in RESERVED_NAMES:
        raise ValueError(f"{function} is already the name of a column; give the function another name")
    path = resolve_path(folder, file)
    if not (path_exists(path) and path.is_file()):
        raise ValueError(missing_path_message(folder, file))
    return f"{path}:{function}"


def locate_adapter(folder: Path, text: str) -> str:
    path = resolve_path(folder, text)
    if not path_exists(path):
        raise ValueError(missing_path_message(folder, text, "folder"))
    if not path_exists(path / CONFIG):
        raise ValueError(f"{format_value(text)} holds no {CONFIG}; name a PEFT adapter folder")
    if not path_exists(path / WEIGHTS):
        raise ValueError(missing_weights_message(path))
    return str(path)


Record = TypeVar("Record")
TOKEN = Bound(is_integer=True, at_least=0, at_most=2**31 - 1)
"""Allowed range of a token id in the keys of a job."""


def build_job(record: type[Record], layer: Layer, folder: Path) -> tuple[Record | None, list[Mistake]]:
    """Return the job that the keys in `layer` describe, or all errors in them. Paths are relative to
    `folder`."""
    values = _set_defaults(layer.values)
    faults: dict[Loc, str] = {}

    def note(more_faults: Iterator[Fault] | list[Fault]) -> None:
        for fault in more_faults:
            faults.setdefault(fault.loc, fault.sentence)

    note(number_faults(values))
    note(_head_faults(values))
    note(_betas_faults(values))
    values, missing_files = _resolve_paths(values, folder)
    note(missing_files)
    adapter, wrong = _build_adapter(values.get("adapter", {}))
    note(wrong)
    objective, wrong = _build_objective(values.get("objective", {}))
    note(wrong)
    made = build(record, {**values, "adapter": adapter, "objective": objective})
    note(made if isinstance(made, list) else [])
    note(_contradiction_faults(values))
    if faults:
        return None, [
            find_source_location(layer.places, loc).mistake(sentence + _sweep_hint(values, loc))
            for loc, sentence in faults.items()
        ]
    assert isinstance(made, record)
    return made, []


def _sweep_hint(values: Mapping[str, Any], location: Loc) -> str:
    """Return a hint to use `sweep` if a list was given where a single value is required, or else an empty
    string."""
    value: Any = values
    for part in location:
        value = child_value(value, part)
    in_list = any(isinstance(part, int) for part in location)
    one_value = not in_list and (bound_of_key(location) is not None or location == ("schedule",))
    if not one_value or shared_value_reason(location) or not isinstance(value, list | tuple) or not value:
        return ""
    return f"; to try each, write sweep: {{over: {{{dotted_name(location)}: [...]}}}}"


def _set_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set the defaults of a job's keys: one epoch, the learning rate of the objective and, if the objective
    trains one, a scalar head. Also replace the value 0 that disables gradient clipping by None."""
    whole = dict(values)
    objective = whole.get("objective")
    kind = objective.get("kind") if isinstance(objective, Mapping) else None
    if isinstance(kind, str) and kind in OBJECTIVES:
        whole.setdefault("learning_rate", OBJECTIVES[kind].learning_rate)
        if OBJECTIVES[kind].scalar_head and _may_have_head(adapter := whole.get("adapter", {})):
            whole["adapter"] = {**adapter, "modules_to_save": adapter.get("modules_to_save") or [SCORE]}
    if whole.get("steps") is None and whole.get("epochs") is None:
        whole["epochs"] = 1.0
    if whole.get("clip") == 0 and not isinstance(whole["clip"], bool):
        whole["clip"] = None
    return whole


def _may_have_head(adapter: Any) -> bool:
    """Return whether the files of the adapter that a job starts from can contain a scalar head, judging by
    the keys of the job's adapter."""
    kind = adapter.get("kind", "lora") if isinstance(adapter, Mapping) else None
    return isinstance(kind, str) and kind in KINDS and issubclass(KINDS[kind], LoraSpec)


def _build_adapter(keys: Any) -> tuple[Any, list[Fault]]:
    """Return the adapter's spec and the errors in its keys. A value that is not a mapping is returned
    unchanged."""
    if not isinstance(keys, Mapping):
        return keys, []
    kind = keys.get("kind", "lora")
    if isinstance(kind, str) and kind in BROKEN:
        return LoraSpec(), [Fault(("adapter", "kind"), str(BROKEN[kind]))]
    if not isinstance(kind, str) or kind not in KINDS:
        return LoraSpec(), [Fault(("adapter", "kind"), choice_sentence(list(KINDS), kind))]
    own = {item.name: item.default for item in fields(KINDS[kind])}
    others = [
        key
        for key in keys
        if key in SECTIONS["adapter"]
        # A spec that is built again from a record has all of its keys.
        and (key not in own or (key in KINDS[kind].unused_keys and keys[key] != own[key]))
    ]
    faults = [Fault(("adapter", key), f"is not a key of {kind} adapters; leave it out") for key in others]
    made = build(KINDS[kind], {key: keys[key] for key in keys if key not in others}, "adapter", ("adapter",))
    return (LoraSpec(), [*faults, *made]) if isinstance(made, list) else (made, faults)


def _build_objective(keys: Any) -> tuple[Any, list[Fault]]:
    """Return the objective's spec and the errors in its keys. A value that is not a mapping is returned
    unchanged."""
    if not isinstance(keys, Mapping):
        return keys, []
    kind = keys.get("kind", "sft")
    if not isinstance(kind, str) or kind not in OBJECTIVES:
        return SFT_SPEC, [Fault(("objective", "kind"), choice_sentence(list(OBJECTIVES), kind))]
    own = {item.name for item in fields(OBJECTIVES[kind])}
    others = [key for key in keys if key in SECTIONS["objective"] and key not in own]
    faults = [Fault(("objective", key), f"is not a key of {kind}; leave it out") for key in others]
    keys_without_sweep = {key: keys[key] for key in keys if key not in others}
    made = build(OBJECTIVES[kind], keys_without_sweep, "objective", ("objective",))
    if isinstance(made, list):
        return SFT_SPEC, [*faults, *made]
    return made, [*faults, *(Fault(("objective", key), sentence) for key, sentence in made.faults())]


LOCATED: tuple[tuple[str, str, Locate], ...] = (
    ("data", "path", locate_rows),
    ("data", "chat_template", locate_template),
    ("eval", "path", locate_rows),
    ("eval", "metric", locate_metric),
    ("adapter", "init_from", locate_adapter),
)
"""Section and key of each value of a job that is or contains a path, with the function that resolves the
path."""


def _resolve_paths(values: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[Fault]]:
    """Return the values of a job with absolute paths, and an error for every path that does not exist."""
    faults: list[Fault] = []

    def resolve_value(value: Any, location: Loc, locate: Locate) -> Any:
        if isinstance(value, list):
            return [resolve_value(item, (*location, index), locate) for index, item in enumerate(value)]
        if isinstance(value, Mapping) and "path" in value:
            return {**value, "path": resolve_value(value["path"], (*location, "path"), locate)}
        if not isinstance(value, str):
            return value
        try:
            if not value:
                raise ValueError("must not be empty")
            return locate(folder, value)
        except ValueError as error:
            faults.append(Fault(location, str(error)))
            return value

    whole = dict(values)
    for section, key, locate in LOCATED:
        part = whole.get(section)
        if isinstance(part, Mapping) and key in part:
            whole[section] = {**part, key: resolve_value(part[key], (section, key), locate)}
    return whole, faults


def _contradiction_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the errors in a job's name, and an error for each set of keys that are valid by themselves but
    contradict each other."""
    if "name" in values and (sentence := name_fault(values["name"])):
        yield Fault(("name",), sentence)
    if values.get("epochs") is not None and values.get("steps") is not None:
        yield Fault(("steps",), "give epochs or steps, not both")
    yield from _eval_faults(values)
    yield from _data_faults(values.get("data"))
    yield from _preference_faults(values)
    yield from _adapter_faults(values.get("adapter"))


def _betas_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield an error if the number of AdamW's betas is not two. Pydantic would report each missing beta
    separately."""
    if "betas" not in values:
        return
    betas = values["betas"]
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        yield Fault(("betas",), f"must be {EXPECTED[('betas',)]}, got {format_value(betas)}")


def _eval_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    held_out = values.get("eval")
    if held_out is None:
        if values.get("keep") == "best":
            yield Fault(
                ("keep",), "best needs eval: {fraction: 0.1} or eval: {path: ...} to know which is best"
            )
        if values.get("early_stop") is not None:
            yield Fault(("early_stop",), "needs eval: {fraction: 0.1, every: 0.1} to know when to stop")
    if not isinstance(held_out, Mapping):
        return
    path, fraction = held_out.get("path"), held_out.get("fraction")
    if path is not None and fraction is not None:
        yield Fault(("eval",), "give path or fraction, not both")
    if path is None and fraction is None:
        yield Fault(
            ("eval",), "needs path (a file of held-out rows) or fraction (a share of the training rows)"
        )
    if held_out.get("metric") is not None and held_out.get("generate") is None:
        yield Fault(("eval", "metric"), "needs generate: {prompts: 8}, the answers that it measures")
    if values.get("early_stop") is not None and held_out.get("every") is None:
        yield Fault(
            ("early_stop",), "needs eval.every: without it the job is evaluated at its start and end only"
        )


def _data_faults(data: Any) -> Iterator[Fault]:
    if not isinstance(data, Mapping):
        return
    path, rows = data.get("path"), data.get(ROWS)
    if path is not None and rows is not None:
        yield Fault(("data",), "give path or rows, not both")
    elif path is None and rows is None:
        yield Fault(("data",), "needs path: a file, a Hub id, or a list of {path, weight}")
    elif isinstance(path, list) and not path:
        yield Fault(("data", "path"), "must name at least one file or Hub id, got an empty list")
    if rows is not None and len(rows) == 0:
        yield Fault(("data",), "must hold at least one row")
    elif rows is not None and not isinstance(rows[0], Mapping):
        yield Fault(
            ("data",), f"must be rows, each a mapping such as {{text: ...}}, got {format_value(rows[0])}"
        )


def _preference_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    objective, data = values.get("objective"), values.get("data")
    if not isinstance(objective, Mapping):
        return
    kind = objective.get("kind")
    if (
        kind in ANSWER_OBJECTIVES
        and isinstance(data, Mapping)
        and data.get("train_on") in ("all", "completion")
    ):
        yield Fault(("data", "train_on"), f"objective {kind} always trains on the answers; leave it out")
    if kind == "kto" and values.get("batch_size") == 1 and "apo" not in str(objective.get("loss_type")):
        yield Fault(
            ("batch_size",),
            "must be at least 2 for objective kto, which compares the answers of a batch; or write "
            "loss_type: apo_zero_unpaired",
        )


def _head_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield an error if the job cannot train the scalar head that its objective needs, or has one that its
    objective does not need."""
    objective, adapter, held_out = (values.get(key) for key in ("objective", "adapter", "eval"))
    kind = objective.get("kind", "sft") if isinstance(objective, Mapping) else "sft"
    if not isinstance(kind, str) or kind not in OBJECTIVES:
        return
    saved = adapter.get("modules_to_save") if isinstance(adapter, Mapping) else None
    if saved and not (OBJECTIVES[kind].scalar_head and saved in ([SCORE], (SCORE,))):
        yield Fault(("adapter", "modules_to_save"), unknown_key("adapter", "modules_to_save"))
    if not OBJECTIVES[kind].scalar_head:
        return
    chosen = adapter.get("kind") if isinstance(adapter, Mapping) else None
    if isinstance(chosen, str) and chosen in KINDS and not _may_have_head(adapter):
        kinds = [name for name, spec in KINDS.items() if issubclass(spec, LoraSpec)]
        yield Fault(
            ("adapter", "kind"),
            f"objective {kind} trains a scalar head, which the files of {chosen} adapters cannot "
            f"hold; write {', '.join(kinds[:-1])} or {kinds[-1]}",
        )
    if isinstance(held_out, Mapping) and held_out.get("generate") is not None:
        yield Fault(("eval", "generate"), f"objective {kind} trains no model that answers; leave it out")


def _adapter_faults(adapter: Any) -> Iterator[Fault]:
    if not isinstance(adapter, Mapping):
        return
    targets, parameters = adapter.get("targets"), adapter.get("target_parameters")
    yield from _parameter_faults(adapter, parameters)
    yield from _layer_faults(adapter.get("layers"))
    yield from _token_faults(adapter.get("trainable_token_indices"))
    yield from _init_faults(adapter)
    if isinstance(targets, list | tuple):
        if not targets and not parameters:
            yield Fault(
                ("adapter", "targets"), f"must name at least one module; for all of them write {ALL_LINEAR}"
            )
        for index, target in enumerate(targets):
            if target == "":
                yield Fault(("adapter", "targets", index), "must not be empty")
            elif target == ALL_LINEAR:
                yield Fault(("adapter", "targets", index), f"write targets: {ALL_LINEAR}, without a list")
    elif isinstance(targets, str):
        yield from _expression_faults(targets, targets, ("adapter", "targets"))
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = adapter.get(name)
        for pattern in patterns if isinstance(patterns, Mapping) else ():
            yield from _expression_faults(pattern, suffix_expression(pattern), ("adapter", name, pattern))


def _parameter_faults(adapter: Mapping[str, Any], parameters: Any) -> Iterator[Fault]:
    for index, parameter in enumerate(parameters if isinstance(parameters, list | tuple) else ()):
        if parameter == "":
            yield Fault(("adapter", "target_parameters", index), "must not be empty")
    if parameters and adapter.get("dropout"):
        yield Fault(("adapter", "dropout"), "must be 0 where target_parameters names experts, as in PEFT")
    if parameters and adapter.get("kind", "lora") != "lora":
        yield Fault(("adapter", "target_parameters"), "names experts, which only lora adapts; leave it out")
    if parameters and adapter.get("layers") is not None:
        yield Fault(("adapter", "layers"), "chooses linears only; leave it out where experts are adapted")


def _token_faults(tokens: Any) -> Iterator[Fault]:
    seen: set[int] = set()
    for index, token in enumerate(tokens if isinstance(tokens, list | tuple) else ()):
        where = ("adapter", "trainable_token_indices", index)
        if (sentence := TOKEN.fault(token)) is not None:
            yield Fault(where, sentence)
        elif token in seen:
            yield Fault(where, f"names the token {token} twice; leave it out")
        else:
            seen.add(token)


def _init_faults(adapter: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield an error if a job has more than one key for the initialisation of virtual tokens."""
    init, text = adapter.get("init", "random"), adapter.get("init_text", "")
    if init == "text" and not text:
        yield Fault(("adapter", "init"), "text needs init_text: the text that virtual tokens start from")
    if init != "text" and text:
        yield Fault(("adapter", "init_text"), "is what init: text starts from; write that, or leave it out")
    if init != "random" and adapter.get("init_from") is not None:
        yield Fault(("adapter", "init"), "leave it out beside init_from, which virtual tokens start from")


def _layer_faults(layers: Any) -> Iterator[Fault]:
    loc = ("adapter", "layers")
    if isinstance(layers, list | tuple):
        if not layers:
            yield Fault(loc, "must name at least one layer; for all of them leave it out")
        elif any(isinstance(one, int) and one < 0 for one in layers):
            yield Fault(loc, f"layers are counted from 0, got {format_value(layers)}")
    elif isinstance(layers, int) and layers < 0:
        yield Fault(loc, f"layers are counted from 0, got {format_value(layers)}")
    elif isinstance(layers, str):
        try:
            layer_numbers(layers)
        except ValueError as error:
            yield Fault(loc, f"{error}; write {EXPECTED[loc]}")


def _expression_faults(text: str, expression: str, location: Loc) -> Iterator[Fault]:
    """Yield an error if `expression` is not a valid regular expression. The message quotes `text`, the part
    of the expression that the user wrote."""
    if not text:
        yield Fault(location, "must not be empty")
    if slow := slow_pattern_error([expression]):
        yield Fault(location, slow)
        return
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        yield Fault(location, f"is no regular expression: {error}; a list names module endings without one")


ROPE: Loc = ("base", "rope_scaling")
BY_LONGEST = (
    "changes the positions of all samples with the longest one of a batch, so a job's results would depend "
    "on the samples that it is packed with; write rope_type: yarn"
)
NO_SCALING: Mapping[str, str] = {
    "dynamic": BY_LONGEST,
    "longrope": BY_LONGEST,
    "su": BY_LONGEST,
    "default": "scales nothing; leave rope_scaling out",
}
"""Maps each type of rope scaling in transformers that is not supported to the reason why it is refused."""


def check_rope(base: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Return the keys of the base, and the errors in its rope scaling that a check of types does not find. In
    the returned keys, `type` is renamed to `rope_type`, its newer name."""
    keys = base.get("rope_scaling")
    if not isinstance(keys, Mapping):
        return dict(base), []
    if "type" in keys and "rope_type" in keys:
        return {**base, "rope_scaling": None}, [Fault((*ROPE, "type"), "give rope_type or type, not both")]
    name = "type" if "type" in keys else "rope_type"
    kind = keys.get(name)
    if isinstance(kind, str) and kind in NO_SCALING:
        return {**base, "rope_scaling": None}, [Fault((*ROPE, name), f"{kind} {NO_SCALING[kind]}")]
    keys = {"rope_type" if key == "type" else key: value for key, value in keys.items()}
    whole = {**base, "rope_scaling": keys}
    return whole, [*number_faults({"base": whole}), *_rope_faults(kind, keys)]


def _rope_faults(kind: Any, keys: Mapping[str, Any]) -> Iterator[Fault]:
    if kind not in ROPE_KEYS:
        return
    for key in keys:
        others = [name for name, known in ROPE_KEYS.items() if key in known and name != kind]
        if others and key not in ROPE_KEYS[kind]:
            yield Fault((*ROPE, key), f"is a key of {' and '.join(others)}, not of {kind}; leave it out")
    lacking = [key for key in ("low_freq_factor", "high_freq_factor") if keys.get(key) is None]
    if kind == "llama3" and lacking:
        yield Fault(
            ROPE, f"llama3 needs {' and '.join(lacking)}; Llama 3 has low_freq_factor: 1, high_freq_factor: 4"
        )
    for lower, upper, default in (("low_freq_factor", "high_freq_factor", 4), ("beta_slow", "beta_fast", 32)):
        low, high = keys.get(lower), keys.get(upper, default)
        if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
            yield Fault(
                (*ROPE, lower),
                f"must be below {upper}, which is {format_value(high)}, got {format_value(low)}",
            )
