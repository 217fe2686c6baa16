"""The config of a conversion: all settings of the method, validated, with presets."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config_checks import Conv, ProjInit, Target, UpdateRule, check
from .config_tables import KeyWhitening, PromptWrite, UpdateClip, from_mapping, require
from .rules import Rule, WriteNorm, rule_of_config

_OF_THE_PAPER = {"layers", "chunk_size", "eta", "target", "conv", "kernel_size", "clip", "update_on_decode"}
_LOWER = 0.4
"""Fraction of a model's layers, from the first, that `upper` leaves out."""


@dataclass(frozen=True)
class InPlaceTTTConfig:
    """Holds the settings of a conversion. The defaults are the preset `paper`.

    Args:
        layers: "every:N" (layers 0, N, 2N, …), "upper:N" (the same layers without the model's lower 40 %),
            or a list of layer indices in order. Paper appendix C.3: every sixth; offset unstated.
        chunk_size: tokens per chunk, C. Paper §4.3: 512 and 1024 are the best of 256…2048.
        eta: η of Eq. (1), one number or one per TTT layer. The paper states no value.
        target: the target source X. "embeddings" is the input of layer 0 (§3.2), "hidden_states" is the MLP's
            input. "gradient" is an extension that needs no training. V is then minus the gradient of the
            chunk's loss at the layer's output, times a measured scale.
        steps_per_chunk: gradient steps on each chunk's loss, with target="gradient".
        conv: "lookahead" pads the chunk on both sides (taps t-k//2 … t+k//2). "causal" pads it on the left
            only (no future token). "next" is an extension without a convolution. The target is then made
            from the next token's source, and is zero for a chunk's last token.
        kernel_size: taps of the depthwise convolution (appendix C.2: 5).
        clip: a bound on the norm of a chunk's write, or None.
        detach_target: stop the gradient from the target into its source.
        update_on_decode: also write tokens that are read one at a time into a non-empty cache, such as
            generated tokens.
        update_rule: the matrix that the layer reads. "sum" is the paper's S = Σ VᵀZ. "ridge" (extension) is
            the M that minimizes Σ ‖V - ZMᵀ‖² + λ‖M‖², computed from that sum and the sum of ZᵀZ.
        ridge: λ of update_rule="ridge" (extension).
        whitening: whitened keys (extension), or None for the paper's keys.
        write_gate: weigh each token in the ridge regression with a learned gate of its whitened key
            (extension). Irrelevant text then occupies less of the state. The gate starts at 1.
        normalize_targets: center the target source, and scale it to the size of the layer's residual stream
            (extension). The scale is measured on a text. The center is the mean over the vocabulary for
            embeddings, and over the text for hidden states.
        proj_init: the initial P. "random_diagonal" draws a diagonal per layer (the paper). The others are
            extensions. "shared_diagonal" is one diagonal for all layers, and "identity" is the identity.
            "calibrated" is a map from the next token's source to the direction that lowers the loss, measured
            on a text.
        write_norm: "spectral" (extension) divides a chunk's write by its spectral norm, in place of a clip.
        preserve_row_norms: scale each row of W0 + ηS, when it is read, to the norm of W0's row (extension).
        prompt_write: one write at the end of a session's prompt, in place of the chunks' writes (extension,
            `Session.write_prompt`). Forwards without a cache, as in training, still write chunks.

    Raises:
        InPlaceTTTError: if a value has a wrong type or is out of range. Also if a setting contradicts
            another one, or is unused beside the others.

    Examples:
        >>> from inplace_ttt import InPlaceTTTConfig, UpdateClip
        >>> config = InPlaceTTTConfig(layers=[6, 12], eta=[0.1, 0.05], chunk_size=512)
        >>> clipped = InPlaceTTTConfig(clip=UpdateClip(0.01, relative=True, mode="always"))
        >>> clipped.layers, clipped.eta
        ('every:6', 1.0)
    """

    layers: str | tuple[int, ...] = "every:6"
    chunk_size: int = 1024
    eta: float | tuple[float, ...] = 1.0
    target: Target = "embeddings"
    steps_per_chunk: int = 1
    conv: Conv = "lookahead"
    kernel_size: int = 5
    clip: UpdateClip | None = None
    detach_target: bool = False
    update_on_decode: bool = True
    update_rule: UpdateRule = "sum"
    ridge: float | None = None
    whitening: KeyWhitening | None = None
    write_gate: bool = False
    normalize_targets: bool = False
    proj_init: ProjInit = "random_diagonal"
    write_norm: WriteNorm | None = None
    preserve_row_norms: bool = False
    prompt_write: PromptWrite | None = None

    rule: ClassVar[Rule]
    """The update rule, made from the fields above."""

    def __post_init__(self) -> None:
        for name in ("layers", "eta"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.clip, Mapping):
            object.__setattr__(self, "clip", from_mapping(UpdateClip, self.clip, "clip"))
        if isinstance(self.whitening, Mapping):
            object.__setattr__(self, "whitening", from_mapping(KeyWhitening, self.whitening, "whitening"))
        if isinstance(self.prompt_write, Mapping):
            object.__setattr__(
                self, "prompt_write", from_mapping(PromptWrite, self.prompt_write, "prompt_write")
            )
        check(self, InPlaceTTTConfig)
        object.__setattr__(self, "rule", rule_of_config(self, InPlaceTTTConfig))

    def resolve(self, num_layers: int) -> InPlaceTTTConfig:
        """Resolves `layers` to explicit indices (paper appendix C.3: every sixth layer).

        Args:
            num_layers: decoder layers of the model.

        Returns:
            The config with a tuple of indices as `layers`.

        Raises:
            InPlaceTTTError: if a listed layer does not exist in such a model.

        Examples:
            >>> InPlaceTTTConfig(layers="every:6").resolve(num_layers=30).layers
            (0, 6, 12, 18, 24)
        """
        if isinstance(self.layers, str):
            which, step = self.layers.split(":")
            layers = range(0, num_layers, int(step))
            chosen = [layer for layer in layers if which == "every" or layer >= _LOWER * num_layers] or [
                layers[-1]
            ]
            return dataclasses.replace(self, layers=tuple(chosen))
        beyond = [i for i in self.layers if i >= num_layers]
        require(
            not beyond,
            f"layers {beyond} do not exist: the model has {num_layers} layers, 0 to {num_layers - 1}.",
        )
        return self

    def state_shape(self, d: int, h: int) -> tuple[int, int]:
        """Computes the shape of one sequence's state in one layer (paper §3.1: [d, h]).

        Args:
            d: output features of the down-projection, the model's width.
            h: input features of the down-projection.

        Returns:
            [d, r] for keys of r numbers, which is [d, h] without whitening. With update_rule="ridge" it is
            [d + r, r].

        Examples:
            >>> InPlaceTTTConfig().state_shape(d=576, h=1536)
            (576, 1536)
            >>> InPlaceTTTConfig.preset("ridge").state_shape(d=576, h=1536)
            (1600, 1024)
        """
        width = h if self.whitening is None else self.whitening.directions(d, h)
        return self.rule.state_rows(d, width), width

    def state_bytes(self, sizes: Iterable[tuple[int, int]]) -> int:
        """Computes the bytes of one sequence's states in float32.

        Args:
            sizes: output and input features (d, h) of each TTT layer's down-projection.

        Returns:
            The bytes of all layers.

        Examples:
            >>> InPlaceTTTConfig().state_bytes([(576, 1536)] * 5)
            17694720
        """
        return 4 * sum(math.prod(self.state_shape(d, h)) for d, h in sizes)

    @property
    def wanting_whole_input(self) -> list[str]:
        """Names of the active settings that need all input features of a token on one rank."""
        target = ["target='gradient'"] if self.target == "gradient" else []
        return [
            *target,
            *(name for name in ("clip", "whitening") if getattr(self, name)),
            *self.rule.wanting_whole_input(),
        ]

    @property
    def needs_calibration(self) -> bool:
        """True if the layers have tensors that `inplace_ttt.calibrate` must measure on a text."""
        return (
            self.target == "gradient"
            or self.whitening is not None
            or self.normalize_targets
            or self.proj_init == "calibrated"
        )

    @property
    def extensions(self) -> dict[str, Any]:
        """The active settings that are extensions of the paper's method, by name."""
        values = {
            f.name: (getattr(self, f.name), f.default)
            for f in dataclasses.fields(self)
            if f.name not in _OF_THE_PAPER
        }
        target: dict[str, Any] = {"conv": self.conv} if self.conv == "next" else {}
        target |= {"target": self.target} if self.target == "gradient" else {}
        return target | {name: value for name, (value, default) in values.items() if value != default}

    @property
    def starts_as_base(self) -> bool:
        """True if a fresh conversion equals its base. Its convolution is then zero, and it writes zeros."""
        return self.conv != "next" and self.target != "gradient"

    def eta_of(self, position: int) -> float:
        """Looks up η of Eq. (1) for one TTT layer.

        Args:
            position: the layer's place among the TTT layers, from 0.

        Returns:
            η; the same for every layer if `eta` is one number.

        Raises:
            IndexError: if `eta` has one number per layer, and none for this position.

        Examples:
            >>> InPlaceTTTConfig(layers=[6, 12], eta=[0.1, 0.05]).eta_of(1)
            0.05
        """
        return self.eta[position] if isinstance(self.eta, tuple) else self.eta

    def to_dict(self) -> dict[str, Any]:
        """Converts the config to JSON values.

        Returns:
            All settings by name. `from_dict` makes the same config from them.

        Examples:
            >>> InPlaceTTTConfig(chunk_size=512).to_dict()["chunk_size"]
            512
        """
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> InPlaceTTTConfig:
        """Makes a config from a mapping of settings, such as the result of `to_dict` or a recipe's `ttt`.

        Args:
            values: settings by name. Settings that are left out have the values of the preset `paper`. Nested
                settings such as `clip` may be mappings.

        Returns:
            The config.

        Raises:
            InPlaceTTTError: if a setting is unknown or invalid.

        Examples:
            >>> InPlaceTTTConfig.from_dict({"layers": "every:4", "clip": {"max_norm": 0.5}}).clip
            UpdateClip(max_norm=0.5, relative=False, mode='inference')
        """
        return from_mapping(cls, values, "the TTT config")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> InPlaceTTTConfig:
        """Makes the config of a preset. docs/convert.md compares the presets.

        Args:
            name: "paper", "reference", "ttt_ntp", "gradient", "notes" or "ridge".
            overrides: settings that replace the preset's.

        Returns:
            The config.

        Raises:
            InPlaceTTTError: if the preset does not exist, or a setting is unknown or invalid.

        Examples:
            >>> InPlaceTTTConfig.preset("ridge", chunk_size=256).update_rule
            'ridge'
        """
        require(name in PRESETS, f"preset {name!r} does not exist; choose one of {', '.join(PRESETS)}.")
        return cls.from_dict({**PRESETS[name].to_dict(), **overrides})


