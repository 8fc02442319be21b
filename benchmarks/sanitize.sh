#!/usr/bin/env bash
# Runs the kernels' tests under compute-sanitizer's memcheck and initcheck: addresses out of bounds, memory that is freed
# or was never written. It needs a GPU, compute-sanitizer (CUDA toolkit), and Python with this project and pytest.
#
# usage: benchmarks/sanitize.sh LOGS [SECONDS]
#
#   LOGS      folder for memcheck.log and initcheck.log; made where there is none
#   SECONDS   most that each tool may take (600)
#
# PYTHON and COMPUTE_SANITIZER name other programs than `python` and `compute-sanitizer`. It ends with 0 if both tools
# found nothing, with 1 if one found something or ran out of time, and with 2 if it could not begin.
set -uo pipefail

TESTS=(
    verify_kernels commit_kernels contemplate_kernels tail_attention exact_attention tree_builders continuity dart_inputs
    router_kernels experience heterospec lookup counters
)

refuse() {
    echo "benchmarks/sanitize.sh: $1" >&2
    exit 2
}

run_tool() { # tool: one line about what it found
    local log="$logs/$1.log" rc found
    # Without PyTorch's own pools a tensor's memory is freed when the tensor is, and its neighbours are out of bounds.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout --kill-after=10 "$seconds" "$sanitizer" --tool "$1" --error-exitcode 99 \
        --target-processes all "$python" -m pytest -q -p no:xdist -k "not hopper" "${files[@]}" >"$log" 2>&1
    rc=$?
    case $rc in
    0) found="found nothing" ;;
    124 | 137) found="was ended after $seconds s; give more seconds, or name fewer tests" ;;
    *) found="failed ($rc): $(grep "ERROR SUMMARY" "$log" | tail -n 1 || true)" ;;
    esac
    echo "$1: $found; see $log"
    return $((rc != 0))
}

if [[ $# -lt 1 || $# -gt 2 || $1 == -h || $1 == --help ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    [[ ${1:-} == -h || ${1:-} == --help ]] && exit 0
    exit 2
fi
logs=$1 seconds=${2:-600} python=${PYTHON:-python} sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || refuse "SECONDS is '$seconds'; give a whole number above 0"
"$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null ||
    refuse "torch of '$python' sees no GPU; run it on a machine with one, or set PYTHON to an environment that has CUDA"
command -v "$sanitizer" >/dev/null ||
    refuse "there is no '$sanitizer'; install the CUDA toolkit, or set COMPUTE_SANITIZER to its path"
mkdir -p "$logs" || refuse "the folder '$logs' cannot be made; name another one"

folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/../tests" && pwd)
files=()
for name in "${TESTS[@]}"; do files+=("$folder/test_$name.py"); done
failed=0
for tool in memcheck initcheck; do run_tool "$tool" || failed=1; done
exit $failed
