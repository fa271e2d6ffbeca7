"""`weftune export`: write a finished adapter in a form that inference servers support, or merge it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from weftune.adapters.folder import check_adapter_folder, refuse_parent_folder
from weftune.base.spec import BaseSpec, Dtype
from weftune.cli.early import refuse_missing_base
from weftune.cli.generate import recorded_base
from weftune.core.files import refuse_full_folder
from weftune.errors import UserError

INTO = ("dequantised", "original")
"""Kinds of weights into which an adapter on a quantised base can be merged."""


def export(
    folder: Annotated[Path, typer.Argument(metavar="JOB", help="The folder of a finished job: output/JOB.")],
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", help="Folder to create. Default: JOB/portable or JOB/merged.", show_default=False
        ),
    ] = None,
    portable: Annotated[
        bool, typer.Option("--portable", help="Write an adapter that vLLM and SGLang scale correctly.")
    ] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="Write a whole model, the base with the adapter merged into it.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="With --merged: dtype of the model. Default: that of the base.", show_default=False
        ),
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(
            help="With --merged, where the base is quantised: dequantised weights (the default) or original.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a finished adapter as a portable adapter, or merged into its base."""
    if portable == merged:
        raise UserError("Say what to export: either --portable or --merged.")
    if dtype is not None and (portable or dtype not in get_args(Dtype)):
        raise UserError(f"--dtype goes with --merged and is one of {', '.join(get_args(Dtype))}.")
    if into is not None and (portable or into not in INTO):
        raise UserError(f"--into goes with --merged and is one of {', '.join(INTO)}.")
    target = target or folder / ("portable" if portable else "merged")
    refuse_parent_folder(folder)
    base = recorded_base(folder) if merged else None
    check_adapter_folder(folder)
    refuse_full_folder(target)
    if base is not None:
        refuse_missing_base(base)
        _export_merged(folder, base, target, cast(Dtype | None, dtype), into)
        return
    from weftune.report.snippets import VLLM_RANKS
    from weftune.trainer.export import write_portable

    rank = write_portable(folder, target)
    typer.echo(f"Wrote {target}: a PEFT adapter of rank {rank}, its scale folded in.")
    if rank > VLLM_RANKS[0]:
        typer.echo(vllm_advice(rank))


def vllm_advice(rank: int) -> str:
    from weftune.report.snippets import VLLM_RANKS, vllm_max_rank

    allowed = vllm_max_rank(rank)
    if allowed is None:
        return f"vLLM takes no rank over {VLLM_RANKS[-1]}: serve it merged, with weftune export --merged."
    return f"vLLM takes ranks up to {VLLM_RANKS[0]} by default: start it with --max-lora-rank {allowed}."


def _export_merged(
    folder: Path, base: BaseSpec, target: Path, dtype: Dtype | None, destination: str | None
) -> None:
    from weftune.base.load import base_quantisation
    from weftune.trainer.export import Into, merged_losses, write_merged

    quantised = base_quantisation(base)
    if quantised is None and destination is not None:
        raise UserError(f"--into: {base.published_name} is not quantised, and there is nothing to choose.")
    chosen = cast(Into, destination or INTO[0])
    where = f"the {chosen} weights of " if quantised else ""
    typer.echo(f"Merging {folder} into {where}{base.published_name}.")
    kept = write_merged(folder, base, target, dtype, chosen)
    typer.echo(f"Wrote {target}: a whole model in {str(kept).removeprefix('torch.')}, with its tokenizer.")
    if quantised is not None and not quantised.is_stored:
        losses = merged_losses(folder, base, dtype)
        found = ", ".join(f"{loss:.4f} merged into the {name} weights" for name, loss in losses.items())
        if losses:
            typer.echo(f"Validation loss: {found}.")
