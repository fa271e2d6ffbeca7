"""Checks of jobs against the base and the other jobs of the run.

Errors that they find are, for example, targets that match nothing, samples longer than the base's context,
ranks larger than a layer's width, and jobs that start from incompatible adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from weftune.adapters.folder import refuse_slow_patterns
from weftune.adapters.lora.spec import LoraSpec, find_pattern, read_spec
from weftune.adapters.target import TargetSpec, layer_numbers, source_job
from weftune.base.spec import BaseSpec
from weftune.core.bounds import format_value
from weftune.core.limited import slow_pattern_error
from weftune.core.shapes import ModelShape, SiteShape, layer_number
from weftune.errors import AdapterError, Mistake, OutputError, UserError
from weftune.jobs.spec.keys import nearest_word
from weftune.jobs.spec.layer import Fault, Loc
from weftune.jobs.spec.spec import JobSpec, locate_in_job, to_steps
from weftune.jobs.store.job_file import read_job_file
from weftune.plan.cost.memory import format_bytes

HIGH_RATE, HIGH_DECAY = 0.1, 1.0
"""Thresholds of the learning rate and of the weight decay. A value above its threshold causes a warning that
it may be a typing error."""
MIN_TOKENS = 2
"""Minimum number of tokens in a sample. With fewer, no token could be predicted from an earlier one."""
NAMED = 4
"""Maximum number of jobs that a message names. If there are more, the message gives their number instead."""


def check_on_base(
    jobs: Sequence[JobSpec], shape: ModelShape, base: BaseSpec, locate: Callable[..., str] = locate_in_job
) -> list[Mistake]:
    """Return the errors in a run's jobs that can be found from the shape (sizes and module names) of the base
    model, such as targets that match no linear."""
    return [
        *check_targets(jobs, shape, locate),
        *check_lengths(jobs, shape, base, locate),
        *check_starts(jobs, shape, locate),
    ]


def check_targets(
    jobs: Sequence[JobSpec], shape: ModelShape, locate: Callable[..., str] = locate_in_job
) -> list[Mistake]:
    """Return an error for every target that matches no linear of the base. `locate` is a function that
    returns the file and line of a job's key."""
    return [
        Mistake(locate(job.name, "adapter", *fault.loc), fault.sentence)
        for job in jobs
        for fault in _adapter_faults(job.adapter, shape)
    ]


def check_lengths(
    jobs: Sequence[JobSpec], shape: ModelShape, base: BaseSpec, locate: Callable[..., str] = locate_in_job
) -> list[Mistake]:
    """Return an error for each value of `max_length` that exceeds the base's context. The message names all
    jobs with this value."""
    over: dict[tuple[str, int], list[str]] = {}
    for job in jobs:
        if job.data.max_length is not None and job.data.max_length > shape.context:
            place = locate(job.name, "data", "max_length")
            over.setdefault((place, job.data.max_length), []).append(job.name)
    return [
        Mistake(
            place,
            f"max_length {length} of {_list_names(names)} is over the base's context of {shape.context} "
            f"tokens; write {shape.context} or less, or {_longer_context_advice(length, shape, base)}",
        )
        for (place, length), names in over.items()
    ]


def _longer_context_advice(length: int, shape: ModelShape, base: BaseSpec) -> str:
    """Return advice for the user on how to extend the base model's context to `length` tokens."""
    if shape.unscaled_context is None:
        return "choose another base, for the positions of this one cannot be scaled"
    factor = math.ceil(length / shape.unscaled_context)
    if base.rope_scaling is not None:
        return f"raise base.rope_scaling.factor to {factor}"
    return f"extend it with `rope_scaling: {{rope_type: yarn, factor: {factor}}}` under `base:`"


def _adapter_faults(adapter: TargetSpec, shape: ModelShape) -> Iterator[Fault]:
    """Yield the errors in an adapter's spec that depend on the base model. Locations in the errors are
    relative to the key `adapter`."""
    names = [site.name for site in shape.sites]
    wrong = [
        Fault(key, slow)
        for key, expression in adapter.expressions().items()
        # An expression that would take too long on the module names of this base.
        if (slow := slow_pattern_error([expression], names))
    ]
    if adapter.layers is not None and (last := max(layer_numbers(adapter.layers))) >= shape.layers:
        sentence = f"there is no layer {last}: the base has layers 0 to {shape.layers - 1}"
        wrong.append(Fault(("layers",), sentence))
    yield from wrong or _target_faults(adapter, shape)
    yield from _virtual_token_faults(adapter, shape)
    yield from _parameter_faults(adapter, shape)
    yield from _token_faults(adapter, shape)


