"""What writes and gradients do, measured; and what is wrong with them, found by ablation.

diagnosis = diagnose(model, {"input_ids": ids})     # a converted model in memory; what requires a gradient
counts as trained print(diagnosis.findings, write_report(diagnosis, "folder"))
"""

from .diagnosis import Diagnosis, diagnose
from .report import write_report

__all__ = ["Diagnosis", "diagnose", "write_report"]
