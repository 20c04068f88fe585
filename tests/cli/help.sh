#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The tool about itself: nib, nib help, nib version, an unknown command, outputs that cannot be written.
. tests/cli/expect.bash
NIB=${NIB:?the path of the tool}

commands="quantize convert check repair inspect compare dequantize conform bench version help"

run 2 "$NIB"
empty out
for command in $commands; do has err "  $command"; done

# Every option that a command's help lists is one that it knows, however many there are.
for command in quantize convert check repair inspect compare dequantize; do
    run 0 "$NIB" "$command" --help
    sed -nE 's/^  (-., |    )(--[a-z0-9-]+).*/\2/p' "$work/out" >"$work/options"
    while read -r option; do
        "$NIB" "$command" "$option" >"$work/out" 2>"$work/err" </dev/null # without what else it takes
        ! grep -qF "cannot take option" "$work/err" || fail "$command $option"
    done <"$work/options"
done

for words in help --help -h; do
    run 0 "$NIB" $words
    empty err
    has out "usage: nib COMMAND"
    for command in $commands; do has out "  $command"; done
done

for command in $commands; do
    run 0 "$NIB" "$command" --help
    empty err
    has out "usage: nib $command [OPTION]..."
    has out "-h, --help"
    cp "$work/out" "$work/by_option"
    run 0 "$NIB" help "$command"
    empty err
    cmp -s "$work/out" "$work/by_option" || fail "nib help $command is not nib $command --help"
    run 0 "$NIB" "$command" -h
    run 2 "$NIB" "$command" --no-such-option
    has err "nib: $command: cannot take option '--no-such-option'; see nib $command --help"
    empty out
done

# Every option that the help has is taken, with or without its argument.
for command in quantize convert dequantize check repair inspect compare; do
    for option in $("$NIB" "$command" --help | grep -oE -- '^ +(-., )?--[a-z0-9-]+' | grep -oE -- '--[a-z0-9-]+'); do
        "$NIB" "$command" "$option" >"$work/out" 2>"$work/err" </dev/null
        ! grep -qF "cannot take option" "$work/err" || fail "nib $command $option"
    done
done

# The manual page has every option of a command under its name.
for command in quantize convert dequantize check repair inspect compare conform bench version; do
    sed -n "/^\.Cm $command :\$/,/^\.Cm [a-z]* :\$/p" man/nib.1 >"$work/man"
    case $command in
    quantize | convert | dequantize) sed -n '/^\.Cm repair :$/,/^\.Cm [a-z]* :$/p' man/nib.1 >>"$work/man" ;; # what they share
    esac
    "$NIB" "$command" --help >"$work/out" 2>"$work/err"
    for option in $(grep -oE '^ +(-[a-zA-Z], )?--[a-z0-9-]+' "$work/out" | grep -oE -- '--[a-z0-9-]+'); do
        [ "$option" = --help ] || grep -qE "(Fl|,) -${option#--}( |\$)" "$work/man" ||
            case $command:$option in
            inspect:--threads | compare:--threads) ;; # said under check
            *) fail "man/nib.1 lacks $option of nib $command" ;;
            esac
    done
done

run 2 "$NIB" bogus
empty out
has err "nib: there is no command 'bogus'; the commands are quantize, convert, check, repair, inspect, compare, dequantize, conform, bench, version, help"
run 2 "$NIB" help bogus
empty out
has err "nib: there is no command 'bogus'"
run 2 "$NIB" help conform version
run 2 "$NIB" --bogus
run 2 "$NIB" ''
run 2 "$NIB" $'a\e[31mb\nc'
has err "'a?[31mb?c'" # nothing that a terminal would obey
wide=$'\xc2\xa0\xc3\xa9\xd0\x80\xd3\x9f\xe2\x82\xac\xf0\x9f\x98\x80'
run 2 "$NIB" $'\xc2\x9b2J\xc2\x80\xc2\x9f \x9b2J '"$wide"$'\x9f'
has err "'??2J???? ?2J $wide?'" # nor one of two bytes, or one that is beyond ASCII and part of no character

header=$(sed -n 's/^#define NIB_VERSION "\(.*\)"$/\1/p' include/nib.h)
for words in version --version; do
    run 0 "$NIB" $words
    empty err
    [ "$(cat "$work/out")" = "nib $header" ] || fail "nib $words is not nib $header"
done
run 0 "$NIB" version -v
has out "instruction set: "
has out "device: host"

# A GPU is loaded when it is asked for; what is missing is said, and where there is none nothing else is.
for command in "conform tests/golden/te_1d.safetensors" "bench --quick"; do
    run 2 env NIB_CUDA_LIBRARY="$work/none.so" "$NIB" $command --device cuda
    has err "nib: ${command%% *}: --device cuda needs libnib_cuda: $work/none.so: cannot open"
    empty out
    run 2 env NIB_CUDA_LIBRARY=libc.so.6 "$NIB" $command --device cuda
    has err "nib: ${command%% *}: --device cuda needs libnib_cuda: libc.so.6 is not nib's library of this version"
    run 2 "$NIB" $command --device gpu
    has err "nib: ${command%% *}: there is no device 'gpu'; a device is host, cuda or cuda:N"
    run 2 "$NIB" $command --device cuda:x
    has err "there is no device 'cuda:x'"
done
run 0 "$NIB" conform -q tests/golden/te_1d.safetensors --device host

run 2 "$NIB" version now
has err "nib: version: takes no operand, such as 'now'"
run 2 "$NIB" version -vx
has err "nib: version: cannot take option '-x'"
run 2 "$NIB" version --verbose -xv
has err "nib: version: cannot take option '-x'"
run 2 "$NIB" version --verbose=1
has err "'--verbose=1'"

# A report that did not arrive is not a success.
status=0
"$NIB" help >/dev/full 2>"$work/err" || status=$?
[ $status = 2 ] || fail "nib help >/dev/full: exit $status"
has err "nib: cannot write standard output: No space left on device"
status=0
"$NIB" version >&- 2>"$work/err" || status=$?
[ $status = 2 ] || fail "nib version >&-: exit $status"
has err "nib: cannot write standard output"
# No file takes the place of a standard stream that is closed, or what is meant for the stream would be written into it.
if strace -o "$work/trace" true 2>/dev/null; then
    ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0" strace -o "$work/trace" -e trace=openat \
        bash -c 'exec "$0" inspect tests/golden/te_1d.safetensors <&- >&- 2>&-' "$NIB"
    grep te_1d "$work/trace" >"$work/out" || fail "the file is not opened"
    ! grep -qE '= [012]$' "$work/out" || fail "a file is a standard stream"
fi
status=0
{ sleep 0.2; "$NIB" help 2>"$work/err"; echo $? >"$work/status"; } | true
[ "$(cat "$work/status")" = 2 ] || fail "nib help into a closed pipe: exit $(cat "$work/status")"

[ $failures = 0 ]
