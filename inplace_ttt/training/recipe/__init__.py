"""The recipe: its sections, defaults and checks, and the settings that may change at a resume."""

from .recipe import Recipe, load_recipe

__all__ = ["Recipe", "load_recipe"]
