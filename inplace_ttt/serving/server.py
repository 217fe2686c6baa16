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

from ..errors import InPlaceTTTError, reported
from ..files.locks import output_lock
from .http import SETTINGS
from .memory import check_writable
from .vllm_names import (
    FlexibleArgumentParser,
    cli_env_setup,
    configure_logging_from_args,
    make_arg_parser,
    run_server,
    validate_parsed_serve_args,
)


def serve(
    model: str | os.PathLike[str],
    host: str,
    port: int,
    keys: Sequence[str],
    memories: Mapping[str, Any],
    others: Sequence[str],
) -> None:
    """Serves a model with memories until the process is stopped.

    Args:
        model: the folder of a converted model.
        host: the address to listen at.
        port: the port to listen at.
        keys: API keys that the server accepts, added to those in `others`.
        memories: fields of `MemorySettings`.
        others: arguments of `vllm serve`.

    Raises:
        InPlaceTTTError: if an argument cannot be used, the folder of memories is not writable or in use by
            another server, or vLLM fails.
    """
    cli_env_setup()
    given = _arguments({"model": str(model), "host": host, "port": port}, others)
    if (given.api_server_count or 1) > 1:
        raise InPlaceTTTError("memories work with one API server; leave --api-server-count out.")
    with reported("--additional-config after --vllm must be a JSON object"):
        given.additional_config = {**_table(given.additional_config), SETTINGS: dict(memories)}
    if keys:
        given.api_key = [*(given.api_key or []), *keys]
    configure_logging_from_args(given)
    validate_parsed_serve_args(given)
    with _kept_apart(Path(memories["folder"])), reported("vLLM ended with an error", "its output is above"):
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
            f"vLLM refuses the arguments after --vllm: {message}; `vllm serve --help=all` lists its options."
        )


def _arguments(ours: Mapping[str, Any], others: Sequence[str]) -> Namespace:
    """Returns vLLM's arguments, parsed from our command's and from those after `--vllm`."""
    parser = make_arg_parser(_Parser(prog="vllm serve", add_help=False))
    with reported("vLLM cannot use the arguments after --vllm"):
        given = parser.parse_args(
            [*(word for name, value in ours.items() for word in (f"--{name}", str(value))), *others]
        )
    for name, value in ours.items():
        if getattr(given, name) != value or given.model_tag:
            raise InPlaceTTTError(
                f"--{name} is an argument of inplace-ttt serve itself; give it before --vllm, and not "
                "after it."
            )
    return given


def _kept_apart(folder: Path) -> ExitStack:
    """Locks a folder of memories, because two servers would replace each other's files."""
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
