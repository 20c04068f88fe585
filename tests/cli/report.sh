#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# nib inspect, nib compare and reports; the page is looked at in a browser.
. tests/cli/expect.bash
NIB=${NIB:?the path of the tool}

json() { python3 -c "import json,math,sys; r=json.load(open(sys.argv[1])); assert $2" "$1" || fail "$1: $2"; }

python3 tests/cli/damaged.py --make "$work" || exit 1
original=$work/original

run 0 "$NIB" quantize -q --report "$work/q.html" "$original" "$work/q"
run 0 "$NIB" quantize -q -f --report "$work/q.json" "$original" "$work/q"
run 0 "$NIB" quantize -q --scale rtn --report "$work/r.json" "$original" "$work/r"
run 0 "$NIB" quantize -q --format gguf "$original" "$work/q.gguf"
run 2 "$NIB" quantize -q --report "$work/q.txt" "$original" "$work/s"
matches err 'a report is FILE.html or FILE.json'
[ ! -e "$work/s" ] || fail "an output in spite of a bad report"

# inspect: every checkpoint format, a file, a GGUF file, and what is not there.
for form in original ct ct4 mo mixed ao q; do
    run 0 "$NIB" inspect "$work/$form"
    lines 27 'proj$|lm_head$|embed_tokens$|mlp.gate$'
done
matches out '^ *compressed-tensors 24 weights of 0.983 million values, .* 4.50 bits a value$'
run 0 "$NIB" inspect -q "$work/q.gguf"
matches out '^ *gguf +24 weights'
run 0 "$NIB" inspect --tensors "$work/q"
lines 88 'F32|BF16|U8|F8_E4M3'
run 0 "$NIB" inspect --quick "$work/q/model.safetensors"
run 0 "$NIB" inspect --json "$work/q"
json "$work/out" 'len(r["weights"]) == 27 and len(r["tensors"]) == 88 and r["provenance"]["command"] == "quantize"'
json "$work/out" 'all(sum(w["code_counts"]) == math.prod(w["shape"]) == 16 * sum(w["scale_counts"])
     and w["zero_codes"] == (w["code_counts"][0] + w["code_counts"][8]) / sum(w["code_counts"])
     for w in r["weights"] if w["format"] == "compressed-tensors")'
run 2 "$NIB" inspect "$work/nothing"
run 2 "$NIB" inspect
cp -r "$work/ct" "$work/broken"
python3 tests/cli/damaged.py --damage scale-missing "$work/broken"
run 1 "$NIB" inspect "$work/broken"
matches err 'block scales are missing'
lines 26 'proj$|lm_head$|embed_tokens$|mlp.gate$'

# compare: a checkpoint with itself, with its original, with one made otherwise, with another format.
run 0 "$NIB" compare "$work/q" "$work/q"
matches out '^27 weights compared, 0 of them differ, 27 are the same$'
matches out 'made by the same command from the same files'
run 0 "$NIB" compare "$original" "$work/q" --top 0
matches out "^the second was made by nib [0-9.]+, quantize, .*scale sweep"
lines 24 'proj$'
sort -c -g "$work/out" 2>/dev/null || [ "$(grep 'proj$' "$work/out" | sort -s -g -k1,1 | cksum)" = "$(grep 'proj$' "$work/out" | cksum)" ] ||
    fail "not the worst first"
run 0 "$NIB" compare "$work/r" "$work/q"
matches out 'options.scale: "rtn" in the first, "sweep" in the second'
run 0 "$NIB" compare "$work/ct" "$work/mo"
matches out ' 0 of them differ'
run 0 "$NIB" convert -q "$work/q" "$work/converted.gguf"
run 0 "$NIB" compare "$work/q" "$work/converted.gguf" -q
matches out '^27 weights compared, 0 of them differ'
run 0 "$NIB" compare "$work/converted.gguf" "$work/q" -q
matches out '^27 weights compared, 0 of them differ'
run 0 "$NIB" compare "$original" "$work/q.gguf" -q
matches out '^27 weights compared, 24 of them differ'
run 0 "$NIB" compare --json --top 3 "$original" "$work/q"
json "$work/out" 'r["changed"] == 24 and len(r["worst"]) == 3 and 20 < r["worst"][0]["sqnr_db"] < r["sqnr_db"] < 25'
run 2 "$NIB" compare "$original"
run 2 "$NIB" compare "$original" "$work/nothing"
# Its bytes are on the disk before it has its name, and then the name is.
if strace -o "$work/trace" true 2>/dev/null; then
    run 0 env ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0" strace -f -o "$work/trace" -e trace=fsync,rename "$NIB" compare -q "$original" "$work/q" --report "$work/t.json"
    calls=$(sed -E 's/^[0-9]+ +//; s/\(.*= 0$//' "$work/trace" | grep -E '^(fsync|rename)' | tr '\n' ' ')
    [ "$calls" = "fsync rename fsync " ] || fail "a report is published by: $calls"
