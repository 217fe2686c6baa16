"""Uploads a finished folder to the hub (`--push REPO`)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import InPlaceTTTError, reported
from .messages import say_now


def require_token(args: argparse.Namespace) -> None:
    """Raises InPlaceTTTError before any work if the result could not be pushed at the end."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import validate_repo_id

    if args.push is None:
        return
    with reported(f"--push {args.push} does not name a repository of the hub"):
        validate_repo_id(args.push)
    if constants.HF_HUB_OFFLINE:
        raise InPlaceTTTError("--push needs the hub, but HF_HUB_OFFLINE is set; leave one of the two out.")
    if get_token() is None:
        raise InPlaceTTTError("--push needs a hub token; log in with `hf auth login`, or set HF_TOKEN.")


def push(folder: Path, repository: str | None) -> str | None:
    """Uploads a folder as the newest commit of a repository, which is created if it does not exist.

    Args:
        folder: the folder to upload.
        repository: NAME or OWNER/NAME; None to skip the upload.

    Returns:
        The repository's address; None without an upload.
    """
    from huggingface_hub import HfApi

    if repository is None:
        return None
    say_now()
    with reported(f"{folder} is written, but could not be pushed to {repository}"):
        made = HfApi().create_repo(repository, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="inplace-ttt")
    return str(made)


def pushed(result: dict[str, Any]) -> list[str]:
    """Returns the printed line about the upload, if there was one."""
    return [f"pushed to {result['pushed']}"] if result["pushed"] else []
