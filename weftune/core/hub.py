"""A single, early check whether a repository exists on the Hugging Face Hub, before libraries retry."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

TIMEOUT_SECONDS = 5.0
NAMES = {"model": "folder", "dataset": "file or folder"}
"""Maps each kind of repository on the Hugging Face Hub to what its name can refer to locally, as words for
error messages."""


def absence_reason(name: str, kind: Literal["model", "dataset"], revision: str | None = None) -> str | None:
    """Return the reason why a repository is not available from the Hugging Face Hub, or None if it is
    available or in the local cache."""
    if _is_cached(name, kind, revision):
        return None
    from huggingface_hub import HfApi, errors

    here = f"There is no {NAMES[kind]} {name} here"
    mend = f"write the path of a {NAMES[kind]}"
    try:
        HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=TIMEOUT_SECONDS)
    except errors.RevisionNotFoundError:
        return f"{name} has no revision {revision} on the Hub."
    except errors.RepositoryNotFoundError:
        return (
            f"{here} and no such {kind} on the Hub; {mend}, or the id as the Hub spells it (for a private "
            f"{kind} log in first: hf auth login)."
        )
    except errors.OfflineModeIsEnabled:
        return (
            f"{here}, and the Hub cannot be reached to fetch it: HF_HUB_OFFLINE is set and its cache has no "
            f"such {kind}; {mend}, or unset it."
        )
    except errors.HfHubHTTPError as error:
        return f"{here}, and the Hub does not give it to us: {_first_line(error)}"
    # Errors of the connection come from whichever HTTP library this version of the client uses.
    except Exception as error:
        return (
            f"{here}, and the Hub cannot be reached to fetch it ({_first_line(error)}); {mend}, or connect "
            "this machine to the network."
        )
    return None


def _is_cached(name: str, kind: str, revision: str | None) -> bool:
    """Return whether the repository is in the local cache of the Hub, so that no network is needed."""
    from huggingface_hub import constants, try_to_load_from_cache

    if kind == "model":
        return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    folder = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    prepared = Path(constants.HF_HOME) / "datasets" / name.replace("/", "___")
    return folder.is_dir() or prepared.is_dir()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