def _target_faults(adapter: TargetSpec, shape: ModelShape) -> Iterator[Fault]:
    targets = adapter.targets
    if "targets" in adapter.unused_keys:
        return
    default = next(item.default for item in fields(adapter) if item.name == "targets")
    if isinstance(targets, str) or targets == default:
        if not any(adapter.adapts(site) for site in _linear_names(shape)):
            # Default targets are names from several model families, some of which a base has.
            name_them = f"name modules of the base: its modules end in {', '.join(_linear_suffixes(shape))}"
            yield Fault(
                ("targets",), _no_match_message(targets, shape) if isinstance(targets, str) else name_them
            )
        return
    for index, target in enumerate(targets):
        alone = replace(adapter, targets=(target,))
        if not any(alone.adapts(site) for site in _linear_names(shape)):
            sentence = (
                f"{format_value(target)} matches no module of the base; {_suggest_targets(target, shape)}"
            )
            yield Fault(("targets", index), sentence)


def _virtual_token_faults(adapter: TargetSpec, shape: ModelShape) -> Iterator[Fault]:
    """Yield an error for each reason why the base does not support the adapter's virtual tokens."""
    kind = adapter.kind
    if (before := adapter.positions_before) > shape.context - MIN_TOKENS:
        sentence = f"{before} leave no room for a sample in the base's context of {shape.context} tokens"
        yield Fault(("num_virtual_tokens",), f"{sentence}; write fewer")
    if adapter.rows_before and (outside := _linears_outside_layers(shape)):
        sentence = f"{kind} needs embeddings that go into the first layer as they are, and the base has"
        yield Fault(("kind",), f"{sentence} {outside} around its layers; choose another kind")
    # Not checked for kinds with targets: their expressions may take forever, and have been refused.
    if adapter.keys_before and (seen := sum(map(adapter.adapts, shape.sites))) != shape.layers:
        sentence = f"{kind} needs the keys and values of every layer, and the base has them in"
        yield Fault(("kind",), f"{sentence} {seen} of {shape.layers}; choose another kind")


def _linears_outside_layers(shape: ModelShape) -> str | None:
    return next((site.name for site in shape.sites if layer_number(site.name) is None), None)


def _no_match_message(expression: str, shape: ModelShape) -> str:
    sentence = f"the regular expression {format_value(expression)} matches no whole module path of the base"
    words = [word.strip() for word in expression.split(",")]
    if set(words) <= set(_linear_suffixes(shape)):
        return f"{sentence}; for endings of paths write a list: [{', '.join(words)}]"
    return f"{sentence}; {_suggest_targets(expression, shape)}"


def _suggest_targets(target: str, shape: ModelShape) -> str:
    endings = _linear_suffixes(shape)
    near = nearest_word(target.rpartition(".")[2], endings)
    hint = f"did you mean {near}? " if near else ""
    experts = f"; for its experts write {_expert_parameters(shape)}" if _expert_sites(shape) else ""
    return f"{hint}its modules end in {', '.join(endings)}{experts}"


def _linear_suffixes(shape: ModelShape) -> list[str]:
    return list(dict.fromkeys(site.name.rpartition(".")[2] for site in _linear_names(shape)))


def _parameter_faults(adapter: TargetSpec, shape: ModelShape) -> Iterator[Fault]:
    for index, target in enumerate(adapter.target_parameters if isinstance(adapter, LoraSpec) else ()):
        alone = replace(adapter, target_parameters=(target,))  # type: ignore[call-arg]
        loc: Loc = ("target_parameters", index)
        if not _expert_sites(shape):
            yield Fault(
                loc, f"{format_value(target)} asks for experts, which the base has none of; leave it out"
            )
        elif not any(alone.adapts(site) for site in _expert_sites(shape)):
            hint = f"write {_expert_parameters(shape)}, or one of both"
            yield Fault(loc, f"{format_value(target)} matches no parameter of the base's experts; {hint}")


def _token_faults(adapter: TargetSpec, shape: ModelShape) -> Iterator[Fault]:
    """Yield an error for each reason why the base does not support training the adapter's token
    embeddings."""
    key = "trainable_token_indices"
    for index, token in enumerate(adapter.trained_tokens):
        if token >= shape.vocabulary:
            sentence = f"there is no token {token}: the base has tokens 0 to {shape.vocabulary - 1}"
            yield Fault((key, index), sentence)
    if adapter.trained_tokens and (outside := _linears_outside_layers(shape)):
        sentence = "needs embeddings that go into the first layer as they are, and the base has"
        yield Fault((key,), f"{sentence} {outside} around its layers; leave it out")