fi
run 2 "$NIB" compare "$original" "$work/q" --report "$work/x.pdf"
run 2 "$NIB" compare "$original" "$work/q" --report "$work/no/x.html"
matches err 'cannot write the report .*: No such file or directory'
# It takes the place of no file of a model, however that is named, and of an earlier report anywhere.
cp -r "$work/q" "$work/model"
echo kept >"$work/model/page.html"
echo '{}' >"$work/model/generation_config.json"
cp -r "$work/model" "$work/before"
for model in "$work/model" "$work/model/model.safetensors"; do
    for name in config.json generation_config.json page.html; do
        for pair in "$original $model" "$model $original"; do
            run 2 "$NIB" compare -q --report "$work/model/$name" $pair
            has err "nib: the report $work/model/$name would replace a file of the checkpoint: give it another name"
        done
    done
    run 2 "$NIB" quantize -q -f --report "$work/model/page.html" "$model" "$work/none"
    absent "$work/none"
done
same "$work/before" "$work/model"
tool=$(realpath "$NIB")
run 2 bash -c 'cd "$0" && exec "$@"' "$work/model" "$tool" compare -q --report config.json model.safetensors "$original"
has err "nib: the report config.json would replace"
same "$work/before" "$work/model"
for name in over.html over.json; do
    for _ in 1 2; do
        run 0 "$NIB" compare -q --report "$work/model/$name" "$original" "$work/model/model.safetensors"
        run 0 "$NIB" quantize -q -f --report "$work/again/$name" "$original" "$work/again"
    done
    echo kept >"$work/$name"
    run 0 "$NIB" compare -q --report "$work/$name" "$original" "$work/model"
done
# Nor of anything else that is read.
echo '{}' >"$work/amax.json"
run 2 "$NIB" quantize -q --scheme nvfp4 --activations "$work/amax.json" --report "$work//amax.json" "$original" "$work/none"
has err "nib: the report $work//amax.json would replace a file that is read: give it another name"
run 2 "$NIB" quantize -q --imatrix "$work/amax.json" --report "$work/amax.json" "$original" "$work/none"
has err "would replace a file that is read"
[ "$(cat "$work/amax.json")" = '{}' ] || fail "a report took the place of the scales of activations"
for name in config.json page.html; do
    run 2 "$NIB" quantize -q --codes "$work/model" --report "$work/model/$name" "$original" "$work/none"
    has err "nib: the report $work/model/$name would replace a file of the checkpoint: give it another name"
