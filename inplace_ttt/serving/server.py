"""vLLM's OpenAI-compatible server, with memories."""

from __future__ import annotations

import errno
import json
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ..errors import InPlaceTTTError, reported
from ..files.locks import output_lock
from .http import SETTINGS
from .memory import check_writable


def serve(
    model: str | os.PathLike[str],
    host: str,
    port: int,
    keys: Sequence[str],
    memories: Mapping[str, Any],
    others: Sequence[str],
) -> None:
    """Serve until the process is told to end. memories: fields of `MemorySettings`. others: arguments of
    vLLM's own command."""
    cli_env_setup()
    given = _arguments({"model": str(model), "host": host, "port": port}, others)
    if (given.api_server_count or 1) > 1:
        raise InPlaceTTTError("memories are known to one API server; leave --api-server-count out.")
    if given.async_scheduling:
        raise InPlaceTTTError(
            "with --async-scheduling a memory may have read more than was said; leave it out."
        )
    given.async_scheduling = False
    with reported("--additional-config behind --vllm must be a JSON object"):
        given.additional_config = {**_table(given.additional_config), SETTINGS: dict(memories)}
    if keys:
        given.api_key = [*(given.api_key or []), *keys]
    configure_logging_from_args(given)
    validate_parsed_serve_args(given)
    with _kept_apart(Path(memories["folder"])), reported("vLLM ended with an error", "what it said is above"):
        try:
            uvloop.run(run_server(given))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
                raise
            raise InPlaceTTTError(
                f"cannot listen at {host}:{port}: {error.strerror}; choose another --host or --port."
            ) from None


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InPlaceTTTError(
            f"vLLM refuses what stands behind --vllm: {message}; `vllm serve --help=all` lists what it takes."
        )


def _arguments(ours: Mapping[str, Any], others: Sequence[str]) -> Namespace:
    """vLLM's arguments: those of our own command, and others beside them."""
    parser = make_arg_parser(_Parser(prog="vllm serve", add_help=False))
    with reported("vLLM cannot take what stands behind --vllm"):
        given = parser.parse_args(
            [*(word for name, value in ours.items() for word in (f"--{name}", str(value))), *others]
        )
    for name, value in ours.items():
        if getattr(given, name) != value or given.model_tag:
            raise InPlaceTTTError(
                f"--{name} is no argument behind --vllm, but one of inplace-ttt serve itself; say it "
                "before --vllm."
            )
    return given


def _kept_apart(folder: Path) -> ExitStack:
    """Keeps other servers off a folder of memories, each of which would go by files that the other has
    replaced meanwhile."""
    check_writable(folder)
    held = ExitStack()
    try:
        held.enter_context(output_lock(folder / "server"))
    except InPlaceTTTError:
        raise InPlaceTTTError(
            f"another server keeps its memories in {folder}; choose another folder with --memories."
        ) from None
    return held


def _table(given: Any) -> dict[str, Any]:
    return dict(json.loads(given) if isinstance(given, str) else given or {})