def _linear_names(shape: ModelShape) -> list[SiteShape]:
    return [site for site in shape.sites if not site.experts]


def _expert_sites(shape: ModelShape) -> list[SiteShape]:
    return [site for site in shape.sites if site.experts]


def _expert_parameters(shape: ModelShape) -> str:
    endings = dict.fromkeys(".".join(site.name.rsplit(".", 3)[1:]) for site in _expert_sites(shape))
    return f"target_parameters: [{', '.join(endings)}]"


def warnings(jobs: Sequence[JobSpec], shape: ModelShape) -> list[str]:
    """Return warnings about jobs that are valid but may not do what the user intended, one sentence per
    warning."""
    adapters = {job.name: job.adapter for job in jobs}
    return merge_repeated_sentences(
        (job.name, sentence) for job in jobs for sentence in _job_warnings(job, shape, adapters)
    )


def rope_warnings(jobs: Sequence[JobSpec], base: BaseSpec) -> list[str]:
    """Return warnings about jobs that start from an adapter that was trained with another rope scaling of the
    base."""
    return merge_repeated_sentences(
        (job.name, sentence) for job in jobs for sentence in _rope_warnings(job, base)
    )


def data_warnings(
    job: JobSpec, samples: int, steps: int, evaluates_trained_rows: bool = False
) -> Iterator[str]:
    """Yield warnings about a job that depend on its number of samples, its number of steps, and whether all
    its evaluation rows are also trained on."""
    if evaluates_trained_rows:
        yield (
            "every row of its evaluation is also a training row, so its validation loss does not show what "
            "it learns for other rows; name another file as eval.path, or hold rows out with eval.fraction"
        )
    if job.batch_size > samples:
        yield (
            f"batch_size {job.batch_size} is over the number of its training samples, {samples}: every step "
            "trains on all of them"
        )
    if (warmup := to_steps(job.warmup, steps)) >= steps > 1:
        yield f"warmup takes {warmup} of its {steps} steps: its learning rate is never reached"


def merge_repeated_sentences(sentences: Iterable[tuple[str, str]]) -> list[str]:
    """Return each distinct sentence about jobs once, preceded by the names of its jobs, as in `a, b:
    sentence`."""
    jobs: dict[str, dict[str, None]] = {}
    for job, sentence in sentences:
        jobs.setdefault(sentence, {})[job] = None
    return [f"{_list_names(list(names))}: {sentence}" for sentence, names in jobs.items()]


def _list_names(jobs: Sequence[str]) -> str:
    more = len(jobs) - NAMED
    return ", ".join(jobs) if more <= 1 else f"{', '.join(jobs[:NAMED])} and {more} more"


def _job_warnings(job: JobSpec, shape: ModelShape, adapters: Mapping[str, TargetSpec]) -> Iterator[str]:
    adapter = job.adapter
    if job.learning_rate > HIGH_RATE:
        yield (
            f"learning_rate {job.learning_rate:g} is far above what adapters train with, 1e-5 to 1e-2; its "
            "loss will hardly stay finite"
        )
    if job.weight_decay > HIGH_DECAY:
        yield f"weight_decay {job.weight_decay:g} is far above the usual, 0 to 0.1"
    sites = [site for site in shape.sites if adapter.adapts(site)]
    if not adapter.is_served:
        merged = "to serve it there, run weftune export --merged"
        remedy = merged if adapter.is_mergeable else "nor can they be merged into a model that it loads"
        yield f"vLLM does not load {adapter.kind} adapters; {remedy}"
    if adapter.is_dense:
        values = sum(map(adapter.parameters_at, sites))
        size = format_bytes(values * (shape.bytes_per_value + 4 * max(4, shape.bytes_per_value)))
        yield (
            f"a {adapter.kind} adapter on {len(sites)} targets has {values:,} parameters, which take {size} "
            "with their optimizer state; name fewer targets or layers to take less"
        )
    if isinstance(adapter, LoraSpec):
        yield from _lora_warnings(adapter, sites, adapters)
    if (job.data.max_length or 0) > (room := shape.context - adapter.positions_before):
        yield (
            f"max_length {job.data.max_length} is over the {room} that virtual tokens leave of the base's "
            f"context of {shape.context} tokens; longer samples are cut there"
        )


def _rope_warnings(job: JobSpec, base: BaseSpec) -> Iterator[str]:
    if not isinstance(job.adapter.init_from, str):
        return
    try:
        found = read_job_file(Path(job.adapter.init_from))
    except OutputError:
        return
    now, before = base.record()["rope_scaling"], (found.values["base"] if found else {}).get("rope_scaling")
    if found is not None and before != now:
        yield (
            f"init_from was trained with {_rope_text(before)}, and this run has {_rope_text(now)}; to "
            "continue from what it computes, scale the base as it was"
        )


