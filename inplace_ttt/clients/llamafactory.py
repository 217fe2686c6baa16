"""Trains a converted folder with LLaMA-Factory: `python -m inplace_ttt.clients.llamafactory FILE.yaml`.

The YAML is LLaMA-Factory's own, with a section `inplace_ttt`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from llamafactory.hparams import read_args
from llamafactory.train.pt import workflow as pretraining
from llamafactory.train.sft import workflow as finetuning
from llamafactory.train.tuner import run_exp

from ..errors import InPlaceTTTError
from ..training.loop.callback import InPlaceTTTCallback
from .settings import settings_of


def run(config: Mapping[str, Any]) -> None:
    """Trains as `llamafactory-cli train` does, with the settings of a section `inplace_ttt`.

    Rates and decays hold in the stages `pt` and `sft`. Other stages refuse them.

    Args:
        config: LLaMA-Factory's settings. In the section `inplace_ttt`, `training` has the settings of
            `InPlaceTTTCallback`.

    Raises:
        InPlaceTTTError: if a setting of the section is invalid or without effect, the model is not converted,
            or packed rows would not show their documents. Also as `InPlaceTTTCallback.attach`.

    Examples:
        LLaMA-Factory's YAML then has these lines:

            inplace_ttt:
              training: {conv_learning_rate: 1.0e-3, proj_learning_rate: 1.0e-3, eta_warmup_steps: 2}
    """
    values = {**config}
    settings = settings_of(values.pop("inplace_ttt", None))
    if settings.ttt is not None:
        raise InPlaceTTTError(
            "inplace_ttt.ttt: LLaMA-Factory trains converted folders alone; run `inplace-ttt convert MODEL "
            "OUT` with these settings, give OUT as model_name_or_path, and remove inplace_ttt.ttt."
        )
    _refuse_joined_documents(values)
    callback = settings.training
    for workflow, name in ((pretraining, "CustomTrainer"), (finetuning, "CustomSeq2SeqTrainer")):
        setattr(workflow, name, _attaching(getattr(workflow, name), callback))
    # a trainer of another stage runs the callback too, which refuses what only `attach` can do
    run_exp(values, callbacks=[callback])


def _attaching(kind: Any, callback: InPlaceTTTCallback) -> Any:
    """Returns a function that makes a trainer and attaches the callback to it."""

    def make(**options: Any) -> Any:
        trainer = kind(**options)
        trainer.remove_callback(callback)  # `attach` adds it again
        callback.attach(trainer)
        return trainer

    return make


def _refuse_joined_documents(values: Mapping[str, Any]) -> None:
    """Raises InPlaceTTTError if LLaMA-Factory would join documents in rows that do not show where each
    begins."""
    packing = values.get("packing")
    if packing is None:
        packing = values.get("stage") == "pt"
    if packing and not values.get("neat_packing"):
        raise InPlaceTTTError(
            "packing joins documents in rows that do not show where each begins, so that one would be read "
            "with the fast weights of another; set packing: false (stage pt packs without it), or in stage "
            "sft neat_packing: true."
        )


def main() -> None:
    """Reads the configuration that the command line names, as LLaMA-Factory does, and trains."""
    config = read_args()
    if not isinstance(config, Mapping):
        sys.exit("error: give LLaMA-Factory's YAML or JSON file first, then settings as key=value.")
    try:
        run(config)
    except InPlaceTTTError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
