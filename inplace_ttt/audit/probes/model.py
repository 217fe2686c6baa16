"""Probes of a converted model as a whole: its layers, its target source, its start, and what reading and
generating change."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from ... import surgery
from ...errors import InPlaceTTTError
from ...families import locate
from ..converted import borrowed, small_chunks
from ..limits import limits
from ..outcome import TOLERANCE, NotChecked, Outcome, judged
from ..whole_model import WholeModel
from .bench import Bench, largest_difference
from .circumstances import plain_deviations
from .conversion import after_conversion, frozen_beside_trained
from .twin import TWIN_RANGE, base_of_twin, twin, twin_on_disk


def target_source(whole: WholeModel, expected: Any) -> Outcome:
    """What the target generators are handed while the model reads, against the embeddings and against the
    MLP's input."""
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


def start_conv(whole: WholeModel, expected: Any) -> Outcome:
    """The convolutions of a fresh conversion with these settings, and of this model if it was never
    trained."""
    if whole.config.conv == "next":
        return Outcome(
            "extension",
            "there is no convolution: the next token's source stands in its place",
            {"conv": "next"},
        )
    fresh = max(float(conv.abs().max()) for conv, _ in whole.once(after_conversion).generators)
    here = max(float(layer.ttt.conv.detach().abs().max()) for layer in whole.layers.values())
    found = (
        "a conversion starts with conv = 0"
        if fresh == 0
        else f"a conversion starts with conv up to {fresh:.2g}"
    )
    found += "; this model's is 0 still" if here == 0 else "; this model's has been trained since"
    return judged(fresh == 0, found, {"largest entry, fresh": fresh, "largest entry, this model": here}, 0)


def start_projection(whole: WholeModel, expected: Any) -> Outcome:
    """P of a fresh conversion: its entries off the diagonal, and the spread on it against the model's
    initializer range."""
    if whole.config.proj_init != "random_diagonal":
        measured = "map to the next token that is measured on a text"
        start = (
            measured if whole.config.proj_init == "calibrated" else whole.config.proj_init.replace("_", " ")
        )
        return Outcome("extension", f"P starts as the {start}", {"proj_init": whole.config.proj_init})
    fresh, half = (
        [proj for _, proj in whole.once(after_conversion).generators],
        len(whole.once(after_conversion).generators) // 2,
    )
    drawn = [(p, TWIN_RANGE) for p in fresh]
    groups = [fresh[:half], fresh[half:]]
    if untrained(whole):
        own = [layer.ttt.proj.detach().float().cpu() for layer in whole.layers.values()]
        drawn += [(p, surgery.initial_std(whole.lm.config)) for p in own]
        groups.append(own)
    off = max(float((p - p.diagonal().diag()).abs().max()) for p, _ in drawn)
    strange = [why for p, wanted in drawn if (why := _unlike_normal(p.diagonal() / wanted))]
    alike = any(torch.equal(a, b) for group in groups for a, b in itertools.combinations(group, 2))
    found = (
        "P is diagonal, N(0, σ²) with the initializer range"
        if off == 0
        else f"P has entries up to {off:.2g} off its diagonal"
    )
    found = strange[0] if strange and off == 0 else found
    found += "; the same in two layers" if alike else ""
    spread = [float(p.diagonal().std()) / wanted for p, wanted in drawn]
    numbers = {"largest off the diagonal": off, "spread on the diagonal, over the initializer range": spread}
    return judged(off == 0 and not strange and not alike, found, numbers, 0.25)


def _unlike_normal(x: Tensor) -> str:
    """What of numbers [n] is not as N(0, 1) has it, beyond what n draws may do; empty where all is."""
    n, mean, std, largest = len(x), float(x.mean()), float(x.std()), float(x.abs().max())
    if abs(std - 1) > max(0.25, 4 / (2 * n) ** 0.5):
        return f"P's diagonal has {std:.2f} of the initializer range"
    if abs(mean) > max(0.35, 4 / n**0.5):
        return f"P's diagonal has a mean of {mean:.2f} of its range"
    if n >= 100 and largest < 1.9 * std:
        return f"P's diagonal is nowhere above {largest / std:.2f} of its spread, as no normal draw is"
    return ""


