"""Memory and speed of a run, counted before it starts."""

from .plan import make_plan

__all__ = ["make_plan"]
