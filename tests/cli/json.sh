#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Reports in JSON are what docs/json.md says: field by field, with hostile names, and where values are not finite.
. tests/cli/expect.bash
NIB=${NIB:?the path of the tool}
reports=()

# report STATUS NAME COMMAND...: what a command prints, a report by the table NAME.
report() {
    local expected=$1 name=$2 status=0 file=$work/report${#reports[@]}
    shift 2
    "$@" >"$file" 2>"$work/err" </dev/null || status=$?
    [ "$status" = "$expected" ] || fail "$*: exit $status, not $expected: $(head -3 "$work/err")"
    [ "$expected" = 2 ] || reports+=("$name=$file")
    [ "$expected" != 2 ] || [ ! -s "$file" ] || fail "$*: it failed and printed something"
}

python3 tests/cli/hostile.py "$work/in" >/dev/null || exit 1
report 0 plan "$NIB" quantize --json --dry-run "$work/in" "$work/none"
report 0 plan "$NIB" quantize --json --report "$work/q.json" "$work/in" "$work/q"
report 0 plan "$NIB" quantize --json --scheme nvfp4 --ignore 're:.*\.0' --report "$work/k.json" "$work/in" "$work/k"
report 0 plan "$NIB" convert --json --format modelopt "$work/q" "$work/mo"
report 0 plan "$NIB" dequantize --json "$work/q" "$work/plain"
report 0 check "$NIB" check --json "$work/q"
report 0 check "$NIB" check --json --against "$work/in" "$work/q"
report 0 compare "$NIB" compare --json "$work/in" "$work/q" --report "$work/c.json"
report 0 compare "$NIB" compare --json --top 0 "$work/q" "$work/q"
report 0 compare "$NIB" compare --json "$work/k" "$work/q"
report 0 inspect "$NIB" inspect --json "$work/in"
report 0 inspect "$NIB" inspect --json "$work/k"
report 0 inspect "$NIB" inspect --json --quick "$work/q"
reports+=("report=$work/q.json" "report=$work/k.json" "report=$work/c.json")
# The table for people says the same.
"$NIB" inspect --json "$work/k" >"$work/inspected.json" 2>"$work/err" && "$NIB" inspect "$work/k" >"$work/inspected" 2>"$work/err" || fail "inspect"
python3 - "$work/inspected.json" "$work/inspected" <<'EOP' || fail "the table of nib inspect is not its report"
import json, sys
shares = ["%.1f%% %.2f%%" % (100 * w["zero_codes"], 100 * w["small_scales"])
          for w in json.load(open(sys.argv[1]))["weights"] if w.get("zero_codes") is not None]
lines = [" ".join(line.split()) for line in open(sys.argv[2], errors="replace") if line.count("%") >= 2]
assert shares and len(lines) == len(shares), (len(lines), len(shares))
assert all(share in line for share, line in zip(shares, lines)), list(zip(shares, lines))[:3]
EOP
"$NIB" compare --json "$work/in" "$work/q" >"$work/compared.json" 2>"$work/err" && "$NIB" compare "$work/in" "$work/q" >"$work/compared" 2>"$work/err" || fail "compare"
python3 - "$work/compared.json" "$work/compared" <<'EOP' || fail "the table of nib compare is not its report"
import json, sys
worst = json.load(open(sys.argv[1]))["worst"]
lines = [line.split() for line in open(sys.argv[2], errors="replace")][1:]
rows = [["%.2f" % w["sqnr_db"], "%.5f" % w["relative_l2"], "%.5g" % w["max_error"], "%.2f%%" % (100 * w["zeroed"] / w["elements"]),
         "%.3f%%" % (100 * w["clipped"] / w["elements"]), "%.2f%%" % (100 * w["underflowed_blocks"] / w["blocks"])] for w in worst]
assert rows and [line[:6] for line in lines[:len(rows)]] == rows, (lines[:2], rows[:2])
EOP
"$NIB" compare "$work/q" "$work/q" >"$work/compared" 2>"$work/err" || fail "compare"
grep -q same "$work/compared" || fail "what is the same is not called so: $(cat "$work/compared")"
# A report that cannot be put in its place leaves nothing.
mkdir "$work/page.html"
"$NIB" compare -q --report "$work/page.html" "$work/in" "$work/q" >"$work/out" 2>"$work/err" && fail "a report over a directory"
grep -q "cannot write the report .*page.html: Is a directory" "$work/err" || fail "a report over a directory: $(cat "$work/err")"
[ "$(find "$work" -name 'page.html?*')" = "" ] || fail "what was to be the report is left"

# A path that is not UTF-8, scales that are not finite, a finding, a weight that cannot be read.
cp -r "$work/k" "$work/b"$'\xff\x01'"d"
report 0 inspect "$NIB" inspect --json "$work/b"$'\xff\x01'"d"
report 0 check "$NIB" check --json "$work/b"$'\xff\x01'"d"
report 0 plan "$NIB" dequantize --json --dry-run "$work/in" "$work/o"$'\xfe'
"$NIB" compare -q "$work/in" "$work/b"$'\xff\x01'"d" --report "$work/path.html" >/dev/null || fail "no page"
# Names with all that a terminal obeys, and paths: reports are UTF-8 without control characters, and say the names.
python3 - "$work/control.safetensors" <<'EOP'
import json, struct, sys
names = ["a.\u009b2J.\x7f.\x1b[2J.\xa0\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff.weight", "b.\x80.\x9f\x9f.weight"]
header = json.dumps({name: {"dtype": "F32", "shape": [1, 16], "data_offsets": [64 * i, 64 * i + 64]} for i, name in enumerate(names)})
open(sys.argv[1], "wb").write(struct.pack("<Q", len(header)) + header.encode() + struct.pack("<32f", *range(32)))
EOP
report 0 inspect "$NIB" inspect --json "$work/control.safetensors"
cp "${reports[-1]#*=}" "$work/control.json"
report 0 plan "$NIB" quantize --json "$work/control.safetensors" "$work/controlled" --report "$work/controlled.json"
cp "${reports[-1]#*=}" "$work/plan.json"
"$NIB" compare -q "$work/control.safetensors" "$work/controlled" --report "$work/controlled.html" >/dev/null || fail "no page"
python3 - "$work" <<'EOP' || fail "control characters, or names without them"
import html, json, sys
texts = {name: open(f"{sys.argv[1]}/{name}", "rb").read().decode() for name in
         ("control.json", "plan.json", "controlled.json", "controlled.html", "path.html")}
for name, text in texts.items():
    wrong = [c for c in text if (c < " " and c != "\n") or "\x7f" <= c < "\xa0"]
    assert not wrong, (name, wrong[:3])
name = json.loads(texts["control.json"])["weights"][0]["name"]
assert name == "a.\u009b2J.\x7f.\x1b[2J.\xa0\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff", ascii(name)
assert name in (row["name"] for row in json.loads(texts["plan.json"])["rows"])
assert name in (row["name"] for row in json.loads(texts["controlled.json"])["weights"])
page = html.unescape(texts["controlled.html"]).replace("<wbr>", "")
assert "a.??2J.?.?[2J.\xa0\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff<" in page
assert "b??d" in texts["path.html"]
EOP
cp -r "$work/k" "$work/bad"
python3 - "$work/bad/model.safetensors" <<'EOP'
import json, struct, sys
data = bytearray(open(sys.argv[1], "rb").read())
size = struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8:8 + size])
for suffix, value in ((".weight_global_scale", float("nan")), (".input_global_scale", float("inf"))):
    for name in header:
        if name.endswith(suffix):
            struct.pack_into("<f", data, 8 + size + header[name]["data_offsets"][0], value)
