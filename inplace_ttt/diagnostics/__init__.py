"""Measures the gradients and writes of a converted model, and finds faults by ablation.

    diagnosis = diagnose(model, {"input_ids": ids})  # a converted model in memory
    print(diagnosis.findings, write_report(diagnosis, "folder"))

Parameters with `requires_grad` count as trained.
"""

from .diagnosis import Diagnosis, diagnose
from .report import write_report

__all__ = ["Diagnosis", "diagnose", "write_report"]
