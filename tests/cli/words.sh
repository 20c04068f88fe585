#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# One list of words: what the tool lists with `nib help --words` is what --help, the manual page and Python's enums have,
# no word more and none less. (The completion asks the tool: completion.sh.)
. tests/cli/expect.bash
NIB=${NIB:?the path of the tool}

# in_words WORD LIST...
in_words() {
    local wanted=$1 word
    shift
    for word; do [ "$word" != "$wanted" ] || return 0; done
    return 1
}

listed=$("$NIB" help --words)
[ "$(wc -l <<<"$listed")" -ge 10 ] || fail "nib help --words lists less than ten options"

while read -r command option words; do
    # shellcheck disable=SC2206
    words=($words)
    help=$("$NIB" "$command" --help | grep -E -- "^ +$option [A-Z]")
    man=$(sed -n "/^\.Cm $command :\$/,/^\.El\$/p" man/nib.1 | sed -n "/^\.It Fl -${option#--} /,/^\.\(It\|El\)/p" | sed '1d;$d')
    [ -n "$man" ] || fail "man/nib.1 has no $option of nib $command"
    marked=$(grep '^\.Cm ' <<<"$man" | sed 's/^\.Cm //; s/ Ns .*//; s/[,.:]//2g' | tr ' ' '\n' | sed 's/[,:]$//' | grep -v '^[.,:;]*$')
    for word in "${words[@]}"; do
        grep -qwF -- "$word" <<<"$help" || fail "nib $command --help lacks $word of $option"
        grep -qxF -- "$word" <<<"$marked" || fail "man/nib.1 lacks $word of nib $command $option"
        [ "$option" = --activations ] || "$NIB" "$command" $option "$word" 2>&1 | grep -q 'takes an input' ||
            fail "nib $command $option does not take $word"
    done
    for word in $marked; do
        in_words "$word" "${words[@]}" || [ "$option $word" = "--activations nvfp4" ] || # whose scales they are
            fail "man/nib.1 has $word for nib $command $option, which takes ${words[*]}"
    done
done <<<"$listed"

# Python's enums, by the names that the header gives them; its formats and dialects are the library's own.
python3 - "$listed" <<'END' || fail "Python's enums have other words"
import ast, re, sys
listed = {tuple(line.split()[:2]): line.split()[2:] for line in sys.argv[1].splitlines()}
text = open("python/nib/_library.py").read()
classes = {n.name: [t.targets[0].id for t in n.body if isinstance(t, ast.Assign)] for n in ast.parse(text).body if isinstance(n, ast.ClassDef)}
good = True
for enum, option, extra in (("nib_scale_rule", "--scale", []),
                            ("nib_tensor_scale_rule", "--tensor-scale", ["dialect"])):
    found = re.search(rf'"{enum}": \((\w+),', text)
    have = [name.lower().replace("_", "-").replace("four-over-six", "4over6") for name in classes[found[1]]] if found else []
    want = extra + listed[("quantize", option)]
    if sorted(have) != sorted(want):
        print(f"    {enum} is {have} in Python and {want} in the tool")
        good = False
sys.exit(not good)
END

[ $failures = 0 ]
