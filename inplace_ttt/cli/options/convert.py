"""Arguments of `inplace-ttt convert SRC OUT`."""

from __future__ import annotations

import argparse
from typing import Any

from ...config import PRESETS, InPlaceTTTConfig
from ...errors import InPlaceTTTError
from ...files.settings import override
from ..arguments import MOST_TOKENS, add_push, add_texts, device, path, refuse_without_effect, whole

EXAMPLES = """examples:
  inplace-ttt convert HuggingFaceTB/SmolLM2-135M smollm2-ttt
  inplace-ttt convert ./qwen3-4b ./qwen3-4b-ttt --layers every:6 --chunk-size 1024 --eta 0.3
  inplace-ttt convert ./smollm2 ./smollm2-ridge --preset ridge --layers 12,18,24 \\
    --calibrate texts/ --set whitening.rank=256
  inplace-ttt convert ./smollm2 ./smollm2-gradient --preset gradient --calibrate texts/
  inplace-ttt convert ./llama ./llama-ttt --adapter-only --no-verify

exit code: 0 done, 1 the converted model differs from its base, 2 bad input"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", type=path, metavar="SRC", help="model folder or hub id")
    parser.add_argument("out", type=path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--preset",
        default="paper",
        metavar="PRESET",
        help=f"starting point: {', '.join(PRESETS)} (default: paper)",
    )
    parser.add_argument(
        "--layers",
        metavar="LAYERS",
        help="every:N, upper:N, or indices like 0,6,12 (default: the preset's; gradient chooses them)",
    )
    parser.add_argument(
        "--chunk-size", type=whole(), metavar="N", help="tokens per chunk (default: the preset's)"
    )
    parser.add_argument(
        "--eta",
        type=float,
        metavar="FLOAT",
        help="size of an update, η (default: the preset's; gradient chooses it)",
    )
    parser.add_argument(
        "--target",
        metavar="SOURCE",
        help="source of the targets: embeddings or hidden_states (default: the preset's)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting, such as kernel_size=3 or whitening.rank=256; repeatable",
    )
    add_texts(
        parser,
        "--calibrate",
        "texts for calibration, if the preset needs it (as ridge does)",
        required=False,
    )
    parser.add_argument(
        "--calibrate-tokens",
        type=whole(1, MOST_TOKENS),
        metavar="N",
        help="tokens of these texts to read (default: 32768)",
    )
    parser.add_argument(
        "--device",
        type=device,
        metavar="DEVICE",
        help="where to calibrate: cpu or cuda (default: a GPU if there is one)",
    )
    parser.add_argument(
        "--adapter-only", action="store_true", help="write only the new tensors, to load onto the base"
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="skip the comparison with the base, which loads both models"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    add_push(parser)
    parser.set_defaults(check=check)


def check(args: argparse.Namespace) -> None:
    refuse_without_effect(
        args, calibrate_tokens=("calibrate",), text_field=("calibrate",), device=("calibrate",)
    )
    chosen_config(args)


def chosen_config(args: argparse.Namespace) -> InPlaceTTTConfig:
    """Returns the preset with the given options.

    Raises:
        InPlaceTTTError: if an option is invalid or contradicts another.
    """
    options = {
        "chunk_size": args.chunk_size,
        "eta": args.eta,
        "target": args.target,
        "layers": _layers(args.layers),
    }
    given = {name: value for name, value in options.items() if value is not None}
    values = InPlaceTTTConfig.preset(args.preset, **given).to_dict()
    for text in args.set:
        if (name := text.partition("=")[0].strip()) in given:
            raise InPlaceTTTError(
                f"--{name.replace('_', '-')} does nothing next to --set {text}; leave one of the two out."
            )
        override(values, text)
    return InPlaceTTTConfig.from_dict(values)


def open_choices(args: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the fixed parts of a choice of layers and η, as arguments of `choose`.

    Returns None if the preset or the options fix both.
    """
    named = {text.partition("=")[0].strip() for text in args.set}
    config = chosen_config(args)
    is_given = {name: getattr(args, name) is not None or name in named for name in ("layers", "eta")}
    if args.preset != "gradient" or all(is_given.values()) or isinstance(config.eta, tuple):
        return None
    return ({"layers": [config.layers]} if is_given["layers"] else {}) | (
        {"etas": [config.eta]} if is_given["eta"] else {}
    )


def _layers(text: str | None) -> str | list[int] | None:
    if text is None or text.startswith(("every:", "upper:")):
        return text
    try:
        return [int(index) for index in text.split(",")]
    except ValueError:
        raise InPlaceTTTError(
            f"--layers must be every:N, upper:N or indices like 0,6,12, got {text!r}."
        ) from None
