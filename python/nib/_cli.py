# SPDX-License-Identifier: Apache-2.0
"""What the commands of the package have in common: `python -m nib.NAME`."""
import argparse
import contextlib
import math
import os
import sys
import time


def shown(text):
    """What can be shown on a terminal: names in files may hold characters that control it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """With the defaults that say something."""

    def _get_help_string(self, action):
        if isinstance(action.default, list) and action.default:
            return f"{action.help} (default: {' '.join(action.default)})"
        return super()._get_help_string(action) if action.default else action.help


class Command:
    """Messages and arguments of one command."""

    def __init__(self, name):
        self.name = name

    def say(self, message):
        print(f"nib: {self.name}: {shown(message)}", file=sys.stderr, flush=True)

    def fail(self, message):
        """One line, and the status of wrong use and of input that cannot be used."""
        self.say(" ".join(str(message).split()))
        sys.exit(2)

    def parser(self, description):
        command = self

        class Parser(argparse.ArgumentParser):
            def error(self, message):
                command.fail(f"{message}; see python -m nib.{command.name} --help")

        return Parser(prog=f"python -m nib.{self.name}", description=description,
                      formatter_class=_Help)

    def directory(self, path):
        if not os.path.isdir(path):
            self.fail(f"{path}: no such directory")

    def file(self, path):
        """One that is read more than once, so that no pipe will do."""
        if not os.path.isfile(path):
            self.fail(f"{path}: {'no regular file' if os.path.exists(path) else 'no such file'}")

    def device(self, name):
        import torch
        try:
            found = torch.device(name)
        except RuntimeError:
            self.fail(f"--device {name}: PyTorch has no such device")
        if found.type == "cuda" and not torch.cuda.is_available():
            self.fail(f"--device {name}: there is no GPU that PyTorch can use")
        if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
            self.fail(f"--device {name}: the last GPU is cuda:{torch.cuda.device_count() - 1}")
        return found


def positive(text):
    with contextlib.suppress(ValueError):
        if (value := int(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f"takes a positive integer, not '{text}'")


def seed(text):
    with contextlib.suppress(ValueError):
        if 0 <= (value := int(text)) < 1 << 63:
            return value
    raise argparse.ArgumentTypeError(f"takes an integer from 0 to 2^63 - 1, not '{text}'")


def number(low, high=math.inf):
    """The type of a finite number within these."""
    def read(text):
        with contextlib.suppress(ValueError):
            if low <= (value := float(text)) <= high and math.isfinite(value):
                return value
        least = f"a number from {low} to {high}" if math.isfinite(high) else f"a number of at least {low}"
        raise argparse.ArgumentTypeError(f"takes {least}, not '{text}'")
    return read


class Progress:
    """A line of how much is done and how long the rest will take: rewritten on a terminal, now and then elsewhere."""

    def __init__(self, quiet=False):
        self.quiet, self.begin, self.told, self.terminal = quiet, time.monotonic(), 0.0, sys.stderr.isatty()

    def __call__(self, what, done, total):
        now = time.monotonic()
        if self.quiet or not (self.terminal or done == total or now - self.told > 10):
            return
        self.told, passed = now, now - self.begin
        line = f"{what} {done} of {total}, {passed:.0f} s, about {passed / done * (total - done):.0f} s left"
        end = "" if self.terminal and done < total else "\n"
        print(f"\r{line}\x1b[K" if self.terminal else line, end=end, file=sys.stderr, flush=True)
