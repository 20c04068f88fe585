#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# deps.sh build|test - install what is missing on Debian or Ubuntu; touches nothing when all is there.
# NIB_NO_INSTALL=1: only say what is missing.

packages=
optional=

# need PACKAGE COMMAND...: the command tells whether the package is there.
need()
{
    package=$1
    shift
    "$@" >/dev/null 2>&1 || packages="$packages $package"
}

# want PACKAGE COMMAND...: the same for what a stage of the tests can do without; it then says so.
want()
{
    package=$1
    shift
    "$@" >/dev/null 2>&1 || optional="$optional $package"
}

has_header() { printf '#include <%s>\n' "$1" | ${CC:-cc} -E -; }

# clang_links FLAG: the runtime behind a flag of clang is installed.
clang_links()
{
    folder=$(mktemp -d) || return 1
    echo 'int main(void) { return 0; }' | clang "$1" -x c - -o "$folder/a.out"
    status=$?
    rm -rf "$folder"
    return $status
}

has_venv() { python3 -c 'import venv, ensurepip'; }

# The packages are named after clang's version: libclang-rt-14-dev, libomp-14-dev.
clang_version() { clang -dumpversion 2>/dev/null | sed 's/\..*//'; }

# A cross compiler without the headers of its C library is of no use.
cross_compiles() { echo '#include <stdio.h>' | aarch64-linux-gnu-gcc -E -; }

has_browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }

look()
{
    packages=
    optional=
    need gcc command -v "${CC:-cc}"
    need libc6-dev has_header stdio.h
    need make command -v make
    need cmake command -v cmake
    need pkg-config command -v pkg-config
    need libjansson-dev has_header jansson.h
    need libpcre2-dev has_header pcre2posix.h
    need libxxhash-dev has_header xxhash.h
    [ "$1" = test ] || return 0
    need gcc command -v gcc
    need g++ command -v g++
    need python3 command -v python3
    need python3-venv has_venv
    need git command -v git
    if command -v clang >/dev/null 2>&1; then
        need "libclang-rt-$(clang_version)-dev" clang_links -fsanitize=fuzzer-no-link,address,undefined
        need "libomp-$(clang_version)-dev" clang_links -fopenmp
    else
        packages="$packages clang libomp-dev"
    fi
    want gcc-aarch64-linux-gnu cross_compiles
    want libc6-dev-arm64-cross cross_compiles
    want qemu-user command -v qemu-aarch64
    want valgrind command -v valgrind
    want openmpi-bin command -v mpirun
    want libopenmpi-dev command -v mpicc
    want chromium has_browser
}

look "$1"
[ -z "$packages$optional" ] && exit 0

if [ "$(id -u)" = 0 ]; then
    sudo=
elif command -v sudo >/dev/null 2>&1; then
    sudo=sudo
else
    sudo=none
fi
if [ -n "$NIB_NO_INSTALL" ] || [ "$sudo" = none ] || ! command -v apt-get >/dev/null 2>&1; then
    [ -z "$packages" ] && exit 0
    echo "nib needs these packages: apt-get install$packages" >&2
    exit 1
fi

echo "installing$packages$optional"
$sudo apt-get update -qq || echo "apt-get update failed; trying with the lists that are here" >&2
# One by one: a distribution that lacks one of them still has the others.
for package in $optional; do
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null ||
        echo "going on without $package" >&2
done
look "$1"
[ -z "$packages" ] && exit 0
# Twice: the names of clang's runtimes are known only when clang is there.
for round in 1 2; do
    # shellcheck disable=SC2086
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null || break
    look "$1"
    [ -z "$packages" ] && exit 0
done
echo "nib needs these packages, and apt-get could not install them: apt-get install$packages" >&2
exit 1
