"""A plugin for Axolotl.

Axolotl's YAML names it with `plugins: [inplace_ttt.clients.axolotl.InPlaceTTTPlugin]`. Its settings are in
the section `inplace_ttt`.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from .settings import ClientSettings, prepare, settings_of


class InPlaceTTTArgs(BaseModel):
    """The key that the plugin adds to Axolotl's own; `settings.ClientSettings` is its schema."""

    inplace_ttt: dict[str, Any] | None = None

    @field_validator("inplace_ttt")
    @classmethod
    def _check(cls, values: dict[str, Any] | None) -> dict[str, Any] | None:
        settings_of(values)
        return values


class InPlaceTTTPlugin(BasePlugin):
    """Converts the model before any adapter is added, and prepares its training.

    It gives conv and P their learning rates, warms η up, and adds the checks of `InPlaceTTTCallback`. Axolotl
    makes the plugin and calls its methods; docs/clients.md has a whole configuration.

    Examples:
        Axolotl's YAML then has these lines:

            plugins: [inplace_ttt.clients.axolotl.InPlaceTTTPlugin]
            inplace_ttt:
              ttt: {layers: every:6, chunk_size: 64}
              training: {conv_learning_rate: 1.0e-3, proj_learning_rate: 1.0e-3, eta_warmup_steps: 2}
    """

    def get_input_args(self) -> str:
        """Names the schema of the section `inplace_ttt`.

        Returns:
            The path of `InPlaceTTTArgs`.
        """
        return f"{__name__}.{InPlaceTTTArgs.__name__}"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Converts the model, unless it is converted already.

        Args:
            cfg: Axolotl's configuration.
            model: the loaded model.

        Raises:
            InPlaceTTTError: if the settings are missing, do not apply, or need calibration.
        """
        prepare(model, _settings(cfg).ttt)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Attaches the training settings to the trainer.

        It does so here because Axolotl 0.19 never calls `create_optimizer`. Callbacks that Axolotl adds later
        run after ours.

        Args:
            cfg: Axolotl's configuration.
            trainer: the trainer, before it trains.

        Raises:
            InPlaceTTTError: if `InPlaceTTTCallback.attach` raises it.
        """
        _settings(cfg).training.attach(trainer)


def _settings(cfg: Any) -> ClientSettings:
    section = cfg.inplace_ttt
    return settings_of(section.to_dict() if section is not None else None)
