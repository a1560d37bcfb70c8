#!/usr/bin/env bash
#SBATCH --job-name=ecshare
#SBATCH --nodes=1
#SBATCH --gpus-per-node=3
#SBATCH --exclusive
#SBATCH --time=08:00:00
# Encode, prefill and decode engines and the router as one job, on one node with three GPUs, or on
# several: `sbatch --nodes=3 --gpus-per-node=1 deploy/slurm/epd.sh`, from the top of the repository,
# in an environment with vLLM and ecshare. Stages go to the nodes in turn; the router runs on the
# first. When one ends, all end. Settings are those of examples/one_box/engine.sh, MODEL and STORE
# (a folder that all nodes see, or s3://bucket/prefix) above all.
#
# Others of the cluster reach these ports. So KEYS has two files, which only you may read:
# router.key, which engines and router share, and api.key, which engines want for all of /v1, and
# which clients send as `Authorization: Bearer`. `openssl rand -hex 32` makes one.
set -euo pipefail
KEYS=${KEYS:-$HOME/.config/ecshare}
engine=$PWD/examples/one_box/engine.sh

die() {
    echo "epd.sh: $1" >&2
    exit 2
}
[[ -r $engine ]] || die "submit it from the top of the repository: $engine is not there"
for key in router api; do
    [[ -s $KEYS/$key.key ]] || die "$KEYS/$key.key is missing: openssl rand -hex 32 makes one"
done
[[ -n ${STORE-} ]] || die "STORE must be a folder that all nodes see, or s3://bucket/prefix"
export ECSHARE_ROUTER_KEY=file:$KEYS/router.key
VLLM_API_KEY=$(<"$KEYS/api.key")
export VLLM_API_KEY STORE HOST=0.0.0.0 DEVICE=${DEVICE:-cuda}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null; wait' EXIT
trap 'exit 143' INT TERM
declare -A urls
i=0
for stage in encode prefill decode; do
    node=${nodes[i++ % ${#nodes[@]}]}
    port=${stage^^}_PORT
    urls[$stage]=http://$node:${!port:-800$i}
    srun --nodes=1 --ntasks=1 --nodelist="$node" --gpus=1 --exact --kill-on-bad-exit \
        bash "$engine" "$stage" --middleware=ecshare.plugin.gate.RouterGate &
done
export ENCODE_URLS=${urls[encode]} PREFILL_URLS=${urls[prefill]} DECODE_URLS=${urls[decode]}
echo "The router is http://${nodes[0]}:${ROUTER_PORT:-8000} when its /health says ok."
bash "$engine" router --router-key="$ECSHARE_ROUTER_KEY" &
wait -n
