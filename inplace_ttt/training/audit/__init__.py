"""The audit of a training run: the items of its recipe, and the gate before the first step.

report = audit_recipe("run.yaml")
"""

from .gate import audit_recipe, audited, gate, write_report

__all__ = ["audit_recipe", "audited", "gate", "write_report"]