done
absent "$work/none"
rm "$work/model/over.html" "$work/model/over.json"
same "$work/before" "$work/model"
mkfifo "$work/pipe.html"
run 2 timeout 60 "$NIB" compare -q "$original" "$work/q" --report "$work/pipe.html"
empty out
has err "nib: cannot write the report $work/pipe.html: it is not a regular file"
[ -p "$work/pipe.html" ] || fail "a pipe was replaced"
rm "$work/pipe.html"
run 2 bash -c "ulimit -f 8; exec '$NIB' compare -q '$original' '$work/q' --report '$work/x.html'"
matches err 'cannot write the report .*/x.html: File too large'
[ "$(find "$work" -name 'x.html*')" = "" ] || fail "a part of a report is left"
python3 - "$work/other.safetensors" <<'EOP'
import json, struct, sys
h = json.dumps({"a.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}).encode()
open(sys.argv[1], "wb").write(struct.pack("<Q", len(h)) + h + bytes(4))
EOP
run 2 "$NIB" compare "$original" "$work/other.safetensors"
matches err 'no weight in common'

# The numbers of a report, against arithmetic of our own.
json "$work/r.json" 'r["changed"] == 24 and r["plan"]["changed"] == 24 and len(r["weights"]) == 27'
json "$work/r.json" 'sum(r["code_counts"]) == 16 * sum(r["scale_counts"]) == sum(w["elements"] for w in r["weights"] if w["blocks"])'
python3 tests/cli/damaged.py --compare "$original" "$work/ct" >"$work/wanted"
run 0 "$NIB" compare "$original" "$work/ct" --report "$work/ct.json"
python3 - "$work/wanted" "$work/ct.json" <<'EOP' || fail "numbers of a comparison"
import json, sys
wanted, report = json.load(open(sys.argv[1])), json.load(open(sys.argv[2]))
rows = {w["name"]: w for w in report["weights"]}
assert len(wanted) == 3
for name, w in wanted.items():
    for key in ("sqnr_db", "relative_l2", "max_error", "amax"):
        assert abs(rows[name][key] - w[key]) <= 1e-5 * abs(w[key]), (name, key, rows[name][key], w[key])
    for key in ("zeroed", "clipped", "underflowed_blocks"):
        assert rows[name][key] == w[key], (name, key, rows[name][key], w[key])
EOP
for threads in 1 2 3; do
    run 0 "$NIB" compare -t $threads "$original" "$work/ct" --report "$work/t$threads.json"
    cmp -s "$work/ct.json" "$work/t$threads.json" || fail "the report depends on the number of threads"
done

# What the report says of every weight: what became of it and why, its size, where it errs most.
json "$work/q.json" 'sorted(set(w["fate"] for w in r["weights"])) == ["kept", "quantized"]'
json "$work/q.json" '{w["name"]: w["reason"] for w in r["weights"] if w["fate"] == "kept"} == {
    "lm_head": "the output head", "model.embed_tokens": "an embedding", "model.layers.2.mlp.gate": "a router"}'
json "$work/q.json" 'sum(k["bytes_a"] for k in r["kinds"]) == r["a"]["tensor_bytes"] and sum(k["bytes_b"] for k in r["kinds"]) == r["b"]["tensor_bytes"]'
json "$work/q.json" 'sum(k["weights"] for k in r["kinds"]) == len(r["weights"]) == 27 and sum(k["elements"] for k in r["kinds"]) == r["a"]["elements"]'
json "$work/q.json" 'all(len(w["worst_rows"]) == len(w["worst_blocks"]) == 8 and sum(w["code_counts"]) == w["elements"]
    and 0 < w["worst_blocks"][0]["error_share"] < w["worst_rows"][0]["error_share"] < 1
    and w["worst_rows"][0]["sqnr_db"] < w["sqnr_db"] + 3 for w in r["weights"] if w["fate"] == "quantized")'
json "$work/q.json" '[w["sqnr_db"] for w in r["weights"]][:24] == sorted(w["sqnr_db"] for w in r["weights"] if w["sqnr_db"])'
json "$work/q.json" '[w["name"] for w in r["weights"]][24:] == sorted(w["name"] for w in r["weights"] if w["fate"] == "kept")'
# The page says the same: sizes with bars to the longest of them, sums of what became of weights, and how often codes occur.
python3 - "$work/q.html" "$work/q.json" <<'EOP' || fail "the page is not the report"
import json, re, sys
page, report = open(sys.argv[1]).read(), json.load(open(sys.argv[2]))
def table(name):
    return re.search(rf'<table id="{name}".*?</table>', page, re.S)[0]
def size(n):
    unit = 0
    while n >= 999.5:
        n, unit = n / 1000, unit + 1
    return "%.*f %s" % (unit > 0 and n < 99.95, n, ("B", "KB", "MB", "GB")[unit])
sizes = [k[key] for k in report["kinds"] for key in ("bytes_a", "bytes_b")]
assert re.findall(r'bar[01]" y="\d" width="([\d.]+)"', table("sizes")) == ["%.1f" % (400 * n / max(sizes)) for n in sizes]
groups = {}
for w in report["weights"]:
    what = w["fate"] + (": " + w["reason"] if w["reason"] else "")
    n, before, after = groups.get(what, (0, 0, 0))
    groups[what] = n + 1, before + w["bytes_a"], after + w["bytes_b"]
rows = re.findall(r'<tr><td class="l">(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>', table("fates"))
assert sorted(rows) == sorted((what, str(n), size(a), size(b)) for what, (n, a, b) in groups.items()), rows
counts = report["code_counts"]
assert re.findall(r": (\d+) codes, ", page) == [str(n) for n in (*counts[:8:-1], counts[0] + counts[8], *counts[1:8])]
EOP
# Kinds: the last word of a name, unless it says nothing or another part of the model has it too.
python3 - "$work/kinds.safetensors" <<'EOP'
import json, struct, sys
names = ["encoder.layer.0.attention.output.dense", "encoder.layer.1.output.dense", "encoder.layer.1.attention.self.query",
         "model.layers.0.mlp.shared_experts.up_proj", "model.layers.0.mlp.experts.3.up_proj", "model.layers.2.mlp.up_proj",
         "visual.blocks.1.attn.proj", "lm_head"]
