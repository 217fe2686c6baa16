"""A session's file: safetensors with one header, and a checksum over all of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import InPlaceTTTError, reported
from ..files.folders import new_file
from ..files.json_files import parse_json
from ..files.locks import output_lock
from ..files.manifest import refuse_file
from ..files.paths import require_regular
from ..files.schema import from_values

_FORMATS = ("inplace-ttt-state/1", "inplace-ttt-state/2")
"""The first has no checksum."""
_ENTRY = "session"


@dataclass(frozen=True)
class KeptAttention:
    """What a decoder layer's cache holds. length: tokens it has seen; window: how many it keeps, None for
    all."""

    length: int
    window: int | None = None


@dataclass(frozen=True)
class Header:
    """config: of the TTT layers. fingerprint: of the model's weights. attention: by decoder layer, where the
    KV cache is kept."""

    format: str
    config: dict[str, Any]
    fingerprint: str
    attention: dict[str, KeptAttention]
    checksum: str | None = None


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], **header: Any) -> None:
    """Write a session to `path`, in one step; header: the fields of `Header` beside format and checksum."""
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    values = {"format": _FORMATS[-1], **header}
    # one entry: safetensors orders several at random
    metadata = {_ENTRY: json.dumps({**values, "checksum": _checksum(values, held)})}
    with new_file(path, ours=_is_session(path)) as file:
        save_file(held, file, metadata)


def refuse_to_replace(path: str | os.PathLike[str]) -> None:
    """Refuse, before anything is read, a place that takes no file, or holds one that is neither empty nor a
    session's.

    Raises InPlaceTTTError.
    """
    refuse_file(path, _is_session(path))
    with output_lock(path):
        pass


def _is_session(path: str | os.PathLike[str]) -> bool:
    """True for a file that holds a session, by its header."""
    try:
        with safe_open(path, framework="pt") as file:
            return _ENTRY in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def read(path: str | os.PathLike[str]) -> tuple[Header, dict[str, Tensor]]:
    """Header and tensors of a session's file, its checksum proved. Raises InPlaceTTTError for what is no such
    file, or a damaged one."""
    problem = f"cannot read a session state from {path}"
    require_regular(path, problem)
    with reported(problem):
        with safe_open(path, framework="pt") as file:
            entry = (file.metadata() or {}).get(_ENTRY, "{}")
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
        values = parse_json(entry)
    if not isinstance(values, dict) or values.get("format") not in _FORMATS:
        raise InPlaceTTTError(
            f"{path} is not a session state of this version (wanted {_FORMATS[-1]}); write it with "
            "Session.save."
        )
    header = from_values(Header, values, f"{path}, its header")
    found = values.pop("checksum", None)
    if found != (_checksum(values, tensors) if header.format != _FORMATS[0] else None):
        raise InPlaceTTTError(
            f"{path} is damaged: it does not have the checksum that it was written with; take another copy "
            "of it."
        )
    return header, tensors


def _checksum(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the header and every tensor with its name, dtype and shape."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
