#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What README.md says: its C program compiles as printed and prints what follows it; its figures; its links and those of docs/.
. tests/cli/expect.bash
NIB=${NIB:?the path of the tool}
library=$(dirname "$NIB")

# block N: the N-th fenced block from the one marked c on, without its fences.
block() { awk -v want="$1" '/^```/ { if (inside) { inside = 0 } else { if ($0 == "```c") n = 1; else if (n) n++; inside = 1 } next } inside && n == want' README.md; }

block 1 >"$work/example.c"
block 2 >"$work/expected"
[ -s "$work/example.c" ] && [ -s "$work/expected" ] || fail "README.md has no C program with its output behind it"
if "${CC:-cc}" -std=c11 -Wall -Wextra -Wpedantic -Werror -Iinclude "$work/example.c" "$library/libnib.so" \
    -Wl,-rpath,"$library" -o "$work/example"; then
    "$work/example" >"$work/out" || fail "the program of README.md: exit $?"
    diff "$work/expected" "$work/out" || fail "the program of README.md prints something else"
else
    fail "the program of README.md does not compile"
fi

# Figures. The tool and the demo print them; README.md quotes them.
line=$("$NIB" conform -q tests/golden/*.safetensors)
grep -qF "| $line |" README.md || fail "README.md does not say: $line"
figures=$("$library/examples/blocks" | sed -n 's/^  \(rtn\|4over6\|sweep\): .* \([0-9.]*\) dB$/\2/p' | paste -s -d , | sed 's/,/, /g')
grep -qF "| $figures dB |" README.md || fail "README.md does not say: $figures dB"
version=$(sed -n 's/^#define NIB_VERSION "\(.*\)"$/\1/p' include/nib.h)
grep -qF "This is version $version." README.md || fail "README.md is not about version $version"
grep -qx "## $version" NEWS.md || fail "NEWS.md has no section $version"

# Links to files of the repository, and to headings in them.
anchors() { sed -n 's/^##* //p' "$1" | tr '[:upper:]' '[:lower:]' | sed 's/[^a-z0-9 _-]//g; s/ /-/g'; }
for document in *.md docs/*.md; do
    for link in $(grep -o '](\([^)]*\))' "$document" | sed 's/^](//; s/)$//' | grep -v '^https\?:'); do
        file=${link%%#*}
        path=$(dirname "$document")/$file
        [ -n "$file" ] || path=$document
        [ -e "$path" ] || fail "$document links to $link, which is not there"
        case $link in
        *#*) anchors "$path" | grep -qx -- "${link#*#}" || fail "$document links to $link, and there is no such heading" ;;
        esac
    done
done

[ $failures = 0 ]
