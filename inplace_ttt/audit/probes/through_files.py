"""Probe of files. Checkpoints, adapters and the reference format must restore their contents.

A small model with the same settings is used.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.opened import load
from ...checkpoint.reading import Checkpoint
from ...checkpoint.reference_format import read_reference_format, write_reference_format
from ...checkpoint.to_adapter import save_adapter
from ...errors import InPlaceTTTError
from ...session.plain_model import plain_copy
from ...surgery import config_of, fast_weights
from ..borrowing import small_chunks
from ..outcome import Outcome, judged
from ..probed import Probed
from ..whole_model import WholeModel
from .bench import largest_difference
from .twin import twin

_OFF = 1e-5
"""Tolerance on logits relative to their size, since a restored session is read in other pieces."""


@torch.no_grad()
def through_a_file(whole: WholeModel, expected: Any) -> Outcome:
    """Compares this model's tensors with its state dict, and a small model with each kind of file."""
    # the context draws conv and P at random, because their initial values would hide an error
    with small_chunks(whole.model, whole.chunk, whole.seed):
        whole.lm(whole.ids, use_cache=False)  # the state of this reading must not be saved
        changed = [f"layer {i}'s {name}" for i, layer in whole.layers.items() for name in _not_as_held(layer)]
    if changed:
        return judged(False, f"{changed[0]} differs in a state dict from the model", {"changed": changed}, 0)
    config, numbers, wrong = whole.config, dict[str, Any](), list[str]()
    etas = tuple(factor * (config.eta_of(0) or 1.0) for factor in (1.0, 0.5, 2.0))
    # the reference format cannot hold a list of η
    for eta, layers, how, files in (
        (config.eta_of(0), (0, 1), "", (_checkpoint, _adapter, _reference_format)),
        (etas, (0, 1, 2), " with an η per layer", (_checkpoint, _adapter)),
    ):
        settings = dataclasses.replace(config, layers=layers, eta=eta)
        with (
            twin(settings, layers) as model,
            Probed.of(model, whole.seed) as probed,
            tempfile.TemporaryDirectory() as folder,
        ):
            model.config.inplace_ttt["config"] = probed.config.to_dict()
            for file in files:
                name = _NAMES[file] + how
                changed = numbers[f"{name}: changed"] = file(model, probed, Path(folder))
                wrong += [f"{name} does not restore {what}" for what in changed]
    found = wrong[0] if wrong else "checkpoint and adapter restore every saved tensor and output"
    return judged(not wrong, found, numbers, _OFF)


def _not_as_held(layer: nn.Module) -> list[str]:
    """Returns names of a layer's tensors that its state dict lacks, or has with other values."""
    saved, held = layer.state_dict(), {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return [
        name
        for name, tensor in held.items()
        if name not in saved or not torch.equal(saved[name], tensor.detach())
    ]


def _checkpoint(model: Any, probed: Probed, folder: Path) -> list[str]:
    model.save_pretrained(folder / "checkpoint")
    return _unlike(load(folder / "checkpoint"), model, probed)


def _adapter(model: Any, probed: Probed, folder: Path) -> list[str]:
    plain_copy(model).save_pretrained(folder / "base")
    save_adapter(model, folder / "adapter", base=str(folder / "base"))
    return _unlike(load(folder / "adapter"), model, probed)


def _reference_format(model: Any, probed: Probed, folder: Path) -> list[str]:
    """Returns differences after a round trip through the reference format; empty if the export is refused."""
    theirs = folder / "theirs"
    theirs.mkdir()
    try:
        write_reference_format(theirs, Checkpoint.open(folder / "checkpoint"))
    except InPlaceTTTError:
        return []
    read = read_reference_format(Checkpoint.open(theirs))
    own = {i: {"conv": layer.ttt.conv, "proj": layer.ttt.proj} for i, layer in fast_weights(model).items()}
    changed = [
        f"layer {i}'s {kind}"
        for i, kinds in own.items()
        for kind, t in kinds.items()
        if not torch.equal(read.tensors[i][kind], t)
    ]
    settings = (read.plan.config.eta, read.plan.config.chunk_size)
    return changed + ["η and the chunk size"] * (settings != (probed.config.eta, probed.config.chunk_size))


def _unlike(loaded: Any, model: Any, probed: Probed) -> list[str]:
    """Returns the names of tensors, settings or logits in which a loaded model differs from the original."""
    theirs = loaded.state_dict()
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, theirs[name])]
    if config_of(loaded) != probed.config:
        changed.append("its settings")
    ids = probed.ids(1, 3 * probed.chunk + 2)
    both = (one(ids, use_cache=False).logits for one in (loaded, model))
    return changed or ["its logits"] * (not largest_difference(*both) < _OFF)


_NAMES: dict[Any, str] = {
    _checkpoint: "a checkpoint",
    _adapter: "an adapter",
    _reference_format: "the reference format",
}
