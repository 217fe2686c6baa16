"""Scenes of what is written to disk and read back: sessions, forks, checkpoints and adapters."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from checkpoint.folders import save_base
from models import CHUNK, logits, random_ids, streamed

from inplace_ttt import Session, load
from inplace_ttt.checkpoint.reading import Checkpoint
from inplace_ttt.checkpoint.reference_format import read_reference_format, write_reference_format
from inplace_ttt.checkpoint.to_adapter import save_adapter
from inplace_ttt.checkpoint.writing import describe_base, initial_tensors, plan_conversion, write_full
from inplace_ttt.surgery import fast_weights

from .scene_pieces import PIECES, Numbers, read_on
from .world import Spoil, World


def session(world: World, spoil: Spoil | None) -> Numbers:
    """A session of two rows, saved in the middle of a chunk and loaded, goes on."""
    model = world.model(spoil=spoil)
    state = Session(model)
    state.read(random_ids(2, 3 * CHUNK + 4))
    with tempfile.TemporaryDirectory() as folder:
        state.save(Path(folder) / "session")
        loaded = Session.load(Path(folder) / "session", model)
    return {"logits": read_on(model, loaded.cache, random_ids(2, 20, seed=3), (2, 1, 17))}


def fork(world: World, spoil: Spoil | None) -> Numbers:
    """What a branch reads, and then the stem."""
    model = world.model(spoil=spoil)
    state = Session(model)
    state.read(random_ids(1, 3 * CHUNK + 4))
    branch = state.fork()
    found = [
        read_on(model, s.cache, random_ids(1, 20, seed=n), (2, 1, 17)) for n, s in enumerate((branch, state))
    ]
    return {"logits": torch.cat(found, 1)}


def checkpoint(world: World, spoil: Spoil | None) -> Numbers:
    """Saved as a whole and loaded, after it has read something: its tensors, and what it computes."""
    model = world.model(spoil=spoil)
    logits(model, random_ids(1, 30, seed=4))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = load(folder, dtype=world.dtype)
    found = {
        "logits": logits(loaded, random_ids(1, 5 * CHUNK + 4)),
        "stream": streamed(loaded, random_ids(1, sum(PIECES)), PIECES),
    }
    return {**found, **{name: p.detach() for name, p in loaded.named_parameters() if ".down_proj." in name}}


def adapter(world: World, spoil: Spoil | None) -> Numbers:
    """The new tensors alone, saved and loaded onto the base."""
    model = world.model(spoil=spoil)
    with tempfile.TemporaryDirectory() as folder:
        save_base(Path(folder) / "base", world.family, world.dtype)
        save_adapter(model, Path(folder) / "adapter", base=str(Path(folder) / "base"))
        return {
            "logits": logits(load(Path(folder) / "adapter", dtype=world.dtype), random_ids(1, 5 * CHUNK + 4))
        }


def converted_folder(world: World, spoil: Spoil | None) -> Numbers:
    """A checkpoint's folder, converted without loading it."""
    config = copy.deepcopy(next(iter(fast_weights(world.model()).values())).fast.config)
    with tempfile.TemporaryDirectory() as folder:
        base = Checkpoint.open(save_base(Path(folder) / "base", world.family, world.dtype))
        plan = plan_conversion(base, config)
        (Path(folder) / "out").mkdir()
        write_full(Path(folder) / "out", base, plan, initial_tensors(base, plan), describe_base(base, plan))
        model = load(Path(folder) / "out")
    found = {f"P of {index}": layer.ttt.proj.detach() for index, layer in fast_weights(model).items()}
    return {**found, "logits": logits(model, random_ids(1, 5 * CHUNK + 4))}


def reference_format(world: World, spoil: Spoil | None) -> Numbers:
    """In the reference code's format, and back: the tensors and the rate."""
    model = world.model(spoil=spoil, eta=2.0)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder) / "ours")
        (Path(folder) / "theirs").mkdir()
        write_reference_format(Path(folder) / "theirs", Checkpoint.open(Path(folder) / "ours"))
        read = read_reference_format(Checkpoint.open(Path(folder) / "theirs"))
    found = {f"{kind} of {layer}": t for layer, kinds in read.tensors.items() for kind, t in kinds.items()}
    return {**found, "rate": torch.tensor([float(read.plan.config.eta), float(read.plan.config.chunk_size)])}  # type: ignore[arg-type]
