#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The tool in its sandbox: every command with files where people have them works with NIB_SANDBOX=require, and a spy that
# is loaded into the tool, and tries a file outside and a socket as soon as the tool reads a header, is denied both.
. tests/cli/expect.bash
NIB=${NIB:?the path of the tool}
BUILD=${BUILD:?the build folder}
CC=${CC:-cc}
case $("$NIB" version -v) in
*"sandbox: Landlock 1, "*) echo "Landlock of this kernel is too old for outputs" && exit 77 ;;
*"sandbox: Landlock "*", seccomp"*) ;;
*) echo "this kernel has no Landlock or no seccomp" && exit 77 ;;
esac
if [ -n "$(nm "$NIB" 2>/dev/null | grep -m1 __asan_init)" ]; then
    echo "sanitizers look at the tool from outside" && exit 77
fi
export NIB_SANDBOX=require

# A cache of the Hugging Face hub: a snapshot is links to blobs two directories up.
"$BUILD/examples/make_checkpoint" --family demo --layers 2 --shards 2 "$work/plain" >/dev/null || exit 1
hub=$work/hub/models--a--b snapshot=$work/hub/models--a--b/snapshots/0123
mkdir -p "$hub/blobs" "$hub/refs" "$snapshot" "$work/elsewhere" "$work/reports"
echo -n 0123 >"$hub/refs/main"
for file in "$work/plain"/*; do
    name=$(basename "$file")
    cp "$file" "$hub/blobs/blob-$name"
    ln -s "../../blobs/blob-$name" "$snapshot/$name"
done

NIB_SANDBOX=off run 0 "$NIB" quantize "$work/plain" "$work/expected"
run 0 "$NIB" quantize -v --report "$work/reports/r.html" "$snapshot" "$work/out1"
has out "sandbox: Landlock "
same "$work/expected" "$work/out1"
[ -s "$work/reports/r.html" ] || fail "there is no report"
run 0 "$NIB" quantize --report "$work/out2/r.json" "$snapshot" "$work/out2" # a report within what the run makes
[ -s "$work/out2/r.json" ] || fail "there is no report in the output"
ln -s "$work/elsewhere" "$work/link"
run 0 "$NIB" quantize "$snapshot/" "$work/link/" # an output that is a link
same "$work/expected" "$work/elsewhere"
(cd "$work" && run 0 "$(realpath -m --relative-to="$work" "$(command -v "$NIB" || echo "$OLDPWD/$NIB")")" quantize plain out3)
same "$work/expected" "$work/out3"
run 0 "$NIB" quantize --force -t 3 "$work/plain" "$work/out3"
run 0 "$NIB" quantize --resume "$work/plain" "$work/out3"
same "$work/expected" "$work/out3"
run 0 "$NIB" quantize "$work/plain" "$work/model.gguf"
run 0 "$NIB" dequantize "$work/model.gguf" "$work/back.gguf"
run 0 "$NIB" convert --format modelopt "$work/expected" "$work/modelopt"
run 0 "$NIB" check "$work/expected" --against "$snapshot"
run 1 "$NIB" repair "$work/expected" "$work/repaired" # there is nothing to repair
[ ! -e "$work/repaired" ] || fail "an output directory is left over"
run 0 "$NIB" inspect "$snapshot"
run 0 "$NIB" compare --report "$work/reports/c.json" "$snapshot" "$work/expected"
run 0 "$NIB" conform tests/golden/te_gemm.safetensors
printf '{"model.layers.0.self_attn.q_proj": 4.5}' >"$work/elsewhere/amax.json"
run 2 "$NIB" quantize --format modelopt --scheme nvfp4 --activations "$work/elsewhere/amax.json" "$snapshot" "$work/out4"
has err "the activations file has no amax for" # it was read
run 0 "$NIB" quantize --codes "$work/expected" "$snapshot" "$work/out5"

# A directory of a cache that is not the model: what is said needs files beside it.
run 2 "$NIB" inspect "$hub/snapshots"
has err "the model is in $hub/snapshots/0123"
NIB_SANDBOX=on HF_HUB_CACHE=$work/hub run 2 "$NIB" inspect a/b
has err "in $hub/snapshots/0123"
run 2 "$NIB" inspect "$work/none"
has err "NIB_SANDBOX"
# Rules that cannot be made are not left out.
run 2 bash -c "ulimit -n 4; exec '$NIB' inspect '$work/expected'"
has err "no sandbox as NIB_SANDBOX wants it: none: Landlock: Too many open files"
# What fails leaves no directory behind.
run 2 "$NIB" quantize "$work/plain" "$work/plain/within"
[ ! -e "$work/plain/within" ] || fail "a rejected output directory is left over"
mkdir "$work/bad" && echo no >"$work/bad/model.safetensors"
run 2 "$NIB" quantize "$work/bad" "$work/none"
[ ! -e "$work/none" ] || fail "the output of a bad input is left over"

# ---- The spy
cat >"$work/spy.c" <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
ssize_t pread(int fd, void *to, size_t bytes, off_t offset)
{
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real) {
        *(void **)&real = dlsym(RTLD_NEXT, "pread");
        const int file = open("/etc/passwd", O_RDONLY);
        fprintf(stderr, "file: %s\n", file < 0 ? strerror(errno) : "opened");
        const int made = open(getenv("SPY_FILE"), O_WRONLY | O_CREAT, 0600);
        fprintf(stderr, "made: %s\n", made < 0 ? strerror(errno) : "opened");
        const int peer = socket(AF_INET, SOCK_STREAM, 0);
        fprintf(stderr, "socket: %s\n", peer < 0 ? strerror(errno) : "opened");
    }
    return real(fd, to, bytes, offset);
}
ssize_t pread64(int fd, void *to, size_t bytes, off_t offset) { return pread(fd, to, bytes, offset); }
C
"$CC" -shared -fPIC -o "$work/spy.so" "$work/spy.c" -ldl || exit 1
spied() {
    rm -rf "$work/spied" "$work/made"
    run 0 env SPY_FILE="$work/made" LD_PRELOAD="$work/spy.so" "$@"
}
for command in "inspect $work/expected" "check $work/expected" "compare $work/plain $work/expected" \
    "quantize $work/plain $work/spied" "convert --format modelopt $work/expected $work/spied" \
    "dequantize $work/expected $work/spied" "conform tests/golden/te_gemm.safetensors"; do
    # shellcheck disable=SC2086 # words
    spied "$NIB" $command
    has err "file: Permission denied"
    has err "made: Permission denied"
    has err "socket: Operation not permitted"
    [ ! -e "$work/made" ] || fail "$command: a file was made outside"
done
NIB_SANDBOX=off spied "$NIB" inspect "$work/expected"
has err "file: opened" # or the spy would show nothing
has err "socket: opened"
[ "$failures" = 0 ] && echo "all fine"
exit $((failures != 0))