h = json.dumps({n + ".weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)}).encode()
open(sys.argv[1], "wb").write(struct.pack("<Q", len(h)) + h + bytes(4 * len(names)))
EOP
run 0 "$NIB" compare -q "$work/kinds.safetensors" "$work/kinds.safetensors" --report "$work/kinds.json"
json "$work/kinds.json" '[k["kind"] for k in r["kinds"]] == ["attention.output.dense", "experts up_proj", "lm_head", "output.dense", "query",
    "shared up_proj", "up_proj", "vision attn.proj", "everything else"]'
json "$work/kinds.json" 'sorted(str(w["layer"]) for w in r["weights"]) == ["0", "0", "0", "1", "1", "1", "2", "None"]'

# Where every weight differs, and rows end within a block.
python3 - "$work/one.safetensors" "$work/two.safetensors" <<'EOP'
import json, struct, sys
h = json.dumps({f"model.layers.{i}.up_proj.weight": {"dtype": "F32", "shape": [1, 20], "data_offsets": [80 * i, 80 * i + 80]} for i in range(2)}).encode()
for path, last in zip(sys.argv[1:], (1, 2)):
    open(path, "wb").write(struct.pack("<Q", len(h)) + h + struct.pack("<20f", *[1] * 19, last) * 2)
EOP
run 0 "$NIB" compare -q "$work/one.safetensors" "$work/two.safetensors" --report "$work/ends.html"
[ "$(grep -cF '<td class="l">0, 16&ndash;19</td>' "$work/ends.html")" = 2 ] || fail "the last block of a row"

# Weights that one alone has are in the report too.
python3 - "$work/original" "$work/less" <<'EOP'
import json, os, shutil, struct, sys
shutil.copytree(*sys.argv[1:])
os.chdir(sys.argv[2])
for name in [n for n in os.listdir() if n.endswith(".safetensors")]:
    data = open(name, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    for key in [k for k in header if "layers.0.mlp.up_proj" in k]:
        header[key.replace("up_proj", "other_proj")] = header.pop(key)
    text = json.dumps(header).encode()
    open(name, "wb").write(struct.pack("<Q", len(text)) + text + data[8 + size:])
for name in [n for n in os.listdir() if n.endswith(".index.json")]:
    text = open(name).read().replace("layers.0.mlp.up_proj", "layers.0.mlp.other_proj")
    open(name, "w").write(text)
EOP
run 0 "$NIB" compare -q "$original" "$work/less" --report "$work/less.json"
json "$work/less.json" 'r["only_a"] == r["only_b"] == 1 and len(r["weights"]) == 28'
json "$work/less.json" '{w["name"][15:]: (w["fate"], w["bytes_a"] > 0, w["bytes_b"] > 0) for w in r["weights"] if "only" in w["fate"]} == {
    "mlp.up_proj": ("only in the first", True, False), "mlp.other_proj": ("only in the second", False, True)}'
run 0 "$NIB" compare -q "$original" "$work/less" --report "$work/less.html"

# Names that a page must not obey.
mkdir "$work/<b>&\"x"
cp -r "$work/q/." "$work/<b>&\"x"
run 0 "$NIB" compare "$original" "$work/<b>&\"x" --report "$work/names.html"
grep -q '<h1>&lt;b&gt;&amp;&quot;x</h1>' "$work/names.html" || fail "names are not escaped"
python3 tests/cli/hostile.py "$work/hostile" >"$work/names" || fail "no hostile names"
for end in html json; do
    run 0 "$NIB" quantize -q -f --ignore '*%n*' --report "$work/hostile.$end" "$work/hostile" "$work/hostile-q"
done
json "$work/hostile.json" 'all(w["kind"].replace("experts ", "") in w["name"] for w in r["weights"])'
python3 -c 'import json, sys; a, b = (json.load(open(p)) for p in sys.argv[1:]); assert sorted(a) == sorted(w["name"] for w in b["weights"])' \
    "$work/names" "$work/hostile.json" || fail "names are not what they were"

[ $failures = 0 ] || exit 1
if python3 -c 'import sys; sys.path.insert(0, "tests/cli"); import browser; sys.exit(browser.find() is None)'; then
    python3 tests/cli/look.py "$work/q.html" "$work/q.json" "$work/hostile.html" "$work/hostile.json"
    exit
fi
echo "there is no chromium or chrome to look at the report with"
[ "${CI:-}" = true ] && exit 1
exit 77
