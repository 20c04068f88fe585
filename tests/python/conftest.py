# SPDX-License-Identifier: Apache-2.0
"""The tests of the Python package: pytest tests/python, with nib installed. They end in the closing line that
tests/run.py counts, after the reasons of what was skipped."""
import os
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
counts = {"passed": 0, "failed": 0, "skipped": 0}
reasons = set()


STATE = ("fp8_enabled", "fp8_calibration", "fp8_recipe", "fp8_distributed_group", "fp8_parameters",
         "high_precision_init_val", "fp8_graph_capturing", "autocast_depth")


def what_is_on():
    """What others would run in, if a test left it: an autocast or quantized_model_init, torch's modes and group."""
    if "nib.torch" not in sys.modules:
        return {}
    import torch
    from nib.torch.quantization import current
    return {**{name: getattr(current(), name) for name in STATE}, "grad": torch.is_grad_enabled(),
            "dtype": torch.get_default_dtype(),
            "group": torch.distributed.is_available() and torch.distributed.is_initialized()}


@pytest.fixture(autouse=True)
def nothing_stays_on():
    before = what_is_on()
    yield
    assert not before or what_is_on() == before


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
