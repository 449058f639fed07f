"""Labs: a textbook claim, the code that measures it on the real parts, and a verdict computed from the numbers."""

from bagu.lab.report import write_report
from bagu.lab.run import list_labs, run_labs

__all__ = ["list_labs", "run_labs", "write_report"]
