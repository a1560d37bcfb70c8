#!/usr/bin/env bash
# One stage of the split, in the foreground: engine.sh encode|prefill|decode|plain|router
#
# These are the commands to copy: one a Slurm task, systemd unit or Kubernetes container. Engines
# share nothing but MODEL, written alike everywhere (it is part of what objects are called), and
# the store. Only the router knows addresses.
set -euo pipefail
stage=${1:?which stage: encode, prefill, decode, plain or router}

MODEL=${MODEL:-Qwen/Qwen2.5-VL-3B-Instruct}
STORE=${STORE:-$PWD/ecshare-store}              # a folder, or s3://bucket/prefix with keys in AWS_*
OPTIONS=${OPTIONS:-"{\"url\": \"$STORE\"}"}     # all options of both connectors: docs/config.md
DEVICE=${DEVICE:-cpu}                           # cpu, or cuda: GPU 0, 1 and 2, one an engine
HOST=${HOST:-127.0.0.1}
ROUTER_PORT=${ROUTER_PORT:-8000}
ENCODE_PORT=${ENCODE_PORT:-8001}
PREFILL_PORT=${PREFILL_PORT:-8002}
DECODE_PORT=${DECODE_PORT:-8003}
PLAIN_PORT=${PLAIN_PORT:-8004}
# Requests come here with and without their picture; vLLM's cache of inputs would confuse the two.
SEES_ANEW=--mm-processor-cache-gb=0

ec() { # encoder cache: ec_producer stores embeddings, ec_consumer loads them, ec_both does both
    echo "--ec-transfer-config={\"ec_connector\": \"ECShareConnector\", \"ec_role\": \"$1\"," \
        "\"ec_connector_extra_config\": $OPTIONS}"
}
kv() { # KV cache: kv_producer stores blocks, kv_consumer loads them, kv_both does both
    echo "--kv-transfer-config={\"kv_connector\": \"KVShareConnector\", \"kv_role\": \"$1\"," \
        "\"kv_connector_extra_config\": $OPTIONS}"
}
serve() { # serve GPU PORT ARGUMENT...
    if [[ $DEVICE == cuda ]]; then
        export CUDA_VISIBLE_DEVICES=$1
    else
        export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GB
        # Three engines share the cores: left alone, each would pin a spinning thread to every one.
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + 2) / 3))}
        export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
        set -- "$@" --dtype=float32 --enforce-eager --max-model-len=4096 --max-num-seqs=8
    fi
    exec python -m vllm.entrypoints.openai.api_server --model="$MODEL" --host="$HOST" \
        --port="$2" --enable-prompt-tokens-details "${@:3}"
}

case $stage in
    encode) serve 0 "$ENCODE_PORT" "$(ec ec_producer)" ;;
    prefill) serve 1 "$PREFILL_PORT" "$(ec ec_consumer)" "$(kv kv_both)" "$SEES_ANEW" ;;
    decode) serve 2 "$DECODE_PORT" "$(ec ec_consumer)" "$(kv kv_both)" "$SEES_ANEW" ;;
    plain) serve 3 "$PLAIN_PORT" ;; # all stages in one engine, nothing shared: to compare with
    router) exec python -m ecshare.router --host="$HOST" --port="$ROUTER_PORT" \
        --encoder="http://$HOST:$ENCODE_PORT" --prefiller="http://$HOST:$PREFILL_PORT" \
        --decoder="http://$HOST:$DECODE_PORT" ;;
    *) echo "no such stage: $stage" >&2 && exit 2 ;;
esac
