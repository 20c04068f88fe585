#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Completion: load the file as bash does, complete lines, and compare.
. tests/cli/expect.bash
NIB=${NIB:?the path of the tool}
mkdir "$work/bin" "$work/here"
ln -s "$NIB" "$work/bin/nib"
PATH=$work/bin:$PATH
. completion/nib.bash
complete -p nib | grep -q -- '-F _nib nib$' || { echo "FAILED: no completion is set for nib"; exit 1; }

# expect LINE WORDS: completing at the end of LINE offers exactly WORDS; a line that ends in a space begins a new word.
expect() {
    local line=$1 wanted got
    shift
    read -ra COMP_WORDS <<<"${line//=/ = }"
    [[ $line != *' ' && $line != *= ]] || COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    [[ $line != *= ]] || { unset "COMP_WORDS[COMP_CWORD]"; COMP_CWORD=$((COMP_CWORD - 1)); }
    COMPREPLY=()
    _nib
    got=$(printf '%s\n' "${COMPREPLY[@]:-}" | sort | tr '\n' ' ')
    wanted=$(printf '%s\n' "$@" | sort | tr '\n' ' ')
    [ "$got" = "$wanted" ] || {
        echo "FAILED: '$line' offers '$got', not '$wanted'"
        failures=$((failures + 1))
    }
}

cd "$work/here" || exit 1
touch model.safetensors amax.json q.html notes.txt
mkdir folder

commands=$("$NIB" help | sed -n 's/^  \([a-z]*\) .*/\1/p')
# shellcheck disable=SC2086
expect 'nib ' $commands --help --version
expect 'nib quan' quantize
expect 'nib con' convert conform
expect 'nib --v' --version
# shellcheck disable=SC2086
expect 'nib help ' $commands
expect 'nib help qu' quantize
expect 'nib check --a' --against --all
expect 'nib check --js' --json
expect 'nib quantize --sc' --scale --scheme
expect 'nib quantize --scale ' rtn 4over6 sweep
expect 'nib quantize --scale=' rtn 4over6 sweep
expect 'nib quantize --scale=s' sweep
expect 'nib quantize --format m' modelopt
expect 'nib convert --format ' compressed-tensors modelopt torchao gguf
expect 'nib quantize --for ' vllm sglang trtllm transformers llama.cpp
expect 'nib quantize --activations ' one norm statistics amax.json folder
expect 'nib quantize --imatrix m' model.safetensors
expect 'nib compare --report ' amax.json q.html folder
expect 'nib compare --top ' ''
expect 'nib compare -t ' ''
expect 'nib inspect ' amax.json folder model.safetensors notes.txt q.html
expect 'nib inspect --json m' model.safetensors
expect 'nib dequantize --dtype b' bf16
expect 'nib bench qua' "$("$NIB" bench --list | grep '^qua')"

# The words of every option, as the tool lists them; files may come besides.
while read -r command option words; do
    [ "$option" = --activations ] && words="$words amax.json folder"
    # shellcheck disable=SC2086
    expect "nib $command $option " $words
done < <("$NIB" help --words)

# Every command's options are offered, all of them.
for command in $commands; do
    # shellcheck disable=SC2046
    expect "nib $command --" $("$NIB" "$command" --help | grep -oE '^ +(-[a-zA-Z], )?--[a-z0-9-]+' | grep -oE -- '--[a-z0-9-]+')
done

[ $failures = 0 ]
