"""Prints a Markdown table: bytes of state per sequence for three presets, beside the bytes of the KV cache.

    python tools/release/state_sizes.py

docs/choose.md holds the output. The layers are the defaults of each preset. The state is float32, and the KV
cache is bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

from inplace_ttt.config import InPlaceTTTConfig

PRESETS = ("paper", "ridge", "gradient")
LENGTHS = (8_192, 131_072)
KV_BYTES = 2
"""Bytes of one number of the KV cache, in bfloat16."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that state and KV cache depend on, under the names of its config.json.

    Attributes:
        sliding_window: tokens that a sliding layer attends to; None if all layers see the whole text.
        sliding_window_pattern: every so-many-th layer sees the whole text, and the others slide.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int | None = None
    sliding_window_pattern: int = 1

    @property
    def full_layers(self) -> int:
        """The number of layers whose KV cache grows with the text."""
        return self.num_hidden_layers // self.sliding_window_pattern

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one more token adds to the KV cache of a text longer than the sliding window."""
        return self.full_layers * self._kv_bytes_per_layer

    def kv_bytes(self, tokens: int) -> int:
        """Returns the bytes of the KV cache of a text; sliding layers keep the tokens of their window."""
        sliding = self.num_hidden_layers - self.full_layers
        kept = min(tokens, self.sliding_window or tokens)
        return self._kv_bytes_per_layer * (self.full_layers * tokens + sliding * kept)

    def state_bytes(self, preset: str) -> int:
        """Returns the bytes of state per sequence, with the preset's own layers."""
        config = InPlaceTTTConfig.preset(preset).resolve(self.num_hidden_layers)
        return config.state_bytes([(self.hidden_size, self.intermediate_size)] * len(config.layers))

    @property
    def _kv_bytes_per_layer(self) -> int:
        return 2 * KV_BYTES * self.num_key_value_heads * self.head_dim


# From the public config.json of each model.
MODELS = {
    "Qwen3 0.6B": Shape(1024, 3072, 28, 8, 128),
    "Qwen3 1.7B": Shape(2048, 6144, 28, 8, 128),
    "Qwen3 4B": Shape(2560, 9728, 36, 8, 128),
    "Qwen3 8B": Shape(4096, 12288, 36, 8, 128),
    "Qwen3 14B": Shape(5120, 17408, 40, 8, 128),
    "Qwen3 32B": Shape(5120, 25600, 64, 8, 128),
    "Llama 3.1 8B": Shape(4096, 14336, 32, 8, 128),
    "Llama 3.1 70B": Shape(8192, 28672, 80, 8, 128),
    "Gemma 3 270M": Shape(640, 2048, 18, 1, 256, 512, 6),
    "Gemma 3 1B": Shape(1152, 6912, 26, 1, 256, 512, 6),
    "Gemma 3 4B": Shape(2560, 10240, 34, 4, 256, 1024, 6),
    "Gemma 3 12B": Shape(3840, 15360, 48, 8, 256, 1024, 6),
    "Gemma 3 27B": Shape(5376, 21504, 62, 16, 128, 1024, 6),
}


def readable(count: int) -> str:
    """Returns bytes with three digits, in KB, MB or GB (powers of 1,000)."""
    unit, size = next((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if count >= size)
    value = count / size
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def table() -> str:
    """Returns the Markdown table, without a newline at its end."""
    columns = [f"`{preset}`" for preset in PRESETS]
    columns += ["KV cache, per token", *(f"KV cache, {length:,} tokens" for length in LENGTHS)]
    lines = [f"| model | {' | '.join(columns)} |", "|" + "---|" * (1 + len(columns))]
    for name, shape in MODELS.items():
        counts = [shape.state_bytes(preset) for preset in PRESETS]
        counts += [shape.kv_bytes_per_token, *map(shape.kv_bytes, LENGTHS)]
        lines.append(f"| {name} | {' | '.join(map(readable, counts))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
