# SPDX-License-Identifier: Apache-2.0
"""The tests of the Python package: pytest tests/python, with nib installed. They end in the closing line that
tests/run.py counts, after the reasons of what was skipped."""
import os

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
counts = {"passed": 0, "failed": 0, "skipped": 0}
reasons = set()


def note(report):
    if report.skipped:
        counts["skipped"] += 1
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons.add(reason.removeprefix("Skipped: "))
    elif report.failed:
        counts["failed"] += 1
    elif report.when == "call":
        counts["passed"] += 1


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:
        note(report)


def pytest_collectreport(report):
    if not report.passed:
        note(report)


def pytest_unconfigure(config):
    if hasattr(config, "workerinput"):
        return
    print()
    for reason in sorted(reasons):
        print(f"skipped: {reason}")
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
