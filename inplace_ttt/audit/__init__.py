"""The paper-deviation audit: probes what a checkpoint, a module or a recipe does, and holds it against the paper.

report = audit_model(model)          # a converted model in memory
report = audit_module(ReferenceMLP(mlp, chunk_size=64))   # somebody else's module, through an adapter
print(report.undeclared, report.to_markdown())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .adapters import AuditedModule, MoshiGating, ReferenceMLP
from .catalogue import Item, catalogue
from .findings import Finding, NotChecked
from .report import Declaration, Report, Result
from .run import audit_model, audit_module

if TYPE_CHECKING:
    from .recipes import audit_recipe, gate

__all__ = [
    "AuditedModule",
    "Declaration",
    "Finding",
    "Item",
    "MoshiGating",
    "NotChecked",
    "ReferenceMLP",
    "Report",
    "Result",
    "audit_model",
    "audit_module",
    "audit_recipe",
    "catalogue",
    "gate",
]


def __getattr__(name: str) -> Any:
    """What needs training recipes, imported when it is asked for."""
    if name in ("audit_recipe", "gate"):
        from . import recipes

        return getattr(recipes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
