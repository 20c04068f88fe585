#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Load: ten minutes of 64 threads on small tensors, which must not grow by more than 2 MB after the second minute, and
# checkpoints of a million weights, of a header of 100 MB, and of one weight of 40 GB, quantized and checked, with their
# seconds and peaks of resident memory. Takes 13 GB of disk.
#
#   NIB_LOAD_SECONDS=60   of the threads
#   NIB_LOAD_PARTS=...    some of: threads million header sparse
set -eu
: "${NIB:?the path of the tool}" "${BUILD:?the build directory}"
folder=${NIB_FOLDER:-$BUILD}/campaign-load
rm -rf "$folder"
mkdir -p "$folder"
trap 'rm -rf "$folder"' EXIT
free=$(df -m --output=avail "$folder" | tail -1)
if [ "$free" -lt 16000 ]; then
    echo "needs 16000 MB of disk in $folder, there are $free"
    exit 77
fi
failures=0

# measured LIMIT STATUS COMMAND...: its line of seconds and MB; the peak must stay below LIMIT MB
measured() {
    local limit=$1 expected=$2 status=0 seconds memory
    shift 2
    python3 tests/campaign/measure.py "$@" >"$folder/log" 2>&1 || status=$?
    read -r seconds memory < <(tail -1 "$folder/log")
    echo "$2: $seconds s, peak $memory MB"
    if [ "$status" != "$expected" ] || [ "$memory" -ge "$limit" ]; then
        echo "FAILED: $*: exit $status, not $expected, or not below $limit MB: $(head -3 "$folder/log")"
        failures=$((failures + 1))
    fi
}

for part in ${NIB_LOAD_PARTS:-threads million header sparse}; do
    echo "== $part"
    case $part in
    threads)
        NIB_LOAD_SECONDS=${NIB_LOAD_SECONDS:-600} "$BUILD/tests/test_load" || failures=$((failures + 1))
        continue
        ;;
    million) limit=2500 ;;
    header) limit=600 ;;
    sparse) limit=600 ;;
    esac
    python3 tests/campaign/load.py $part "$folder/in"
    measured $limit 0 "$NIB" inspect --quick -q "$folder/in"
    measured $limit 0 "$NIB" quantize -q "$folder/in" "$folder/out"
    measured $limit 0 "$NIB" check -q "$folder/out"
    rm -rf "$folder/in" "$folder/out"
done
exit $((failures != 0))
