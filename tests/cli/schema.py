#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""schema.py NAME=FILE...: whether reports are what docs/json.md says, each NAME a table there. Nothing may be missing,
nothing may be there that is not documented, types must be right, and every table must have been met in full by the end."""
import json
import re
import sys

TYPES = {
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "any": lambda v: True,
}


def read_tables(path):
    tables, name = {}, None
    with open(path, encoding="utf-8") as file:
        for line in file:
            heading = re.fullmatch(r"### (\w+)\n", line)
            row = re.fullmatch(r"\| `(\w+)`( \?)? \| ([^|]+?) \|.*\|\n", line)
            if heading:
                name = heading[1]
                tables[name] = {}
            elif row:
                assert row[1] not in tables[name], f"{name}.{row[1]} comes twice"
                tables[name][row[1]] = (row[3], row[2] is None)
    return tables


class Checker:
    def __init__(self, tables):
        self.tables, self.faults, self.seen = tables, [], set()

    def fits(self, kind, value, where):
        """Whether a value has a type; objects and arrays look for their own faults."""
        if kind.startswith("array of "):
            if not isinstance(value, list):
                return False
            for i, item in enumerate(value):
                if not self.fits(kind[9:], item, f"{where}[{i}]"):
                    self.faults.append(f"{where}[{i}] is not {kind[9:]}: {item!r:.80}")
            return True
        if kind.isupper():
            if not isinstance(value, dict):
                return False
            self.check([kind.lower()], value, where)
            return True
        return TYPES[kind](value)

    def check(self, names, value, where):
        fields = {}
        for name in names:
            fields.update({key: (*rest, name) for key, rest in self.tables[name].items()})
        for key in value:
            if key not in fields:
                self.faults.append(f"{where}.{key} is not in docs/json.md")
        for key, (kind, needed, table) in fields.items():
            if key not in value:
                if needed:
                    self.faults.append(f"{where}.{key} is missing")
                continue
            self.seen.add((table, key))
            if not any(self.fits(one, value[key], f"{where}.{key}") for one in kind.split(" or ")):
                self.faults.append(f"{where}.{key} is not {kind}: {value[key]!r:.80}")


def no_constant(text):
    raise ValueError(f"{text} is not JSON")


def no_repeats(pairs):
    if len(dict(pairs)) != len(pairs):
        raise ValueError(f"a key comes twice among {[key for key, _ in pairs]}")
    return dict(pairs)


def main():
    checker = Checker(read_tables("docs/json.md"))
    for argument in sys.argv[1:]:
        name, path = argument.split("=", 1)
        with open(path, "rb") as file:
            data = file.read()
        try:
            value = json.loads(data.decode("utf-8"), parse_constant=no_constant, object_pairs_hook=no_repeats)
        except ValueError as error:
            checker.faults.append(f"{argument}: {error}")
            continue
        checker.check(["head", name], value, name)
        if value["command"] != name and name != "plan" or value["schema"] != 1:
            checker.faults.append(f"{name}: command {value['command']}, schema {value['schema']}")
    for name, fields in checker.tables.items():
        for key in fields:
            if (name, key) not in checker.seen:
                checker.faults.append(f"no report had {name}.{key}")
    for fault in checker.faults[:20]:
        print(f"FAILED: {fault}")
    return bool(checker.faults)


if __name__ == "__main__":
    sys.exit(main())
