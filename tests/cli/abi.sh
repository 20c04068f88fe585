#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Callers of other versions: tests/abi/caller*.c, compiled with the headers of each version that is still served, and
# tests/abi/future*.c, whose structs are larger than this library's, all with the shared libraries as they are.
. tests/cli/expect.bash
BUILD=${BUILD:-$(dirname "${NIB:?the path of the tool}")}
CC=${CC:-cc}
command -v "$CC" >/dev/null || { echo "there is no $CC"; exit 77; }

# SOURCE HEADERS: it runs, by the soname of the library, and all of its tests pass.
serves() {
    local program
    program=$work/$(basename "$1" .c)-$(basename "$2")
    "$CC" -std=gnu11 -Wall -Wextra -Werror -I"$2" -Itests "$1" -L"$BUILD" -lnib_checkpoint -lnib -lm -o "$program" \
        >"$work/out" 2>&1 || { fail "$1 does not compile with $2"; return; }
    readelf -d "$program" >"$work/out"
    grep -q "NEEDED.*\[$soname\]" "$work/out" || fail "$program does not ask for $soname"
    LD_LIBRARY_PATH=$BUILD "$program" >"$work/out" 2>&1 || { fail "$1 with $2: exit $?"; return; }
    tail -1 "$work/out" | grep -Eq "^[1-9][0-9]* passed, 0 failed, 0 skipped$" || fail "$1 with $2: no closing line"
}

readelf -d "$BUILD/libnib.so" >"$work/out"
soname=$(sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p' "$work/out")
version=$(sed -n 's/^#define NIB_VERSION "\([0-9]*\.[0-9]*\)\..*"/\1/p' include/nib.h)
[ "$soname" = "libnib.so.$version" ] || fail "before 1.0 the soname has major and minor version: $soname"
for source in tests/abi/caller*.c; do
    for headers in tests/abi/[0-9]*; do
        serves "$source" "$headers"
    done
done
for source in tests/abi/future*.c; do
    serves "$source" include
done
[ $failures = 0 ]
