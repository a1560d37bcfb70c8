#!/usr/bin/env bash
# Encode, prefill and decode engines and the router on this machine. When one ends, all end.
#
#     MODEL=... STORE=... DEVICE=cuda examples/one_box/run.sh [ARGUMENT...]
#
# Settings are those of engine.sh; each engine's vLLM gets the ARGUMENTs. A stage whose ..._URLS is
# set is not started: it runs elsewhere, or it is left out. On GPUs each engine gets its share,
# TENSOR_PARALLEL_SIZE of them, of those that CUDA_VISIBLE_DEVICES names, or of the machine's.
# Engines listen on 127.0.0.1 alone; HOST is for the router. Logs go to the folder LOGS.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
logs=${LOGS:-$PWD/ecshare-logs}

die() {
    echo "run.sh: $*" >&2
    exit 2
}

engines=()
for stage in encode prefill decode; do
    [[ -v ${stage^^}_URLS ]] || engines+=("$stage")
done

if [[ ${DEVICE:-cpu} == cuda ]]; then
    each=${TENSOR_PARALLEL_SIZE:-1}
    [[ $each =~ ^[1-9][0-9]*$ ]] ||
        die "TENSOR_PARALLEL_SIZE must be a whole number, at least 1, not '$each'"
    needed=$((${#engines[@]} * each))
    [[ -v CUDA_VISIBLE_DEVICES ]] || CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((needed - 1)))
    IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES// /}"
    ((${#devices[@]} >= needed)) ||
        die "${#engines[@]} engines with TENSOR_PARALLEL_SIZE=$each need $needed GPUs, but" \
            "CUDA_VISIBLE_DEVICES names ${#devices[@]}: name more, or start engine.sh on several hosts"
fi

declare -A processes
start() { # start STAGE SETTING... COMMAND ARGUMENT...
    env "${@:2}" >"$logs/$1.log" 2>&1 &
    processes[$1]=$!
}
mkdir -p "$logs"
trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null; wait' EXIT
trap 'exit 130' INT TERM
for i in "${!engines[@]}"; do
    settings=(HOST=127.0.0.1)
    [[ ${DEVICE:-cpu} != cuda ]] ||
        settings+=("CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${devices[*]:i*each:each}")")
    start "${engines[i]}" "${settings[@]}" bash "$here/engine.sh" "${engines[i]}" "$@"
done
start router bash "$here/engine.sh" router
echo "Starting; logs are in $logs. Ready when http://127.0.0.1:${ROUTER_PORT:-8000}/health says ok."

wait -n || true
for stage in "${!processes[@]}"; do
    kill -0 "${processes[$stage]}" 2>/dev/null || {
        echo "$stage has ended, so all end; $logs/$stage.log ends with:"
        tail -n 5 "$logs/$stage.log"
    } >&2
done
exit 1
