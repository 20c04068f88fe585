#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Look at a report in a real browser: look.py REPORT.html BROWSER. Fails when a chart is empty.

Every chart is shown alone and a picture of it taken. Axes, grids and text are grey; what is coloured are the marks. A
copy without marks, and one without the page's own style, show that an empty chart would be noticed.
"""
import os
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from html.parser import HTMLParser

PAGE, BROWSER = sys.argv[1], sys.argv[2]
CHARTS = {"layers": 5, "scales": 8, "codes": 15}  # and the fewest marks that make sense
faults = []


class Page(HTMLParser):
    """What the page is made of: marks by chart, ids, whatever would load something."""

    def __init__(self):
        super().__init__()
        self.chart, self.marks, self.outside, self.titled, self.described = None, {}, [], 0, 0

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "svg":
            self.chart = attrs.get("id")
        if attrs.get("class") == "mark":
            self.marks[self.chart] = self.marks.get(self.chart, 0) + 1
        if tag in ("script", "link", "img", "iframe", "object") or "src" in attrs or "href" in attrs:
            self.outside.append(tag)
        self.described += tag == "desc"


FIREFOX = "firefox" in os.path.basename(BROWSER)


def browse(*arguments):
    with tempfile.TemporaryDirectory() as profile:
        own = ["--headless", "--no-remote", "--profile", profile] if FIREFOX else \
            ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1",
             f"--user-data-dir={profile}"]
        done = subprocess.run([BROWSER, *own, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120,
                              check=False, env={**os.environ, "HOME": profile})
    if done.returncode:
        raise SystemExit(f"{BROWSER}: exit {done.returncode}\n{done.stderr.decode(errors='replace')}")
    return done.stdout.decode()


def photograph(page, picture):
    shot = ["--screenshot", picture] if FIREFOX else [f"--screenshot={picture}"]
    browse("--window-size=900,380", *shot, f"file://{page}")


def pixels(path):
    """Rows of RGB triples of a PNG."""
    with open(path, "rb") as file:
        data = file.read()
    at, body = 8, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", data[at + 8:at + 18])
        if kind == b"IDAT":
            body += data[at + 8:at + 8 + length]
        at += 12 + length
    size = {2: 3, 6: 4}[colour]
    assert depth == 8
    raw, before = zlib.decompress(body), bytearray(width * size)
    for row in range(height):
        start = row * (width * size + 1)
        rule, line = raw[start], bytearray(raw[start + 1:start + 1 + width * size])
        for i in range(len(line)):
            left = line[i - size] if i >= size else 0
            up, corner = before[i], before[i - size] if i >= size else 0
            if rule == 1:
                line[i] = (line[i] + left) & 255
            elif rule == 2:
                line[i] = (line[i] + up) & 255
            elif rule == 3:
                line[i] = (line[i] + (left + up) // 2) & 255
            elif rule == 4:
                p = left + up - corner
                nearest = min((abs(p - left), 0, left), (abs(p - up), 1, up), (abs(p - corner), 2, corner))[2]
                line[i] = (line[i] + nearest) & 255
        before = line
        yield [line[i:i + 3] for i in range(0, len(line), size)]


def coloured(html, chart, folder):
    """Pixels of a chart that are neither grey nor nearly so, and those that are not white."""
    alone = f"<style>body>*{{display:none!important}}body>figure:has(#{chart}){{display:block!important}}" \
            ".legend,figcaption{display:none!important}body{margin:0!important}</style></head>"
    page, picture = os.path.join(folder, "page.html"), os.path.join(folder, "page.png")
    with open(page, "w", encoding="utf-8") as file:
        file.write(html.replace("</head>", alone))
    photograph(page, picture)
    drawn = colours = 0
    for row in pixels(picture):
        for r, g, b in row:
            drawn += min(r, g, b) < 250
            colours += max(r, g, b) - min(r, g, b) > 60
    return colours, drawn


def main():
    with open(PAGE, encoding="utf-8") as file:
        html = file.read()
    dom = Page()
    # Firefox gives pictures only; there is no script that could have changed the page.
    dom.feed(html if FIREFOX else browse("--dump-dom", f"file://{os.path.abspath(PAGE)}"))
    if dom.outside or "http" in html.replace("http://www.w3.org", ""):
        faults.append(f"the page would load something: {dom.outside}")
    if dom.described != len(CHARTS):
        faults.append(f"{dom.described} descriptions for {len(CHARTS)} charts")
    bare = re.sub(r'<(rect|circle|path)( class="mark".*?)</\1>', "", html, flags=re.S)
    with tempfile.TemporaryDirectory() as folder:
        for chart, least in CHARTS.items():
            if dom.marks.get(chart, 0) < least:
                faults.append(f"chart {chart}: {dom.marks.get(chart, 0)} marks")
            colours, drawn = coloured(html, chart, folder)
            empty, frame = coloured(bare, chart, folder)
            print(f"{chart}: {dom.marks.get(chart, 0)} marks, {colours} coloured pixels of {drawn}; without them {empty} of {frame}")
            if colours < 20 * least:
                faults.append(f"chart {chart} is empty: {colours} coloured pixels")
            if empty * 5 > colours or frame < 500:
                faults.append(f"chart {chart}: a picture without marks does not look empty, or nothing is drawn at all")
    for fault in faults:
        print(f"FAILED {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
