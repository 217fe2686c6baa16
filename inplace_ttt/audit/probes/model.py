"""Probes of a converted model's layers and target source, and of changes by reading and generating."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from ...errors import InPlaceTTTError
from ...families import locate
from ..borrowing import borrowed, small_chunks
from ..limits import limits
from ..outcome import TOLERANCE, NotChecked, Outcome, judged
from ..whole_model import WholeModel
from .bench import Bench
from .circumstances import plain_deviations
from .twin import twin


def target_source(whole: WholeModel, expected: Any) -> Outcome:
    """Compares the input of the target generators with the embeddings and with the MLP's input.

    They are recorded while the model reads.
    """
    decoder = locate(whole.lm)
    seen: dict[str, dict[int, Tensor]] = {"source": {}, "mlp": {}}
    embeddings: list[Tensor] = []
    handles = [
        decoder.blocks[0].register_forward_pre_hook(
            lambda module, args, kwargs: embeddings.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
    ]
    for index, layer in whole.layers.items():
        handles.append(layer.ttt.register_forward_pre_hook(_note(seen["source"], index)))
        handles.append(decoder.layers[index].mlp.register_forward_pre_hook(_note(seen["mlp"], index)))
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
            "embeddings": max(_alike(source, embeddings[0]), _alike(source, table)),
            "hidden_states": _alike(source, seen["mlp"][index]) if index in seen["mlp"] else 0.0,
        }
        best = max(alike, key=lambda name: alike[name])
        found.add(best if alike[best] > 0.999 else "something else")
        numbers[f"layer {index}"] = {f"cosine with {name}": value for name, value in alike.items()}
    names = {"embeddings": "token embeddings", "hidden_states": "the layer's own MLP input (hidden states)"}
    text = " and ".join(names.get(name, name) for name in sorted(found))
    return judged(found == {expected}, f"targets are made from {text}", numbers, 1e-3)


def _note(where: dict[int, Tensor], index: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args:
            where[index] = args[0]

    return hook


def _alike(a: Tensor, b: Tensor) -> float:
    return (
        float(cosine_similarity(a.detach().double().flatten(), b.detach().double().flatten(), dim=0))
        if a.shape == b.shape
        else 0.0
    )


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
    found = (
        "every layer named writes, and one beyond the model is refused"
        if refused and not silent
        else (
            f"layers {_list(silent)} are named and do not write"
            if silent
            else "a layer beyond the model is accepted and ignored"
        )
    )
    return judged(
        refused and not silent,
        found,
        {"named": list(whole.config.layers), "silent": silent, "refused": refused},
        0,
    )


def every_layer(whole: WholeModel, expected: Any) -> Outcome:
    """Compares each TTT layer with the first, by measured η over set η and by own-chunk exposure.

    Each layer must also have its own tensors and follow its declared rule.
    """
    rows: dict[int, tuple[float, float]] = {}
    apart = _sharing(whole)
    if isinstance(etas := whole.config.eta, tuple):
        apart += [
            i
            for i, eta in zip(whole.layers, etas, strict=True)
            if whole.layers[i].eta != eta and i not in apart
        ]
    for index in () if whole.undrivable else whole.layers:
        with borrowed(whole.model, index) as module, module.unclipped():
            bench = Bench(module, whole.seed)
            try:
                row = (bench.kappa() / (module.eta or 1.0), float(bench.reads.diagonal().abs().max()))
            except NotChecked:
                if not rows:
                    raise
                # writes can be measured in the first layer, but not in this one
                apart.append(index)
                continue
            rows[index] = row
    errors, limit = whole.once(plain_deviations), limits(whole.lm.dtype).outputs
    if errors[next(iter(errors))] < limit:  # if not, other items report the error of the first layer
        apart += [i for i, error in errors.items() if error >= limit and i not in apart]
    first = next(iter(rows.values()), ())
    apart += [
        i
        for i, row in rows.items()
        if i not in apart and max(abs(a - b) for a, b in zip(row, first, strict=True)) > TOLERANCE
    ]
    found = f"all {len(errors)} TTT layers follow one rule"
    if apart:
        found = f"layers {_list(sorted(apart))} differ from layer {next(iter(errors))}"
    chart = {
        "kind": "bars",
        "title": "Size of a write over η, layer by layer",
        "x": "layer",
        "y": "measured / set",
        "labels": [str(i) for i in rows],
        "values": [row[0] for row in rows.values()],
    }
    numbers = {f"layer {i}": {"write over η": row[0], "own write read": row[1]} for i, row in rows.items()}
    return judged(not apart, found, numbers, TOLERANCE, chart if len(rows) > 1 else None)


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
    if expected is not None:
        differs = [name for name, value in expected.items() if on.get(name) != value] + sorted(
            set(on) - {*expected, "prompt_write"}
        )
        found = (
            "its options are those of TTT-NTP"
            if not differs
            else f"{', '.join(differs)} differ from TTT-NTP's"
        )
        return judged(not differs, found, {name: str(value) for name, value in on.items()})
    if not on:
        return judged(True, "no setting beyond the paper's method is on", {}, None)
    text = ", ".join(f"{name} = {value}" for name, value in on.items())
    return Outcome(
        "extension", f"on beyond the paper: {text}", {name: str(value) for name, value in on.items()}
    )


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
