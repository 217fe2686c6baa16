"""Joins the trainers of ms-swift.

A file of two lines, which ms-swift's `external_plugins` names, calls `register`.
"""

from __future__ import annotations

from typing import Any

from swift.model.model_meta import MODEL_MAPPING
from swift.trainers import TrainerFactory

from ..converted_config import converted_name
from .settings import settings_of


def register(**training: Any) -> None:
    """Lets ms-swift train converted folders: `swift pt`, `swift sft` and `swift rlhf`.

    A converted folder then has the model types of its base, so that ms-swift finds the same templates. Every
    trainer that ms-swift makes gets an `InPlaceTTTCallback`. It refuses a model that is not converted.

    Args:
        training: settings of `InPlaceTTTCallback`.

    Raises:
        InPlaceTTTError: if a setting is unknown or invalid. Later, when ms-swift makes its trainer, as
            `InPlaceTTTCallback.attach`.

    Examples:
        The file that `external_plugins` names then has these lines:

            from inplace_ttt.clients.swift import register

            register(conv_learning_rate=1e-3, proj_learning_rate=1e-3, eta_warmup_steps=2)
    """
    callback = settings_of({"training": training}).training
    for meta in MODEL_MAPPING.values():
        meta.architectures += [converted_name(name) for name in meta.architectures]
    of_swift = TrainerFactory.get_trainer_cls

    def get_trainer_cls(args: Any) -> Any:
        kind = of_swift(args)

        def make(*given: Any, **options: Any) -> Any:
            trainer = kind(*given, **options)
            callback.attach(trainer)
            return trainer

        return make

    TrainerFactory.get_trainer_cls = get_trainer_cls
