"""A plugin of Axolotl: `plugins: [inplace_ttt.clients.axolotl.InPlaceTTTPlugin]` in its YAML, and a section
`inplace_ttt`."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from .settings import ClientSettings, prepare, settings_of


class InPlaceTTTArgs(BaseModel):
    """What the plugin adds to Axolotl's own keys; `settings.ClientSettings` says what is in it."""

    inplace_ttt: dict[str, Any] | None = None

    @field_validator("inplace_ttt")
    @classmethod
    def _check(cls, values: dict[str, Any] | None) -> dict[str, Any] | None:
        settings_of(values)
        return values


class InPlaceTTTPlugin(BasePlugin):
    """Converts the model before any adapter, gives conv and P their rates, warms η up, and guards the run."""

    def get_input_args(self) -> str:
        return f"{__name__}.{InPlaceTTTArgs.__name__}"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        prepare(model, _settings(cfg).ttt)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Here and not in `create_optimizer`, which Axolotl 0.19 never calls; and callbacks that it is given
        later come after ours."""
        _settings(cfg).training.attach(trainer)


def _settings(cfg: Any) -> ClientSettings:
    section = cfg.inplace_ttt
    return settings_of(section.to_dict() if section is not None else None)
