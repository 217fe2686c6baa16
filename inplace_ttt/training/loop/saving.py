"""How a run saves: into a temporary folder first, under its own name once it is whole; and a trial of it
before the first step."""

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
from .run_state import SAVING, complete_checkpoints

logger = logging.getLogger(__name__)


class TrialSave(TrainerCallback):
    """Before the first step, save all but the weights: transformers loads configs that it then refuses to
    save."""

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
    """Report in one sentence whatever a writer raises on disk or data that it refuses."""
    try:
        yield
    except InPlaceTTTError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError, SafetensorError) as error:
        raise InPlaceTTTError(f"cannot save {folder}: {one_line(error).rstrip('.')}; {remedy}.") from None


def install(staging: Path, target: Path, kind: str) -> None:
    """Give a folder that has been saved its name."""
    write_manifest(staging, kind)
    put_in_place(staging, target)


def keep_newest(output: Path, count: int) -> None:
    """Remove older checkpoints of the run, and in them only the files that the run wrote."""
    for folder in complete_checkpoints(output)[:-count]:
        if (left := remove_written(folder)) is not None:
            logger.warning("%s is not removed whole: it holds %s, which this run did not write", folder, left)
