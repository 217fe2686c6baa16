"""The update rules. A rule defines a layer's sums over chunks, and the matrix that reads compute from the
sums.

A rule holds settings only. `ops/reference.py` defines its computation, and `ops/forms.py` names the fast
code. To add an option, add a field here, and a field with the same name and default to `InPlaceTTTConfig`.
The config then refuses the option under every other rule.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from .config_tables import PromptWrite, is_number, require, require_size

WriteNorm = Literal["spectral"]


class Rule(ABC):
    """Base class of the update rules. A rule is hashable. Two rules are equal if their options are."""

    name: ClassVar[str]
    text: ClassVar[str]
    """The rule as text, for operators that accept only plain values. `rule_of_text` is the inverse."""

    def __post_init__(self) -> None:
        self.check()
        object.__setattr__(self, "text", json.dumps([self.name, dataclasses.asdict(self)]))  # type: ignore[call-overload]

    @classmethod
    def options(cls) -> list[str]:
        """Returns the names of the rule's options. A config has fields of the same names."""
        return [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @abstractmethod
    def check(self) -> None:
        """Raises InPlaceTTTError if an option has an invalid value."""

    @abstractmethod
    def check_with(self, config: Any) -> None:
        """Raises InPlaceTTTError if other settings of a config contradict the rule's options."""

    @property
    def reads_state(self) -> bool:
        """True if a read multiplies keys with the state itself, and not with a map made from it."""
        return False

    @property
    def keeps_row_norms(self) -> bool:
        """True if a read scales the rows of W0 + ηS to the norms of W0's rows."""
        return False

    @abstractmethod
    def state_rows(self, d: int, r: int) -> int:
        """Returns the number of rows of a state [·, r], for outputs of d numbers and keys of r."""

    @abstractmethod
    def wanting_whole_input(self) -> list[str]:
        """Returns the options that need all input features of a token on one rank."""

    @abstractmethod
    def beyond_reference_format(self) -> list[str]:
        """Returns the reasons why the reference code's format cannot hold the rule."""

    @abstractmethod
    def multiply_adds(self, d: int, r: int, chunk: int, forwards: int, *, in_one_product: bool) -> float:
        """Returns the multiply-adds per token for writes and reads in several forwards and one backward.

        Args:
            d: output features of the down-projection.
            r: numbers per key.
            chunk: tokens per chunk.
            forwards: the number of forward passes.
            in_one_product: True if W0 + ηS is applied in one product. A read then costs nothing extra.
        """


@dataclass(frozen=True)
class SumRule(Rule):
    """The paper's rule. A layer keeps S = Σ V_jᵀZ_j [d, r] and reads S itself (Eq. (1)).

    All options are extensions from TTT-NTP.

    Args:
        write_norm: "spectral" divides a chunk's write by its spectral norm.
        preserve_row_norms: scales each row of W0 + ηS to the norm of W0's row.
        prompt_write: replaces the chunks' writes by one write at the end of a prompt.
    """

    write_norm: WriteNorm | None = None
    preserve_row_norms: bool = False
    prompt_write: PromptWrite | None = None

    name: ClassVar[str] = "sum"

    @property
    def reads_state(self) -> bool:
        return not self.preserve_row_norms

    @property
    def keeps_row_norms(self) -> bool:
        return self.preserve_row_norms

    def check(self) -> None:
        require(
            self.write_norm in (None, *get_args(WriteNorm)),
            f"write_norm must be 'spectral' or nothing, got {self.write_norm!r}.",
        )
        require(
            isinstance(self.preserve_row_norms, bool),
            f"preserve_row_norms must be true or false, got {self.preserve_row_norms!r}.",
        )
        require(
            self.prompt_write is None or isinstance(self.prompt_write, PromptWrite),
            f"prompt_write must be a PromptWrite or nothing, got {self.prompt_write!r}.",
        )

    def check_with(self, config: Any) -> None:
        require(
            self.write_norm is None or config.clip is None,
            "write_norm gives every write one size, which leaves a clip nothing to bound; leave one of them "
            "out.",
        )
        require(
            not self.preserve_row_norms or config.whitening is None,
            "preserve_row_norms needs writes in the coordinates of W0, which whitening changes; leave one "
            "of them out.",
        )
        require(
            self.prompt_write is None or (config.conv == "next" and config.whitening is None),
            "prompt_write fits the next token's source to the keys of W0; use conv='next' without whitening.",
        )

    def state_rows(self, d: int, r: int) -> int:
        return d

    def wanting_whole_input(self) -> list[str]:
        return [name for name in self.options() if getattr(self, name)]

    def beyond_reference_format(self) -> list[str]:
        return (
            ["it norms neither writes nor rows"]
            if self.write_norm is not None or self.preserve_row_norms
            else []
        )

    def multiply_adds(self, d: int, r: int, chunk: int, forwards: int, *, in_one_product: bool) -> float:
        return (forwards + 3 if in_one_product else 2 * forwards + 5) * d * r


@dataclass(frozen=True)
class RidgeRule(Rule):
    """The ridge rule (extension). A layer keeps B = Σ V_jᵀZ_j above G = Σ Z_jᵀZ_j in one state [d + r, r].

    It reads M = B (G + λI)⁻¹.

    M minimizes Σ ‖V - ZMᵀ‖² + λ‖M‖² over all written tokens.

    Args:
        ridge: λ.
        write_gate: a learned gate weighs each token in both sums.
    """

    ridge: float
    write_gate: bool = False

    name: ClassVar[str] = "ridge"

    def check(self) -> None:
        require(self.ridge is not None, "update_rule='ridge' needs ridge, its λ.")
        require(
            is_number(self.ridge) and self.ridge > 0, f"ridge must be a number above 0, got {self.ridge!r}."
        )
        require_size("ridge", self.ridge)
        require(
            isinstance(self.write_gate, bool), f"write_gate must be true or false, got {self.write_gate!r}."
        )

    def check_with(self, config: Any) -> None:
        require(
            not self.write_gate or config.whitening is not None,
            "write_gate weighs tokens by their whitened keys; set whitening too, or leave write_gate out.",
        )

    def state_rows(self, d: int, r: int) -> int:
        return d + r

    def wanting_whole_input(self) -> list[str]:
        return ["ridge"]

    def beyond_reference_format(self) -> list[str]:
        return ["it lacks least squares"]

    def multiply_adds(self, d: int, r: int, chunk: int, forwards: int, *, in_one_product: bool) -> float:
        # The forward sums, factors, solves and reads. The backward repeats this, and computes the gradients.
        g = tokens_per_factor(chunk, r)
        sums, factor = (d + r) * r, r**3 / (6 * g)
        forward = sums + factor + r * r + d * r
        backward = sums + factor + d * r + 2 * r * r + 3 * d * r + 2 * r * r
        if g > chunk:  # the reads inside a stretch (ops/stretches.py)
            forward += g * r + g * g / 6 + 1.5 * g * d
            backward += 3.5 * g * r + g * g / 6 + 1.5 * g * d + d * r
        return forwards * forward + backward


def tokens_per_factor(chunk: int, r: int) -> int:
    """Returns the tokens of the chunks that read from one factor [r, r]: at most 512, and at most r / 2."""
    return max(min(512, r // 2) // chunk, 1) * chunk


PAPER_RULE = SumRule()
RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (SumRule, RidgeRule)}


def rule_of_config(config: Any, defaults: Any) -> Rule:
    """Returns the rule of a config.

    Args:
        config: an `InPlaceTTTConfig`.
        defaults: an object with the default of each field.

    Raises:
        InPlaceTTTError: if an option belongs to another rule, or settings contradict each other.
    """
    chosen = config.update_rule
    require(chosen in tuple(RULES), f"update_rule must be one of {tuple(RULES)}, got {chosen!r}.")
    for name, other in RULES.items():
        for option in other.options() if name != chosen else []:
            require(
                getattr(config, option) == getattr(defaults, option),
                f"{option} belongs to update_rule={name!r}, but the rule is {chosen!r}; set update_rule "
                f"too, or leave {option} out.",
            )
    rule = RULES[chosen](**{option: getattr(config, option) for option in RULES[chosen].options()})
    rule.check_with(config)
    return rule


def rule_of_text(text: str) -> Rule:
    """Returns the rule with this `text`."""
    name, values = json.loads(text)
    if values.get("prompt_write") is not None:
        values["prompt_write"] = PromptWrite(**values["prompt_write"])
    return RULES[name](**values)