def start_identity(whole: WholeModel, expected: Any) -> Outcome:
    """What a conversion makes of the base's weights; with conv = 0, a small model before and after it, and
    this one with TTT on and off."""
    small = whole.once(after_conversion)
    for found, names in (
        ("a conversion changes the base's", small.changed),
        ("a conversion freezes", small.frozen),
        ("while the rest of their MLP is trained, frozen are", frozen_beside_trained(whole)),
    ):
        if names:
            return judged(False, f"{found} {_list(names[:3])}", {"named": names}, 0)
    if not whole.config.starts_as_base:
        return Outcome(
            "extension",
            "a fresh conversion writes at once, so that it is not its base",
            {"conv": whole.config.conv},
        )
    ids = torch.randint(64, (1, 3 * whole.chunk), generator=torch.Generator().manual_seed(whole.seed))
    settings = dataclasses.replace(whole.config, chunk_size=whole.chunk)
    numbers = {}
    with torch.no_grad():
        wanted = base_of_twin()(ids, use_cache=False).logits
        ways: dict[str, Any] = {"a small model": twin}
        if not settings.needs_calibration:  # a folder is converted before it is measured
            ways["a small folder"] = twin_on_disk
        for name, converted in ways.items():
            with converted(settings, layers=(0, 1)) as model:
                for layer in surgery.fast_weights(model).values():
                    layer.ttt.conv.zero_()
                numbers[f"logits of {name} against its base"] = largest_difference(
                    model(ids, use_cache=False).logits, wanted
                )
    if untrained(whole):
        with small_chunks(whole.model, whole.chunk, seed=None), torch.no_grad():
            on = whole.lm(whole.ids, use_cache=False).logits
            with surgery.disable_ttt(whole.lm):
                off = whole.lm(whole.ids, use_cache=False).logits
        numbers["logits of this model, on against off"] = largest_difference(on, off)
    worst = max(numbers, key=lambda name: numbers[name])
    limit = limits(whole.lm.dtype if "this model" in worst else torch.float32).start
    off = numbers[worst]
    found = (
        "the model starts as its base"
        if off < limit
        else f"the model starts {off:.2g} of a logit away from its base"
    )
    return judged(off < limit, found, numbers, limit)


def untrained(whole: WholeModel) -> bool:
    return whole.config.starts_as_base and not any(
        bool(layer.ttt.conv.detach().any()) for layer in whole.layers.values()
    )


def layer_spacing(whole: WholeModel, expected: Any) -> Outcome:
    """Which layers hold a state after the model has read, every sixth or not."""
    layers = whole.after_reading.layers
    wanted = list(range(layers[0], whole.depth, expected)) if layers else []
    found = f"layers {_list(layers)} of {whole.depth} write" if layers else "no layer writes"
    return judged(bool(layers) and layers == wanted, found, {"layers": layers, "every sixth": wanted}, 0)


def layer_offset(whole: WholeModel, expected: Any) -> Outcome:
    """The first layer that writes; a choice, since the paper gives none."""
    layers = whole.after_reading.layers
    if not layers:
        raise NotChecked("no layer writes")
    if expected is not None:
        return judged(layers[0] == expected, f"the first is layer {layers[0]}", {"first": layers[0]}, 0)
    return Outcome("unspecified", f"the first is layer {layers[0]}", {"first": layers[0]}, 0)


def layers_in_range(whole: WholeModel, expected: Any) -> Outcome:
    """Layers that the config names and that do not write; and whether a conversion refuses a layer beyond the
    model."""
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
    """η as measured over η as set, and own-chunk exposure, in each TTT layer against the first; whether each
    has tensors of its own."""
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
                # of the first layer writes can be told from what is read, and of this one not
                apart.append(index)
                continue
            rows[index] = row
    errors, limit = whole.once(plain_deviations), limits(whole.lm.dtype).outputs
    if errors[next(iter(errors))] < limit:  # else the first layer itself is off, which other items report
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
    """TTT layers whose conv or P is another one's too."""
    found: list[int] = []
    seen: set[int] = set()
    for index, layer in whole.layers.items():
        own = {id(parameter) for parameter in layer.ttt.parameters()}
        found += [index] * bool(own & seen)
        seen |= own
    return found


def model_state_place(whole: WholeModel, expected: Any) -> Outcome:
    """W0 of each TTT layer and all buffers, before and after reading and generating."""
    return _unchanged(whole, lambda fast: fast, "the state is in no parameter and no buffer")


def model_slow_weights(whole: WholeModel, expected: Any) -> Outcome:
    """Every other parameter of the model, before and after reading and generating."""
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
    """Settings that the paper's method does not have, and their values."""
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
    """η as the config has it."""
    values = sorted({whole.config.eta_of(i) for i in range(len(whole.layers))})
    found, numbers = f"η = {', '.join(f'{value:g}' for value in values)}", {"η": values}
    if expected is None:
        return Outcome("unspecified", found, numbers)
    return judged(all(value in expected for value in values), found, numbers)


def chunk_size_by_settings(whole: WholeModel, expected: Any) -> Outcome:
    """Tokens a chunk as the config has them."""
    size = whole.config.chunk_size
    return judged(
        min(expected) <= size <= max(expected),
        f"{size} tokens",
        {"tokens a chunk": size, "expected": list(expected)},
        0,
    )
