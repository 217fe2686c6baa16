"""Reads and writes session files, which are safetensors with one header and a checksum."""

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
"""Formats that `read` accepts. The first one lacks a checksum."""
_ENTRY = "session"


@dataclass(frozen=True)
class KeptAttention:
    """The contents of a decoder layer's KV cache.

    Attributes:
        length: number of tokens that the cache has read.
        window: number of tokens that the cache keeps; None for all.
    """

    length: int
    window: int | None = None


@dataclass(frozen=True)
class Header:
    """The header of a session file.

    Attributes:
        format: name and version of the file format.
        config: the TTT config.
        fingerprint: fingerprint of the model's weights.
        attention: decoder layer -> its KV cache, for layers whose cache is in the file.
        checksum: SHA-256 of the rest of the header and the tensors; None in the first format.
    """

    format: str
    config: dict[str, Any]
    fingerprint: str
    attention: dict[str, KeptAttention]
    checksum: str | None = None


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], **header: Any) -> None:
    """Writes a session to `path` in one step.

    Args:
        path: the file.
        tensors: tensors of the session.
        header: the fields of `Header` except format and checksum.

    Raises:
        InPlaceTTTError: if `path` is a file that is not a session.
    """
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    values = {"format": _FORMATS[-1], **header}
    # a single metadata entry, because safetensors writes several entries in random order
    metadata = {_ENTRY: json.dumps({**values, "checksum": _checksum(values, held)})}
    with new_file(path, ours=_is_session(path)) as file:
        save_file(held, file, metadata)


def refuse_to_replace(path: str | os.PathLike[str]) -> None:
    """Raises InPlaceTTTError if a session cannot be written to `path`. Call it before a long read.

    An existing file must be empty or a session, and its folder must be writable.
    """
    refuse_file(path, _is_session(path))
    with output_lock(path):
        pass


def _is_session(path: str | os.PathLike[str]) -> bool:
    """Returns True for a file that holds a session, according to its header."""
    try:
        with safe_open(path, framework="pt") as file:
            return _ENTRY in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def read(path: str | os.PathLike[str]) -> tuple[Header, dict[str, Tensor]]:
    """Returns the header and tensors of a session file, after checking its checksum.

    Raises:
        InPlaceTTTError: if the file is not a session file, or is damaged.
    """
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
        raise InPlaceTTTError(f"{path} is damaged: its checksum does not match; use another copy of it.")
    return header, tensors


def _checksum(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Returns the sha256 over the header and every tensor with its name, dtype and shape."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
