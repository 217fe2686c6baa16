"""`--push REPO`: a finished folder goes to a hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import InPlaceTTTError, reported
from .messages import say_now


def require_token(args: argparse.Namespace) -> None:
    """Refuse, before anything is done, what could not be pushed at the end."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import validate_repo_id

    if args.push is None:
        return
    with reported(f"--push {args.push} names no repository of a hub"):
        validate_repo_id(args.push)
    if constants.HF_HUB_OFFLINE:
        raise InPlaceTTTError("--push needs the hub, and HF_HUB_OFFLINE is set; leave one of the two out.")
    if get_token() is None:
        raise InPlaceTTTError(
            "--push needs a token of the hub; log in with `hf auth login`, or set HF_TOKEN."
        )


def push(folder: Path, repository: str | None) -> str | None:
    """Upload a folder as the newest commit of a repository, made if it is new; gives its address, None where
    none was asked for."""
    from huggingface_hub import HfApi

    if repository is None:
        return None
    say_now()
    with reported(f"{folder} is written, but could not be pushed to {repository}"):
        made = HfApi().create_repo(repository, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="inplace-ttt")
    return str(made)


def pushed(result: dict[str, Any]) -> list[str]:
    """The line that says so."""
    return [f"pushed to {result['pushed']}"] if result["pushed"] else []