PRESETS: dict[str, InPlaceTTTConfig] = {
    # arXiv 2604.06169 does not state η, the layer offset, or the chunk size of the main runs. The defaults
    # here are 1, 0 and 1024.
    "paper": InPlaceTTTConfig(),
    # The reference code's recommended configuration.
    "reference": InPlaceTTTConfig(chunk_size=4096, eta=3.0, target="hidden_states"),
    # TTT-NTP (arXiv 2606.21803): its public recipe for Llama-3.1-8B, with the diagonal P of its other
    # recipes. See docs/ttt_ntp.md.
    "ttt_ntp": InPlaceTTTConfig(
        eta=0.3,
        target="hidden_states",
        conv="next",
        proj_init="shared_diagonal",
        write_norm="spectral",
        preserve_row_norms=True,
        prompt_write=PromptWrite(),
    ),
    # Our extension: it needs no training. The model makes one gradient step on each chunk's own loss, which
    # costs one forward and backward per chunk. Upper layers helped more, and they shorten the backward.
    "gradient": InPlaceTTTConfig(layers="upper:6", chunk_size=128, eta=0.03, target="gradient"),
    # Our extension: the preset `gradient`, set for a short text. After several readings the model repeats
    # some of the text's sentences word for word.
    "notes": InPlaceTTTConfig(layers="upper:3", chunk_size=32, eta=0.2, target="gradient"),
    # Our extension: in our measurements it stores the content of a document (docs/results). Its keys,
    # targets and initial P need tensors that conversion measures on a text.
    "ridge": InPlaceTTTConfig(
        chunk_size=128,
        eta=3.0,
        update_rule="ridge",
        ridge=1.0,
        whitening=KeyWhitening(rank=1024),
        normalize_targets=True,
        proj_init="calibrated",
    ),
}
