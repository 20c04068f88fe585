#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""hostile.py DIRECTORY: a checkpoint whose tensors have the names that nobody should have to expect. Prints the names of
its modules as a JSON array."""
import json
import os
import random
import struct
import sys

NAMES = [
    "model.layers.0.<img src=x onerror=hacked()>",
    "model.layers.1.\"><script>hacked()</script>",
    "model.layers.2.</script><script>hacked()</script>",
    "model.layers.3.' onmouseover='hacked()",
    "model.layers.4.</title></style><svg onload=hacked()>",
    "model.layers.5.&amp;&lt;&#60;",
    "model.layers.6.]]><!-- {}",
    "model.layers.7.\u202ejorp_q\u202c\u2028\u2029",
    "model.layers.8.\u00e4\u6a21\u578b\U0001f600",
    "model.layers.9.`${hacked()}`\\",
    "__proto__",
    "constructor",
    "model.layers.10." + "unbroken" * 25,
    "model.layers.11.x" + "\u6a21" * 120,
    "re:.*",
    "%s%n%d",
]


def main():
    random.seed(1)
    os.makedirs(sys.argv[1])
    header, data = {}, b""
    for name in NAMES:
        values = struct.pack("<1024f", *(random.gauss(0, 0.02) for _ in range(1024)))
        header[f"{name}.weight"] = {"dtype": "F32", "shape": [16, 64], "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    with open(os.path.join(sys.argv[1], "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    with open(os.path.join(sys.argv[1], "config.json"), "w", encoding="utf-8") as file:
        json.dump({"model_type": "</p><script>hacked()</script>"}, file)
    print(json.dumps(NAMES))


if __name__ == "__main__":
    main()