for name in list(header)[:40]:
    if name.endswith(".weight_scale"):
        data[8 + size + header[name]["data_offsets"][0]] = 0x7F
open(sys.argv[1], "wb").write(data)
EOP
report 1 check "$NIB" check --json "$work/bad"
report 0 inspect "$NIB" inspect --json "$work/bad"
report 0 compare "$NIB" compare --json "$work/in" "$work/bad" --report "$work/bad.json"
report 0 compare "$NIB" compare --json "$work/bad" "$work/q"
reports+=("report=$work/bad.json")
report 2 plan "$NIB" quantize --json "$work/none" "$work/x"
report 2 inspect "$NIB" inspect --json "$work/none"
report 2 check "$NIB" check --json "$work/none"
report 2 compare "$NIB" compare --json "$work/none" "$work/q"

python3 tests/cli/schema.py "${reports[@]}" || fail "reports are not what docs/json.md says"
# The same of a page with values that are not finite: no number in it may be inf or nan.
"$NIB" compare -q "$work/in" "$work/bad" --report "$work/bad.html" >/dev/null || fail "no page"
! grep -qiE '="[^"]*(inf|nan)[^"a-z]*"' "$work/bad.html" || fail "a value that is not finite is in an attribute of the page"
grep -q '<title>byte 0x7F: [1-9][0-9]* blocks</title>' "$work/bad.html" || fail "a scale that is no number is not told by its byte"
# And that a report which is not so is noticed.
sed 's/"schema": 1/"schema": "1"/; s/"kept"/"held"/' "$work/report0" >"$work/wrong"
python3 tests/cli/schema.py "plan=$work/wrong" >"$work/out" && fail "a wrong report passes"
for text in 'plan.schema is not integer' 'plan.held is not in docs/json.md' 'plan.kept is missing'; do
    grep -qF "$text" "$work/out" || fail "it is not noticed that $text"
done

[ $failures = 0 ]