def _rope_text(scaling: Mapping[str, Any] | None) -> str:
    if not scaling:
        return "no rope_scaling"
    return f"rope_scaling {{{', '.join(f'{key}: {value}' for key, value in scaling.items())}}}"


def _lora_warnings(
    adapter: LoraSpec, sites: Sequence[SiteShape], adapters: Mapping[str, TargetSpec]
) -> Iterator[str]:
    wide = [site for site in sites if adapter.rank_at(site.name) > _max_rank(site)]
    if wide:
        narrow = min(wide, key=_max_rank)
        yield (
            f"rank {adapter.rank_at(narrow.name)} is over the width {_max_rank(narrow)} of {narrow.name}"
            f"{f' and {len(wide) - 1} more' if len(wide) > 1 else ''}; the ranks above it add nothing"
        )
    for key, patterns in (("rank_pattern", adapter.rank_pattern), ("alpha_pattern", adapter.alpha_pattern)):
        for pattern in patterns:
            if not any(find_pattern([pattern], site.name) == pattern for site in sites):
                yield f"{key} {format_value(pattern)} matches none of the job's targets"
    if adapter.is_served and (adapter.rank_pattern or adapter.alpha_pattern):
        yield "vLLM ignores rank_pattern and alpha_pattern; to serve it there, run weftune export --portable"
    if adapter.target_parameters:
        yield (
            "vLLM does not load adapters on experts as PEFT stores them; to serve it there, run weftune "
            "export --merged"
        )
    if adapter.is_served and adapter.trained_tokens:
        yield "vLLM does not load trainable_token_indices; to serve it there, run weftune export --merged"
    if adapter.scalar_head:
        yield "vLLM does not load the scalar head of a reward model as PEFT stores it"
    if (before := _source_adapter(adapter, sites, adapters)) is not None:
        yield from _start_warnings(adapter, before, sites)


def _source_adapter(
    adapter: LoraSpec, sites: Sequence[SiteShape], adapters: Mapping[str, TargetSpec]
) -> LoraSpec | None:
    """Return the spec of the adapter that a job starts from, whether this is in a folder or belongs to
    another job in `adapters`. None if the job starts from no LoRA adapter, or from one that cannot be
    read."""
    if not isinstance(adapter.init_from, str):
        other = adapters.get(source_job(adapter))
        return other if isinstance(other, LoraSpec) else None
    folder = Path(adapter.init_from)
    try:
        before = read_spec(folder)
        refuse_slow_patterns(folder, before, [site.name for site in sites])
    except AdapterError:
        return None  # refused, with its reason, when the job is made ready
    return before


def _start_warnings(adapter: LoraSpec, source_adapter: LoraSpec, sites: Sequence[SiteShape]) -> Iterator[str]:
    """Yield a warning if a LoRA job's scale differs from the scale of the adapter that it starts from. PEFT's
    files contain A and B only, so the new job multiplies their product by its own scale."""
    for site in sites:
        scale, was = adapter.scale_at(site.name), source_adapter.scale_at(site.name)
        if not math.isclose(scale, was):
            yield (
                f"its scale at {site.name} is {scale:g}, but init_from was trained with {was:g}; "
                "to continue from what it computes, set alpha, rslora and alpha_pattern as it has them"
            )
            return


def _max_rank(site: SiteShape) -> int:
    return min(site.in_features, site.out_features)


SOURCE: Loc = ("adapter", "init_from", "job")
MAX_NAMED = 8
"""Maximum number of jobs that a message names. If there are more, the message gives their number instead."""


