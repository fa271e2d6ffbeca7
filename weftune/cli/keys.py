"""`weftune keys`: create, list and revoke the API keys of a service, also while it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weftune.cli.early import store_folder

if TYPE_CHECKING:
    from weftune.service.keys import KeyFile

StoreOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the service; default: ~/.local/share/weftune."),
]

keys = typer.Typer(
    name="keys", help="Create, list and revoke the API keys of a service.", no_args_is_help=True
)


@keys.command("create")
def create_key(
    tenant: Annotated[
        str, typer.Argument(help="Name of the tenant: lower-case letters, digits and hyphens.")
    ],
    store: StoreOption = None,
) -> None:
    """Create an API key and print it as the last line; it cannot be shown again."""
    key = _key_file(store).create(tenant)
    typer.echo(f"A key of {tenant}, which is stored only as a hash: copy it now.", err=True)
    typer.echo(key)


@keys.command("list")
def list_keys(store: StoreOption = None) -> None:
    """List the ids of all keys, their tenants, and when they were created."""
    found = _key_file(store).keys()
    if not found:
        typer.echo("There are no keys; weftune keys create TENANT creates one.")
    for key in found:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created_at))
        typer.echo(f"{key.id}  {created}  {key.tenant}")


@keys.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as weftune keys list shows it.")],
    store: StoreOption = None,
) -> None:
    """Revoke a key: a running service refuses it from the next request on."""
    revoked = _key_file(store).revoke(key)
    typer.echo(f"Revoked the key {revoked.id} of {revoked.tenant}.")


def _key_file(store: Path | None) -> KeyFile:
    from weftune.service.keys import KeyFile
    from weftune.service.settings import KEYS

    return KeyFile(store_folder(store) / KEYS)
