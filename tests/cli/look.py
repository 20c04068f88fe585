#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Look at a report as its readers do, in a real browser: look.py REPORT.html REPORT.json [HOSTILE.html HOSTILE.json].

Wide and narrow, in the light and in the dark, on paper, with scripts and without. Every rule is also tried on a page that
is made to break it: a test that cannot fail says nothing.
"""
import base64
import hashlib
import json
import os
import re
import struct
import sys
import tempfile
import zlib

import browser

CHARTS = {"layers": 5, "scales": 8, "codes": 15}  # and the fewest marks that make sense
faults = []

# Text whose contrast with what is behind it is below 4.5:1, and marks below 3:1, as [ratio, what].
CONTRAST = r"""(() => {
    const parse = text => { const n = text.match(/[\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n };
    const over = (a, b) => a.slice(0, 3).map((v, i) => v * a[3] + b[i] * (1 - a[3]));
    const light = c => { const [r, g, b] = c.map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
                         return .2126 * r + .7152 * g + .0722 * b };
    const ratio = (a, b) => { const x = light(a), y = light(b); return (Math.max(x, y) + .05) / (Math.min(x, y) + .05) };
    const behind = e => { const all = []; for (; e; e = e.parentElement) all.unshift(parse(getComputedStyle(e).backgroundColor));
                          return all.reduce((under, c) => over(c, under), [255, 255, 255]) };
    const faint = e => { let o = 1; for (; e; e = e.parentElement) o *= getComputedStyle(e).opacity; return o };
    const out = [];
    let texts = 0, marks = 0;
    const test = (e, style, what, least, opacity) => {
        const svg = e.ownerSVGElement, c = parse(svg ? style.fill : style.color), under = behind(e);
        c[3] *= opacity;
        const r = ratio(over(c, under), under);
        if (r < least) out.push([r, what]);
    };
    const seen = e => e.getClientRects().length && getComputedStyle(e).visibility !== 'hidden' && !e.closest('title,desc,script,style');
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const e = walk.currentNode.parentElement;
        if (!walk.currentNode.data.trim() || !seen(e)) continue;
        texts++;
        test(e, getComputedStyle(e), walk.currentNode.data.trim().slice(0, 40), 4.5, faint(e));
    }
    for (const e of document.body.querySelectorAll('*'))
        for (const part of ['::before', '::after', '::placeholder']) {
            const style = getComputedStyle(e, part);
            if (!seen(e) || (part === '::placeholder' ? !e.placeholder : ['none', 'normal', '""'].includes(style.content))) continue;
            texts++;
            test(e, style, e.tagName + part, 4.5, style.opacity * faint(e));
        }
    for (const e of document.querySelectorAll('.mark:not(.bar0),.key')) {
        marks++;
        test(e, getComputedStyle(e), e.outerHTML.slice(0, 60), 3, 1);
    }
    return { texts, marks, out: out.slice(0, 8) };
})()"""


def fault(text):
    faults.append(text)
    print(f"FAILED {text}")


def too_wide(page, width):
    return page.run("document.documentElement.scrollWidth") > width


def pixels(path):
    """Rows of RGB triples of a PNG."""
    with open(path, "rb") as file:
        data = file.read()
    at, body = 8, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", data[at + 8:at + 18])
        if kind == b"IDAT":
            body += data[at + 8:at + 8 + length]
        at += 12 + length
    size = {2: 3, 6: 4}[color]
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


def colored(page, chart, folder):
    """Pixels of a chart that are neither grey nor nearly so."""
    path = os.path.join(folder, "chart.png")
    page.picture(path, page.run(f"""(() => {{ const r = document.getElementById('{chart}').getBoundingClientRect();
        return {{x: r.x + scrollX, y: r.y + scrollY, width: r.width, height: r.height, scale: 1}} }})()"""))
    return sum(max(p) - min(p) > 60 for row in pixels(path) for p in row)


def look_at_charts(b, path, folder):
    page = browser.Page(b, path, width=900)
    for chart, least in CHARTS.items():
        marks = page.run(f"document.querySelectorAll('#{chart} .mark').length")
        shown = colored(page, chart, folder)
        page.run("document.head.insertAdjacentHTML('beforeend', '<style id=bare>.mark{display:none}</style>')")
        empty = colored(page, chart, folder)
        page.run("document.getElementById('bare').remove()")
        print(f"{chart}: {marks} marks, {shown} colored pixels, {empty} without them")
        if marks < least or shown < 20 * least:
            fault(f"chart {chart} is empty: {marks} marks, {shown} colored pixels")
        if empty * 5 > shown:
            fault(f"chart {chart}: a picture without marks does not look empty")
        if not page.run(f"[...document.querySelectorAll('#{chart} .mark')].every(e => e.querySelector('title'))"):
            fault(f"chart {chart}: a mark does not say what it is")
    page.close()


def look_as(b, path, width, dark, printed=False):
    """One reader: nothing to scroll sideways, everything legible, nothing to say."""
    name = f"{os.path.basename(path)} at {width}{' dark' if dark else ''}{' printed' if printed else ''}"
    page = browser.Page(b, path, width=width, dark=dark, printed=printed)
    page.run("document.querySelectorAll('details').forEach((e, i) => { e.open = i < 6 || e.className })")
    if too_wide(page, width):
        fault(f"{name}: one has to scroll sideways")
    if width > 980 and page.run("Math.max(...[...document.querySelectorAll('#all th button')].map(e => e.offsetHeight))") > 30:
        fault(f"{name}: the words of the table's head are broken")
    found = page.run(CONTRAST)
    if found["out"] or found["texts"] < 100 or found["marks"] < 50:
        fault(f"{name}: contrast: {found}")
    for said in page.said():
        fault(f"{name}: it says {json.dumps(said)[:300]}")
    background = page.run("getComputedStyle(document.body).backgroundColor")
    if (background != "rgb(255, 255, 255)") != (dark and not printed):
        fault(f"{name}: the page is {background}")
    page.close()


def look_at_faults(b, path):
    """The same rules on a page that breaks them."""
    page = browser.Page(b, path, width=420)
    page.run("document.body.insertAdjacentHTML('beforeend', '<p style=\"color:#777\">pale</p><p>fine</p>')")
    found = page.run(CONTRAST)["out"]
    if [what for _, what in found] != ["pale"]:
        fault(f"pale text is not noticed: {found}")
    page.run("document.body.insertAdjacentHTML('beforeend', '<div style=\"width:421px\">wide</div>')")
    if not too_wide(page, 420):
        fault("a wide page is not noticed")
    page.run("console.log('x'); document.body.insertAdjacentHTML('beforeend', '<img src=\"https://example.org/x.png\">')")
    said = json.dumps(page.said())
    if "consoleAPI" not in said and '"x"' not in said or "Content Security Policy" not in said:
        fault(f"what a page says is not noticed: {said}")
    page.close()


def order_of(page):
    return page.run("[...document.querySelectorAll('#all tbody tr')].filter(r => !r.hidden).map(r => [...r.cells].map("
                    "c => c.hasAttribute('data-v') ? Number(c.dataset.v) : c.textContent))")


def look_at_table(b, path, names):
    page = browser.Page(b, path)
    before = order_of(page)
    if sorted(row[0] for row in before) != sorted(names):
        fault(f"{path}: the table has other weights")
    for column in range(len(before[0])):
        for press in ("ascending", "descending"):
            page.run(f"document.querySelectorAll('#all th button')[{column}].click()")
            values = [row[column] for row in order_of(page)]
            if values != sorted(values, reverse=press == "descending"):
                fault(f"column {column} is not {press}: {values[:5]}")
            if page.run(f"document.querySelectorAll('#all th')[{column}].getAttribute('aria-sort')") != press:
                fault(f"column {column} does not say that it is {press}")
    page.run("(() => { const o = document.querySelectorAll('.tools select')[1]; o.value = '0a'; "
             "o.dispatchEvent(new Event('change')) })()")
    if [row[0] for row in order_of(page)] != sorted(names):
        fault("the order that is chosen from the list is another one")
    if sorted(map(str, order_of(page))) != sorted(map(str, before)):
        fault("sorting lost rows")

    def filter_by(text, fate):
        page.run(f"""(() => {{ const t = document.querySelector('.tools input'), f = document.querySelector('.tools select');
            t.value = {json.dumps(text)}; t.dispatchEvent(new Event('input'));
            f.value = {json.dumps(fate)}; f.dispatchEvent(new Event('change')) }})()""")
        return [row[0] for row in order_of(page)], page.run("document.querySelector('.tools output').textContent")

    kept = [row[0] for row in before if str(row[1]).startswith("kept")]
    if not kept or sorted(filter_by("", "kept")[0]) != sorted(kept):
        fault("what was kept cannot be chosen")
    shown, count = filter_by("LAYERS.0 proj", "")
    wanted = [n for n in names if "layers.0" in n and "proj" in n]
    if sorted(shown) != sorted(wanted) or count != f"{len(wanted)} of {len(names)}":
        fault(f"filtered: {shown}, {count}")
    if filter_by("no such name", "") != ([], f"0 of {len(names)}"):
        fault("a name that nothing has is found")
    filter_by("", "")
    link = page.run("document.querySelector('#all a').getAttribute('href')")
    page.run(f"location.hash = {json.dumps(link)}; new Promise(done => setTimeout(done, 100))")
    if not page.run(f"document.querySelector('{link}').open"):
        fault("a link does not open the weight")
    if page.said():
        fault(f"the table says {page.said()}")
    page.close()


def look_at_many(b, path, folder):
    """A table of more rows than can be laid out at once: a part is shown, all are found, and without scripts all are there."""
    copy = os.path.join(folder, "many.html")
    with open(path, encoding="utf-8") as file:
        before, rows, after = re.fullmatch(r"(.*<table id=\"all\".*?<tbody>)(.*?)(</tbody>.*)", file.read(), re.S).groups()
    times = 1600 // rows.count("<tr") + 1
    n = times * rows.count("<tr")
    with open(copy, "w", encoding="utf-8") as file:
        file.write(before + rows * times + after)
    page = browser.Page(b, copy)
    pressed = []
    for button in (None, 0, 1):
        if button is not None:
            page.run(f"document.querySelectorAll('#all + .tools button')[{button}].click()")
        pressed.append((len(order_of(page)), page.run("document.querySelector('.tools output').textContent")))
    if pressed != [(500, f"{n} of {n}, 500 shown"), (1000, f"{n} of {n}, 1000 shown"), (n, f"{n} of {n}")]:
        fault(f"many rows: {pressed}")
    page.run("document.querySelectorAll('#all th button')[0].click()")
    page.run("(() => { const t = document.querySelector('.tools input'); t.value = 'embed_tokens'; t.dispatchEvent(new Event('input')) })()")
    if len(order_of(page)) != times or page.said():
        fault(f"many rows: {len(order_of(page))} have a name that {times} have; {page.said()}")
    page.close()
    page = browser.Page(b, copy, scripts=False)
    if page.run("[...document.querySelectorAll('#all tbody tr')].filter(r => r.getClientRects().length).length") != n:
        fault("many rows: not all of them are there without scripts")
    page.close()


def look_without_scripts(b, path, names):
    page = browser.Page(b, path, width=420, scripts=False)
    rows = page.run("[...document.querySelectorAll('#all tbody tr')].map(r => [r.cells[0].textContent, r.getClientRects().length])")
    if sorted(name for name, _ in rows) != sorted(names) or not all(shown for _, shown in rows):
        fault(f"{path}: {len(rows)} rows without scripts, not {len(names)}")
    if page.run("document.querySelectorAll('.tools, #all button').length"):
        fault("there are controls that cannot work without scripts")
    if too_wide(page, 420) or page.said():
        fault(f"without scripts: {page.said()}")
    page.close()


def look_at_hostile(b, path, names):
    page = browser.Page(b, path, width=420)
    found = page.run("({scripts: document.scripts.length, foreign: document.querySelectorAll('img,iframe,object,embed,base,form').length,"
                     "handlers: [...document.querySelectorAll('*')].flatMap(e => [...e.attributes]).filter(a => a.name.startsWith('on')).length,"
                     "hacked: typeof hacked, title: document.title})")
    if (found["scripts"], found["foreign"], found["handlers"], found["hacked"]) != (1, 0, 0, "undefined"):
        fault(f"{path}: a name became more than text: {found}")
    if sorted(row[0] for row in order_of(page)) != sorted(names):
        fault(f"{path}: names are not what they were")
    page.close()


def check_policy(path):
    with open(path, encoding="utf-8") as file:
        html = file.read()
    script = re.search(r"<script>(.*?)</script>\n</head>", html, re.S)[1]
    needed = "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    if f"script-src '{needed}'" not in html:
        fault(f"report_script_hash of tools/report_style.c must be {needed}")
    if "http" in html.replace("http-equiv", ""):
        fault("there is an address in the page")


def main():
    pages = list(zip(sys.argv[1::2], sys.argv[2::2]))
    names = {}
    for html, text in pages:
        with open(text, encoding="utf-8") as file:
            names[html] = [weight["name"] for weight in json.load(file)["weights"]]
    check_policy(pages[0][0])
    with browser.Browser(browser.find()) as b, tempfile.TemporaryDirectory() as folder:
        look_at_charts(b, pages[0][0], folder)
        look_at_faults(b, pages[0][0])
        look_at_table(b, pages[0][0], names[pages[0][0]])
        look_at_many(b, pages[0][0], folder)
        for html, _ in pages:
            for dark in (False, True):
                for width in (420, 700, 990, 1200) if html == pages[0][0] else (420, 990):
                    look_as(b, html, width, dark)
                look_as(b, html, 673, dark, printed=True)  # A4 with its margins
            look_without_scripts(b, html, names[html])
        for html, _ in pages[1:]:
            look_at_hostile(b, html, names[html])
    print(f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
