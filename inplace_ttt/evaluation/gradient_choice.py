"""Chooses layers and η for `target: gradient`: tries several choices, and takes the best harmless one.

Nothing is trained. Each text holds a passage twice, the second time beyond the attention window. A choice
does harm if it raises the loss of any text between the two copies. `choose` takes the harmless choice that
lowers the loss of the second copy most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..calibration.calibrate import calibrate
from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from ..surgery import convert, fast_weights, revert
from ..tasks.passages import Passage, mean_loss
from .protocol import progress_bar
from .token_losses import token_losses

LAYERS = ("upper:6", "upper:3")
ETAS = (0.01, 0.02, 0.04, 0.08, 0.16)
"""Values of η, ascending. A set of layers is abandoned at the first η that does harm."""
TEXTS, LENGTH, WINDOW = 3, 1024, 256
"""Upper limits: number of texts, tokens per text (more for larger chunks), and tokens of the window."""
_BEGINNING = 8
"""Tokens at a text's beginning that never belong to the passage.

They may be special tokens, which a text holds only once.
"""


@dataclass(frozen=True)
class Tried:
    """One choice and its effect. Losses are with writes minus without, in nats per token.

    Attributes:
        layers: indices of the layers.
        eta: η.
        text: mean over texts of the loss between the two copies.
        worst: largest of these losses.
        again: mean over texts of the loss on the second copy.
    """

    layers: tuple[int, ...]
    eta: float
    text: float
    worst: float
    again: float

    @property
    def harms(self) -> bool:
        """True if the loss of some text rises between the two copies."""
        return self.worst > 0


@dataclass(frozen=True)
class Choice:
    """The choice that is taken.

    Attributes:
        best: it and its effect.
        tried: all choices that were tried, in order.
        tensors: the calibrated tensors of its layers, by layer index and name.
    """

    best: Tried
    tried: list[Tried]
    tensors: dict[int, dict[str, Tensor]]


def least_tokens(config: InPlaceTTTConfig) -> int:
    """Returns the tokens of the shortest text that holds a passage of one chunk twice, beyond a window."""
    return 4 * config.chunk_size + _BEGINNING


def choose(
    model: PreTrainedModel,
    config: InPlaceTTTConfig,
    rows: Sequence[Tensor],
    *,
    layers: Sequence[str | tuple[int, ...]] = LAYERS,
    etas: Sequence[float] = ETAS,
    progress: bool = False,
) -> Choice:
    """Returns the best choice of layers and η.

    Args:
        model: a model that is not converted; it is unchanged afterwards.
        config: a config with `target: gradient`; its layers and η are replaced by those that are tried.
        rows: token ids [1, T] of texts like those to be read.
        layers: sets of layers to try, as in a config.
        etas: values of η to try, ascending.
        progress: show a bar on stderr.

    Raises:
        InPlaceTTTError: if a text is too short to hold a passage of one chunk twice, beyond a window.
    """
    length = min([max(LENGTH, least_tokens(config)), *(row.shape[1] for row in rows)])
    passage = Passage((length - _BEGINNING) // 4, (length - _BEGINNING) // 2)
    start = length - passage.tokens
    spans = passage.between(start), passage.second(start)
    if passage.length < config.chunk_size:
        raise InPlaceTTTError(
            f"choosing layers and eta needs texts of {least_tokens(config)} tokens, but one has "
            f"{length}; give longer texts, or --layers and --eta."
        )
    texts = torch.cat([passage.repeat(row[0, :length], start)[None] for row in rows[:TEXTS]])
    how: dict[str, Any] = {"piece": config.chunk_size, "window": min(WINDOW, passage.length)}
    sets = list(dict.fromkeys(_resolved(model, config, one) for one in layers))
    known = _measured(
        model, dataclasses.replace(config, layers=tuple(sorted({i for one in sets for i in one}))), rows
    )
    tried: list[Tried] = []
    with progress_bar(
        "choosing layers and eta", (1 + len(sets) * len(etas)) * texts.numel(), progress
    ) as bar:
        off = token_losses(model, texts, **how, progress=bar.update)
        for one in sets:
            for eta in etas:
                on = _read(
                    model,
                    dataclasses.replace(config, layers=one, eta=eta),
                    known,
                    texts,
                    {**how, "progress": bar.update},
                )
                change = (on - off).double()
                between, again = (mean_loss(change, span) for span in spans)
                tried.append(
                    Tried(one, eta, float(between.mean()), float(between.max()), float(again.mean()))
                )
                if tried[-1].harms:
                    break
    harmless = [one for one in tried if not one.harms]
    best = min(harmless, key=lambda one: one.again) if harmless else min(tried, key=lambda one: one.text)
    return Choice(best, tried, {index: known[index] for index in best.layers})


def table(best: Tried, tried: Sequence[Tried]) -> list[str]:
    """Returns lines of text: the effect of each choice, and the choice that is taken."""
    columns = ("eta", "text", "worst", "repeat")
    lines = [
        "choice of layers and eta, on minus off in nats per token:",
        f"  {'layers':26}" + "".join(f"{name:>9}" for name in columns),
    ]
    for one in tried:
        note = "  taken" if one is best else "  a text gets harder" if one.harms else ""
        losses = "".join(f"{loss:+9.3f}" for loss in (one.text, one.worst, one.again))
        lines.append(f"  {','.join(map(str, one.layers)):26}{one.eta:9g}{losses}{note}")
    if best.harms:
        lines.append(
            "  every choice makes a text harder; the one that does so least is taken. Measure it with "
            "`inplace-ttt evaluate`."
        )
    return lines


def _resolved(
    model: PreTrainedModel, config: InPlaceTTTConfig, layers: str | tuple[int, ...]
) -> tuple[int, ...]:
    found = (
        dataclasses.replace(config, layers=layers)
        .resolve(model.config.get_text_config().num_hidden_layers)
        .layers
    )
    assert isinstance(found, tuple)
    return found


def _measured(
    model: PreTrainedModel, config: InPlaceTTTConfig, rows: Sequence[Tensor]
) -> dict[int, dict[str, Tensor]]:
    """Returns each layer's calibrated tensors, by layer index and name.

    They are measured with TTT off, so they hold for any subset of the layers.
    """
    convert(model, config)
    try:
        calibrate(model, rows)
        return {
            index: {name: x.clone() for name, x in layer.ttt.state_dict().items()}
            for index, layer in fast_weights(model).items()
        }
    finally:
        revert(model)


def _read(
    model: PreTrainedModel,
    config: InPlaceTTTConfig,
    known: dict[int, dict[str, Tensor]],
    texts: Tensor,
    how: dict[str, Any],
) -> Tensor:
    """Returns the token losses [B, T - 1] of texts [B, T] with the choice in `config`."""
    convert(model, config)
    try:
        for index, layer in fast_weights(model).items():
            layer.ttt.load_state_dict(known[index])
        return token_losses(model, texts, **how)
    finally:
        revert(model)
