"""The paper-deviation audit: measures a checkpoint, a module or a recipe and compares it with the paper.

    report = audit_model(model)          # a converted model in memory
    report = audit_module(ReferenceMLP(mlp, chunk_size=64))   # a third-party module, through an adapter
    print(report.undeclared, report.to_markdown())

`inplace_ttt.training.audit` audits a training recipe.
"""

from .adapters import AuditedModule
from .auditor import audit_model, audit_module
from .catalog import catalog
from .copied import ReferenceMLP
from .item import Item
from .outcome import NotChecked, Outcome
from .report import Declaration, Report, Result

__all__ = [
    "AuditedModule",
    "Declaration",
    "Item",
    "NotChecked",
    "Outcome",
    "ReferenceMLP",
    "Report",
    "Result",
    "audit_model",
    "audit_module",
    "catalog",
]
