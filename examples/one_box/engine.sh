#!/usr/bin/env bash
# One stage of the split, in the foreground:
#
#     engine.sh encode|prefill|decode|plain|router [ARGUMENT...]
#
# One Slurm task, systemd unit or container runs one stage. ARGUMENTs go to vLLM, or to the router;
# they come last, so they win. Engines share nothing but MODEL and the store; only the router knows
# addresses. All settings are environment variables:
#
#   MODEL    written alike everywhere: it is part of what objects are called
#   STORE    a folder, or s3://bucket/prefix with its keys in AWS_*
#   OPTIONS  further options of both connectors, a JSON object: docs/config.md. `ps` shows them
#            to everybody, so a secret goes as {"integrity_key": "env:NAME"} or "file:/path".
#   DEVICE   cpu, or cuda: the GPUs that CUDA_VISIBLE_DEVICES names, as your scheduler sets it;
#            the first ones of the machine where it is not set
#   TENSOR_PARALLEL_SIZE, GPU_MEMORY_UTILIZATION, MAX_MODEL_LEN, MAX_NUM_SEQS, DTYPE
#            vLLM's options of the same names
#   HOST     the address to listen on; 0.0.0.0 lets other hosts in
#   ENCODE_PORT, PREFILL_PORT, DECODE_PORT, PLAIN_PORT, ROUTER_PORT
#   ENCODE_URLS, PREFILL_URLS, DECODE_URLS
#            where the router finds the engines, separated by blanks; on this machine where not set.
#            Set and empty, there is no such stage: ENCODE_URLS= for a model that only reads text
#            (set it for prefill and decode too), PREFILL_URLS= where decode engines prefill.
set -euo pipefail
set -f # a url such as http://[::1]:8001 is no file name pattern

die() {
    echo "engine.sh: $1" >&2
    exit 2
}
[[ ${1-} =~ ^(encode|prefill|decode|plain|router)$ ]] ||
    die "the stage must be encode, prefill, decode, plain or router, not '${1-}'"
stage=$1
shift
command -v python >/dev/null ||
    die "there is no python on PATH: activate the environment that has vLLM and ecshare"

MODEL=${MODEL:-Qwen/Qwen2.5-VL-3B-Instruct}
export STORE=${STORE:-$PWD/ecshare-store} OPTIONS=${OPTIONS:-"{}"}
DEVICE=${DEVICE:-cpu}
HOST=${HOST:-127.0.0.1}
ROUTER_PORT=${ROUTER_PORT:-8000}
ENCODE_PORT=${ENCODE_PORT:-8001}
PREFILL_PORT=${PREFILL_PORT:-8002}
DECODE_PORT=${DECODE_PORT:-8003}
PLAIN_PORT=${PLAIN_PORT:-8004}
arguments=()

check() { # check NAME PATTERN MEANING: end with a sentence unless the variable NAME is right
    [[ ${!1} =~ ^($2)$ ]] || die "$1 must be $3, not '${!1}'"
}
option() { # option NAME PATTERN MEANING: give vLLM its option NAME, if that variable is set
    [[ -n ${!1-} ]] || return 0
    check "$@"
    local flag=${1,,}
    arguments+=("--${flag//_/-}=${!1}")
}
exists() { # exists STAGE: has the split such a stage? Not where its urls are set and empty
    local urls=${1}_URLS
    [[ ${!urls-not set} =~ [^[:space:]] ]]
}
connector() { # connector ec|kv CLASS ROLE: have vLLM load a connector
    local config
    config=$(python -I -c '
import json, os, sys
kind, name, role = sys.argv[1:]
try:
    options = {"url": os.environ["STORE"], **json.loads(os.environ["OPTIONS"])}
except (ValueError, TypeError) as wrong:
    print(f"engine.sh: OPTIONS must be a JSON object: {wrong}", file=sys.stderr)
    sys.exit(2)
config = {"connector": name, "role": role, "connector_extra_config": options}
print(json.dumps({f"{kind}_{key}": value for key, value in config.items()}))' "$@")
    arguments+=("--$1-transfer-config=$config")
}
serve() { # serve ARGUMENT...
    if [[ $DEVICE == cpu ]]; then
        export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GB
        # Three engines share the cores: left alone, each would pin a spinning thread to every one.
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + 2) / 3))}
        export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
        # A single rank in the process of its scheduler, as on a GPU: of two, one would spin.
        export VLLM_ENABLE_V1_MULTIPROCESSING=${VLLM_ENABLE_V1_MULTIPROCESSING:-0}
        DTYPE=${DTYPE:-float32} MAX_MODEL_LEN=${MAX_MODEL_LEN:-4096} MAX_NUM_SEQS=${MAX_NUM_SEQS:-8}
        arguments+=(--enforce-eager)
    fi
    option TENSOR_PARALLEL_SIZE '[1-9][0-9]*' 'a whole number, at least 1'
    option GPU_MEMORY_UTILIZATION '0?\.[0-9]+|1|1\.0+' 'a number above 0, at most 1'
    option MAX_MODEL_LEN '[0-9]+(\.[0-9]+)?[kKmM]?|auto' 'a number of tokens such as 8192 or 32k'
    option MAX_NUM_SEQS '[1-9][0-9]*' 'a whole number, at least 1'
    option DTYPE '[a-z0-9]+' 'a type such as bfloat16'
    exec python -m vllm.entrypoints.openai.api_server --model="$MODEL" --host="$HOST" \
        --port="$port" --enable-prompt-tokens-details "${arguments[@]}" "$@"
}
urls() { # urls --encoder|--prefiller|--decoder URLS
    local url
    for url in $2; do
        arguments+=("$1=$url")
    done
}
route() { # route ARGUMENT...
    exists DECODE || die "DECODE_URLS is empty: the router needs a decode engine"
    urls --encoder "${ENCODE_URLS-http://127.0.0.1:$ENCODE_PORT}"
    urls --prefiller "${PREFILL_URLS-http://127.0.0.1:$PREFILL_PORT}"
    urls --decoder "${DECODE_URLS-http://127.0.0.1:$DECODE_PORT}"
    exec python -m ecshare.router --host="$HOST" --port="$port" "${arguments[@]}" "$@"
}

check DEVICE 'cpu|cuda' 'cpu or cuda'
# Kubernetes sets DECODE_PORT=tcp://... for a Service called decode: see enableServiceLinks.
check "${stage^^}_PORT" '[1-9][0-9]{0,4}' 'a port number'
port_name=${stage^^}_PORT
port=${!port_name}
case $stage in
    encode) connector ec ECShareConnector ec_producer ;;
    prefill | decode)
        if exists ENCODE; then connector ec ECShareConnector ec_consumer; fi
        connector kv KVShareConnector kv_both
        # Requests come here with and without their picture; vLLM's cache of inputs would confuse
        # the two.
        arguments+=(--mm-processor-cache-gb=0)
        ;;
    plain) ;; # all stages in one engine, nothing shared: to compare with
    router) route "$@" ;;
esac
serve "$@"