def name_faults(
    jobs: Sequence[JobSpec], known_names: Sequence[str], trials: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield each job that names another job to start from but cannot start from that job's adapter, with the
    error message. `known_names` are all names of the run, and `trials` maps the names of trials (jobs of a
    sweep) to their sweeps."""
    sources = {job.name: source for job in jobs if (source := source_job(job.adapter))}
    trials = trials or {}
    told: set[str] = set()
    for name, source in sources.items():
        if source in trials or source in trials.values():
            yield name, _sweep_source_message(source, trials)
        elif source == name:
            yield name, "a job cannot start from itself; name another, or write init_from: null"
        elif source not in known_names:
            yield name, _unknown_source_message(source, [other for other in known_names if other != name])
        elif name not in told and (cycle := _source_cycle(name, sources)):
            told.update(cycle)
            way = " from ".join([*cycle, name])
            yield name, f"jobs wait for each other in a cycle, {way}; let one of them start from a folder"


def _sweep_source_message(source: str, trials: Mapping[str, str]) -> str:
    if source in trials:
        why = f"a trial of the sweep {trials[source]} and may leave without an adapter"
    else:
        why = "a sweep, whose best adapter is known at its end only"
    best = f"{trials.get(source, source)}/best"
    return f"{source} is {why}; in a later run write the path of a folder in {best} as init_from"


def _unknown_source_message(source: str, known_names: Sequence[str]) -> str:
    sentence = f"there is no job {format_value(source)} in this run"
    if near := nearest_word(source, known_names):
        return f"{sentence}; did you mean {near}?"
    if not known_names:
        return f"{sentence}; for a folder write its path as init_from"
    more = f" and {len(known_names) - MAX_NAMED} more" if len(known_names) > MAX_NAMED else ""
    return f"{sentence}; its other jobs are {', '.join(known_names[:MAX_NAMED])}{more}"


def _source_cycle(name: str, sources: Mapping[str, str]) -> list[str]:
    """Return the cycle of jobs, beginning with `name`, in which each job starts from the adapter of the next
    one. Return an empty list if `name` is in no cycle."""
    way = [name]
    while (source := sources.get(way[-1], "")) and source not in way:
        way.append(source)
    return way if source == name else []


def check_names(
    jobs: Sequence[JobSpec], known_names: Sequence[str], locate: Callable[..., str] = locate_in_job
) -> list[Mistake]:
    """Return an error for every job that was created in Python and cannot start from the adapter of the job
    that it names."""
    return [Mistake(locate(name, *SOURCE), sentence) for name, sentence in name_faults(jobs, known_names)]


def check_starts(
    jobs: Sequence[JobSpec], shape: ModelShape, locate: Callable[..., str] = locate_in_job
) -> list[Mistake]:
    """Return an error for every job that starts from another job's adapter although the two adapters differ
    in linears or ranks."""
    adapters = {job.name: job.adapter for job in jobs}
    return [
        Mistake(locate(job.name, *SOURCE), sentence)
        for job in jobs
        if (source := source_job(job.adapter)) in adapters
        and (sentence := _mismatch_reason(source, adapters[source], job.adapter, shape))
    ]


def _mismatch_reason(source: str, source_adapter: TargetSpec, adapter: TargetSpec, shape: ModelShape) -> str:
    """Return the reason why a job with this adapter cannot start from `source_adapter`, or an empty string if
    it can."""
    if source_adapter.kind != adapter.kind:
        return f"{source} is a {source_adapter.kind} adapter; write kind: {source_adapter.kind}"
    if differ := [site for site in shape.sites if source_adapter.adapts(site) != adapter.adapts(site)]:
        where = "this job" if adapter.adapts(differ[0]) else source
        keys = (
            "adapter.targets and adapter.target_parameters" if shape.routes_to_experts else "adapter.targets"
        )
        more = f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
        return (
            f"{source} and this job do not adapt the same sites: only {where} does {differ[0].name}{more}; "
            f"set {keys} as {source} has it"
        )
    if source_adapter.shapes_outside_linears(shape.sites) != adapter.shapes_outside_linears(shape.sites):
        return f"{source} has weights of other shapes; write adapter as {source} has it"
    if source_adapter.scalar_head and not adapter.scalar_head:
        return f"{source} trains a reward model, which only objective: reward continues; write that"
    if source_adapter.trained_tokens != adapter.trained_tokens:
        return f"{source} trains other tokens; set adapter.trainable_token_indices as {source} has it"
    for site in shape.sites:
        if adapter.adapts(site) and source_adapter.rank_at(site.name) != adapter.rank_at(site.name):
            return (
                f"{source} has rank {source_adapter.rank_at(site.name)} at {site.name}, the job asks for "
                f"{adapter.rank_at(site.name)}; set adapter.rank and adapter.rank_pattern as {source} has "
                "them"
            )
        if adapter.adapts(site) and source_adapter.shapes_at(site) != adapter.shapes_at(site):
            return f"{source} has weights of other shapes at {site.name}; write adapter as {source} has it"
    return ""


def refuse_kinds_on_shards(jobs: Iterable[JobSpec], shards: int) -> None:
    """Raise UserError if a job's adapter cannot be divided among the shards of the layers."""
    for job in jobs:
        if shards > 1 and not job.adapter.runs_on_shards:
            raise UserError(
                f"--shards {shards}: {job.name} has a {job.adapter.kind} adapter, which cannot be trained "
                "where every layer is divided among processes; leave --shards out, or give the job a lora "
                "adapter"
            )
