"""Saves into a temporary folder, which gets its final name once it is complete.

A trial before the first step finds models that cannot be saved.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel, TrainerCallback

from ...errors import InPlaceTTTError, one_line
from ...files.folders import put_in_place
from ...files.manifest import remove_written, write_manifest
from .checkpoints import complete_checkpoints
from .run_state import SAVING

logger = logging.getLogger(__name__)


class TrialSave(TrainerCallback):
    """Saves everything but the weights before the first step.

    transformers loads configs that it then refuses to save; without the trial the run would fail at its first
    checkpoint.
    """

    def __init__(self, output: Path) -> None:
        self.folder = output / SAVING / "trial"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.should_save:
            return
        model, tokenizer = kwargs["model"], kwargs.get("processing_class")
        try:
            with saving(self.folder.parent.parent, "correct that file of the model before the run"):
                self.folder.mkdir(parents=True, exist_ok=True)
                if isinstance(model, PreTrainedModel):  # PEFT saves nothing of its base
                    model.save_pretrained(self.folder, state_dict={})
                if tokenizer is not None:
                    tokenizer.save_pretrained(self.folder)
        finally:
            shutil.rmtree(self.folder.parent, ignore_errors=True)


@contextmanager
def saving(folder: Path, remedy: str) -> Iterator[None]:
    """Turns a writer's errors into one sentence: those of the disk, and those about data that it refuses.

    Args:
        folder: the folder that is saved, for the message.
        remedy: end of the message.

    Raises:
        InPlaceTTTError: if writing fails.
    """
    try:
        yield
    except InPlaceTTTError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError, SafetensorError) as error:
        raise InPlaceTTTError(f"cannot save {folder}: {one_line(error).rstrip('.')}; {remedy}.") from None


def install(staging: Path, target: Path, kind: str) -> None:
    """Records a saved folder's files in a manifest, then renames the folder to `target`."""
    write_manifest(staging, kind)
    put_in_place(staging, target)


def keep_newest(output: Path, count: int) -> None:
    """Removes the run's checkpoints except the newest `count`.

    Only files that the run wrote are removed; a warning names others.
    """
    for folder in complete_checkpoints(output)[:-count]:
        if (left := remove_written(folder)) is not None:
            logger.warning(
                "%s is not removed completely: it holds %s, which this run did not write", folder, left
            )
