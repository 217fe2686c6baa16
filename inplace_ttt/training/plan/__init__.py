"""Estimates the memory and operations of a run before it starts."""

from .plan import make_plan

__all__ = ["make_plan"]
