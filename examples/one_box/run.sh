#!/usr/bin/env bash
# Encode, prefill and decode engines and the router on this machine, until Ctrl-C.
# Settings are engine.sh's: MODEL=... STORE=... DEVICE=cuda examples/one_box/run.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
logs=${LOGS:-$PWD/ecshare-logs}
mkdir -p "$logs"

trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null; wait' EXIT
trap 'exit 130' INT TERM
for stage in encode prefill decode router; do
    bash "$here/engine.sh" "$stage" >"$logs/$stage.log" 2>&1 &
done
echo "Starting; logs are in $logs. Ready when http://127.0.0.1:${ROUTER_PORT:-8000}/health says ok."
wait -n || true
echo "A stage ended: see its log in $logs." >&2
exit 1
