#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# deps.sh build|test - install what is missing on Debian or Ubuntu; touches nothing when all is there.
# NIB_NO_INSTALL=1: only say what is missing.

packages=

# need PACKAGE COMMAND...: the command tells whether the package is there.
need()
{
    package=$1
    shift
    "$@" >/dev/null 2>&1 || packages="$packages $package"
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

look()
{
    packages=
    need gcc command -v "${CC:-cc}"
    need libc6-dev has_header stdio.h
    need make command -v make
    need cmake command -v cmake
    need pkg-config command -v pkg-config
    need libjansson-dev has_header jansson.h
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
}

# What a stage of the tests skips when it is not there.
look_optional()
{
    packages=
    [ "$1" = test ] || return 0
    need openmpi-bin command -v mpirun
    need libopenmpi-dev command -v mpicc
}

look "$1"
required=$packages
look_optional "$1"
[ -z "$required$packages" ] && exit 0

if [ "$(id -u)" = 0 ]; then
    sudo=
elif command -v sudo >/dev/null 2>&1; then
    sudo=sudo
else
    sudo=none
fi
if [ -n "$NIB_NO_INSTALL" ] || [ "$sudo" = none ] || ! command -v apt-get >/dev/null 2>&1; then
    [ -z "$required" ] && exit 0
    echo "nib needs these packages: apt-get install$required" >&2
    exit 1
fi

# install LOOK MODE: what LOOK finds missing. Twice: the names of clang's runtimes are known only when clang is there.
install()
{
    for round in 1 2; do
        "$1" "$2"
        [ -z "$packages" ] && return 0
        # shellcheck disable=SC2086
        $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null || break
    done
    "$1" "$2"
    [ -z "$packages" ]
}

echo "installing$required$packages"
$sudo apt-get update -qq || echo "apt-get update failed; trying with the lists that are here" >&2
if ! install look "$1"; then
    echo "nib needs these packages, and apt-get could not install them: apt-get install$packages" >&2
    exit 1
fi
install look_optional "$1" || echo "going on without these packages, which apt-get could not install:$packages" >&2
exit 0
