"""Rules that the evidence trains, and models without writes that it trains for comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "runs" / "memory"
ONE_PROCESS = ("parallel.nproc_per_node=1", "training.gradient_accumulation_steps=2")
"""Settings for large logits: the batch of two processes in one process."""


@dataclass(frozen=True)
class Rule:
    """A conversion and its training.

    Attributes:
        convert: options of `inplace-ttt convert`, apart from the layers.
        settings: settings of the recipe.
        writes: False for a model that is trained without writes, for comparison.
        trains: False to read the model as converted, with the layers and η that the conversion chose on
            the training texts.
    """

    convert: tuple[str, ...]
    settings: tuple[str, ...] = ()
    writes: bool = True
    trains: bool = True

    def trained(self, *settings: str) -> Rule:
        """Returns the same rule with more settings of the recipe."""
        return dataclasses.replace(self, settings=(*self.settings, *settings))


def without_writes(*settings: str) -> Rule:
    """Returns a rule with η 0. It shows the part of the gain that training gives without fast weights."""
    return dataclasses.replace(papers("paper", "eta=0").trained(*settings), writes=False)


def papers(preset: str, *changed: str, rate: str = "1e-3") -> Rule:
    """Returns a rule of the paper's kind at the same chunk size.

    conv and P share one learning rate.
    """
    rates = (f"training.learning_rate={rate}", f"training.conv_learning_rate={rate}")
    return Rule(("--preset", preset, "--chunk-size", "128", *_set(changed)), rates)


def ttt_ntp(*changed: str) -> Rule:
    """Returns TTT-NTP's training form, which lacks conv."""
    return papers("ttt_ntp", *changed).trained("training.conv_learning_rate=null")


def ridge(*changed: str) -> Rule:
    """Returns the preset `ridge` with some settings changed."""
    return Rule(("--preset", "ridge", "--calibrate", str(WORK / "text" / "train"), *_set(changed)))


def gradient(*options: str) -> Rule:
    """Returns the preset `gradient`, untrained."""
    return Rule(("--preset", "gradient", "--calibrate", str(WORK / "text" / "train"), *options), trains=False)


def _set(settings: Iterable[str]) -> Iterator[str]:
    return (word for setting in settings for word in ("--set", setting))


_TARGETS = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj]"
LORA = ("training.trainable=lora", f"training.lora.targets={_TARGETS}", "training.lora.rank=4")
"""Settings of LoRA with 968 thousand parameters; conv and P of three layers have 1,004 thousand."""

RULES = {
    "ridge": ridge(),
    "paper": papers("paper", "eta=1"),
    "reference": papers("reference", "eta=3"),
    **{f"paper, eta {eta}": papers("paper", f"eta={eta}") for eta in (0.04, 0.004)},
    "gradient": gradient(),
    **{f"gradient, chunks of {size}": gradient("--chunk-size", str(size)) for size in (64, 256)},
    "gradient, 3 layers, eta 0.04": gradient("--layers", "12,18,24", "--eta", "0.04"),
    "gradient, 18 layers, eta 0.008, chunks of 256": gradient(
        "--layers", "upper:1", "--eta", "0.008", "--chunk-size", "256"
    ),
    "ttt_ntp": ttt_ntp(),
    "ttt_ntp, eta 0.01": ttt_ntp("eta=0.01"),
    "LoRA, eta 0": without_writes(*LORA),
    "every parameter, eta 0": without_writes("training.trainable=all", "training.learning_rate=2e-5"),
    "ridge, rank 0.5": ridge("whitening.rank=0.5"),
    "ridge, rank 1.0": ridge("whitening.rank=1.0"),
    **{f"ridge, eta {eta}": ridge(f"eta={eta}") for eta in (0.3, 1, 2, 4)},
    "ridge, gated": ridge("write_gate=true"),
    "ridge, keys without a center": ridge("whitening.centered=false"),
    **{f"ridge, λ 0.1, eta {eta}": ridge("ridge=0.1", f"eta={eta}") for eta in (2, 3)},
    **{f"ridge, {steps} steps": ridge().trained(f"training.steps={steps}") for steps in (96, 192, 384)},
    **{
        f"paper, {steps} rows of 8192": papers("paper", "eta=1").trained(
            "data.sequence_length=8192", f"training.steps={steps // 2}", *ONE_PROCESS
        )
        for steps in (24, 48)
    },
    **{
        f"paper, row norms kept, eta {eta}": papers("paper", f"eta={eta}", "preserve_row_norms=true")
        for eta in (1, 3)
    },
}
MAIN = ("ridge", "paper", "reference")
"""Rules that run by default. Each other rule changes one choice."""
