"""Runs `inplace-ttt serve PATH`."""

from __future__ import annotations

import argparse
import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from . import Result
from .loading import open_full, require_vllm
from .messages import say_now


def run(args: argparse.Namespace) -> Result:
    open_full(args.path)
    require_vllm()
    os.environ.setdefault("VLLM_PLUGINS", ",".join(_plugins()))
    from ..serving.server import serve

    say_now()
    memories = {
        "folder": str(Path(args.memories).absolute()),
        "per_user": args.per_key,
        "in_memory": args.memory_bytes,
    }
    serve(args.path, args.host, args.port, args.api_key, memories, args.vllm)
    return {"served": str(args.path)}, 0


def render(result: dict[str, Any]) -> str:
    return f"served {result['served']}"


def _plugins() -> list[str]:
    """Returns the plugins that vLLM loads by itself, and this package's.

    vLLM adds endpoints only for plugins that are named. Once plugins are named, it loads no others.
    """
    groups = (
        group
        for group in entry_points().groups
        if group.startswith("vllm.") and group != "vllm.endpoint_plugins"
    )
    return sorted({"inplace-ttt", *(point.name for group in groups for point in entry_points(group=group))})
