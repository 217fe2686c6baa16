"""The paper-deviation audit: probes what a checkpoint, a module or a recipe does, and holds it against the paper.

    report = audit_model(model)          # a converted model in memory
    report = audit_module(ReferenceMLP(mlp, chunk_size=64))   # somebody else's module, through an adapter
    print(report.undeclared, report.to_markdown())
"""

from .adapters import AuditedModule, MoshiGating, ReferenceMLP
from .catalogue import Item, catalogue
from .findings import Finding, NotChecked
from .report import Declaration, Report, Result
from .run import audit_model, audit_module

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
    "catalogue",
]
