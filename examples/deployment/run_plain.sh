#!/usr/bin/env bash
# One SuperLink and three SuperNodes on this machine, without encryption: a first try.
# Needs: pip install 'fedssl[flower]'. Words after the script's name change the recipe: rounds=2.
set -euo pipefail
. "$(dirname "$0")/common.sh"

make_sites
PORT=$(free_port)
connect "address = \"127.0.0.1:$PORT\"" "insecure = true"

say "the SuperLink, port $PORT"
start superlink flower-superlink --insecure --host 127.0.0.1 --port "$PORT" \
    --database "$WORK/superlink.db" --disable-runtime-dependency-installation
wait_for 60 "Uvicorn running" "$WORK/superlink.log"

say "a SuperNode at each site"
for site in "${SITES[@]}"; do
    start "$site" flower-supernode --insecure --superlink "127.0.0.1:$PORT" \
        --port "$(free_port)" --node-config "data=\"$WORK/data/$site\""
done
for site in "${SITES[@]}"; do wait_for 60 "SuperNode ID" "$WORK/$site.log"; done

run_app "$@"
