"""Which checkpoint folders this package wrote, so that a new one may take their place."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ..errors import InPlaceTTTError
from ..files.folders import new_folder
from ..models import SHIM_FILE
from .card import CARD, is_card
from .reading import ADAPTER_CONFIG, CONFIG, INDEX, TTT_SHARD, read_index


def _written(folder: Path) -> set[str] | None:
    card = {CARD} if is_card(folder / CARD) else set()
    if (folder / ADAPTER_CONFIG).is_file():
        return {ADAPTER_CONFIG, TTT_SHARD, *card}
    try:
        files = read_index(folder).metadata.files
    except InPlaceTTTError:
        return None
    return None if files is None else {INDEX, CONFIG, SHIM_FILE, *files, *card}


new_checkpoint_folder = partial(new_folder, ours=_written)
"""`new_folder` for checkpoints and adapters, which take the place of checkpoints and adapters alone."""
