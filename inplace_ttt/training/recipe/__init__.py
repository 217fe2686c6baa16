"""The recipe: its sections and their defaults, what it refuses, and what may change at a resume."""

from .recipe import Recipe, load_recipe

__all__ = ["Recipe", "load_recipe"]
