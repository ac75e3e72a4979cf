"""What will bite when a model is run: checks of its folder and graph, each with what to do."""

from ortkv.doctor.finding import Finding, Level
from ortkv.doctor.report import diagnose, document, print_findings
from ortkv.doctor.subject import Subject, examine

__all__ = [
    "Finding",
    "Level",
    "Subject",
    "diagnose",
    "document",
    "examine",
    "print_findings",
]
