"""Probes of a converted model's layers and target source, and of changes by reading and generating."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from ...errors import InPlaceTTTError
from ...families import locate
from ..borrowing import small_chunks
from ..limits import limits
from ..outcome import NotChecked, Outcome, judged
from ..whole_model import WholeModel
from .circumstances import plain_deviations
from .twin import twin


def target_source(whole: WholeModel, expected: Any) -> Outcome:
    """Compares the input of the target generators with the embeddings and with the MLP's input.

    They are recorded while the model reads.
    """
    decoder = locate(whole.lm)
    seen: dict[str, dict[int, Tensor]] = {"source": {}, "mlp": {}, "embeddings": {}}
    handles = [_note(decoder.blocks[0], seen["embeddings"], 0)]
    for index, layer in whole.layers.items():
        handles.append(_note(layer.ttt, seen["source"], index))
        handles.append(_note(decoder.layers[index].mlp, seen["mlp"], index))
    try:
        with small_chunks(whole.model, whole.chunk, whole.seed), torch.no_grad():
            whole.lm(whole.ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if not seen["source"]:
        raise NotChecked("no target generator ran in a forward of three chunks")
    table = whole.lm.get_input_embeddings()(whole.ids)
    found, numbers = set(), {}
    for index, source in seen["source"].items():
        alike = {
            "embeddings": max(_alike(source, seen["embeddings"][0]), _alike(source, table)),
            "hidden_states": _alike(source, seen["mlp"][index]) if index in seen["mlp"] else 0.0,
        }
        best = max(alike, key=lambda name: alike[name])
        found.add(best if alike[best] > 0.999 else "something else")
        numbers[f"layer {index}"] = {f"cosine with {name}": value for name, value in alike.items()}
    names = {"embeddings": "token embeddings", "hidden_states": "the layer's own MLP input (hidden states)"}
    text = " and ".join(names.get(name, name) for name in sorted(found))
    return judged(found == {expected}, f"targets are made from {text}", numbers, 1e-3)


def _note(module: nn.Module, where: dict[int, Tensor], index: int) -> Any:
    """Returns the handle of a hook that stores the module's input under a number."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args or "hidden_states" in kwargs:
            where[index] = args[0] if args else kwargs["hidden_states"]

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _alike(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return 0.0
    return float(cosine_similarity(a.detach().double().flatten(), b.detach().double().flatten(), dim=0))


def layer_spacing(whole: WholeModel, expected: Any) -> Outcome:
    """Compares the layers that hold a state after reading with every sixth layer."""
    layers = whole.after_reading.layers
    wanted = list(range(layers[0], whole.depth, expected)) if layers else []
    found = f"layers {_list(layers)} of {whole.depth} write" if layers else "no layer writes"
    return judged(bool(layers) and layers == wanted, found, {"layers": layers, "every sixth": wanted}, 0)


def layer_offset(whole: WholeModel, expected: Any) -> Outcome:
    """Finds the first layer that writes. It is a choice, since the paper states none."""
    layers = whole.after_reading.layers
    if not layers:
        raise NotChecked("no layer writes")
    if expected is not None:
        return judged(layers[0] == expected, f"the first is layer {layers[0]}", {"first": layers[0]}, 0)
    return Outcome("unspecified", f"the first is layer {layers[0]}", {"first": layers[0]}, 0)


def layers_in_range(whole: WholeModel, expected: Any) -> Outcome:
    """Finds layers that the config names but that do not write.

    A conversion must also refuse a layer beyond the model.
    """
    assert not isinstance(whole.config.layers, str)
    silent = sorted(set(whole.config.layers) - set(whole.after_reading.layers))
    try:
        with twin(whole.config, layers=(0, 7)):
            refused = False
    except InPlaceTTTError:
        refused = True
    found = "every layer named writes, and one beyond the model is refused"
    if silent:
        found = f"layers {_list(silent)} are named and do not write"
    elif not refused:
        found = "a layer beyond the model is accepted and ignored"
    numbers = {"named": list(whole.config.layers), "silent": silent, "refused": refused}
    return judged(refused and not silent, found, numbers, 0)


def every_layer(whole: WholeModel, expected: Any) -> Outcome:
    """Compares the reads of each TTT layer with its declared rule.

    Each layer must also have its own tensors and η, and write if the first layer writes.
    """
    apart, etas = _sharing(whole), whole.config.eta
    if isinstance(etas, tuple):
        own = zip(whole.layers.items(), etas, strict=True)
        apart += [i for (i, layer), eta in own if layer.eta != eta or (etas[0] and not eta)]
    errors, limit = whole.once(plain_deviations), limits(whole.lm.dtype).outputs
    if errors[next(iter(errors))] < limit:  # if not, other items report the error of the first layer
        apart += [i for i, error in errors.items() if not error < limit]
    found = f"all {len(errors)} TTT layers follow one rule"
    if apart:
        found = f"layers {_list(sorted(set(apart)))} differ from layer {next(iter(errors))}"
    chart = {
        "kind": "bars",
        "title": "Error of the reads, layer by layer",
        "x": "layer",
        "y": "error over the size of a read",
        "labels": [str(i) for i in errors],
        "values": list(errors.values()),
    }
    numbers = {f"error of layer {i}": error for i, error in errors.items()}
    return judged(not apart, found, numbers, limit, chart if len(errors) > 1 else None)


def _sharing(whole: WholeModel) -> list[int]:
    """Returns the TTT layers that share their conv or P with another layer."""
    found: list[int] = []
    seen: set[int] = set()
    for index, layer in whole.layers.items():
        own = {id(parameter) for parameter in layer.ttt.parameters()}
        found += [index] * bool(own & seen)
        seen |= own
    return found


def model_state_place(whole: WholeModel, expected: Any) -> Outcome:
    """Compares W0 of each TTT layer and all buffers before and after reading and generating."""
    return _unchanged(whole, lambda fast: fast, "the state is in no parameter and no buffer")


def model_slow_weights(whole: WholeModel, expected: Any) -> Outcome:
    """Compares every other parameter of the model before and after reading and generating."""
    return _unchanged(whole, lambda fast: not fast, "reading and generating change no slow weight")


def _unchanged(whole: WholeModel, wanted: Any, found: str) -> Outcome:
    names = {m: n for n, m in whole.lm.named_modules()}
    own = {
        f"{names[layer]}.{n}"
        for layer in whole.layers.values()
        for n, _ in layer.named_parameters()
        if not n.startswith("ttt.")
    }
    own |= {name for name, _ in whole.lm.named_buffers()}
    reading = whole.after_reading
    changed = [name for name in reading.changed if wanted(name in own)]
    text = found if not changed else f"reading changes {_list(changed[:3])}"
    numbers = {"tensors changed": changed, "tokens read": reading.read, "tokens generated": reading.generated}
    return judged(not changed, text, numbers, 0)


def extensions(whole: WholeModel, expected: Any) -> Outcome:
    """Lists the settings that the paper's method lacks, with their values."""
    on = whole.config.extensions
    numbers = {name: str(value) for name, value in on.items()}
    if expected is not None:
        differs = [name for name, value in expected.items() if on.get(name) != value]
        differs += sorted(set(on) - {*expected, "prompt_write"})
        found = f"{', '.join(differs)} differ from TTT-NTP's"
        return judged(not differs, found if differs else "its options are those of TTT-NTP", numbers)
    if not on:
        return judged(True, "no setting beyond the paper's method is on", {})
    text = ", ".join(f"{name} = {value}" for name, value in on.items())
    return Outcome("extension", f"on beyond the paper: {text}", numbers)


def _list(values: list[Any]) -> str:
    return ", ".join(map(str, values))


def eta_by_settings(whole: WholeModel, expected: Any) -> Outcome:
    """Reads η from the config."""
    values = sorted({whole.config.eta_of(i) for i in range(len(whole.layers))})
    found, numbers = f"η = {', '.join(f'{value:g}' for value in values)}", {"η": values}
    if expected is None:
        return Outcome("unspecified", found, numbers)
    return judged(all(value in expected for value in values), found, numbers)


def chunk_size_by_settings(whole: WholeModel, expected: Any) -> Outcome:
    """Reads the tokens per chunk from the config."""
    size = whole.config.chunk_size
    return judged(
        min(expected) <= size <= max(expected),
        f"{size} tokens",
        {"tokens per chunk": size, "expected": list(expected)},
        0,
    )
