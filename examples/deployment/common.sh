# What the run_*.sh scripts share. Everything is in $WORK; everything started is ended.
for tool in fedssl flwr flower-superlink; do
    command -v "$tool" >/dev/null || {
        echo "$tool is not on the PATH: pip install '.[flower]' and activate that environment" >&2
        exit 2
    }
done
SITES=(site-a site-b site-c)
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=${WORK:-$(mktemp -d -t fedssl-deployment.XXXXXX)}
mkdir -p "$WORK"
WORK=$(cd "$WORK" && pwd)
export FLWR_HOME=$WORK/flower FEDSSL_STATE=$WORK/state FEDSSL_CACHE=$WORK/cache
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
export OMP_NUM_THREADS=1 # all sites are on this one machine
declare -A PID=() # of what was started, by name
PORT=${LINK_PORT:-} # the SuperLink's
# Sites may connect to another port, behind which something forwards to the SuperLink.

say() { printf '\n== %s\n' "$*"; }

fail() {
    printf 'failed: %s; logs are in %s\n' "$*" "$WORK" >&2
    exit 1
}

descendants() { # PID: a process and all below it, parents first
    ps -eo pid=,ppid= | awk -v root="$1" '
        { parent[$1] = $2; order[NR] = $1 }
        END {
            below[root] = 1
            print root
            do {
                more = 0
                for (i = 1; i <= NR; i++) {
                    p = order[i]
                    if (!(p in below) && (parent[p] in below)) { below[p] = more = 1; print p }
                }
            } while (more)
        }'
}

any_left() { # PIDS…: whether one of them is still there, and not just waiting to be reaped
    local pid
    for pid in "$@"; do
        [[ $(ps -o stat= -p "$pid" 2>/dev/null) == [!Z]* ]] && return 0
    done
    return 1
}

end_all() {
    trap - EXIT
    local own all
    mapfile -t own < <(jobs -pr)
    mapfile -t all < <(for pid in "${own[@]}"; do descendants "$pid"; done)
    kill "${own[@]}" 2>/dev/null || true
    for _ in $(seq 50); do
        any_left "${all[@]}" || return 0
        sleep 0.3
    done
    kill -9 "${all[@]}" 2>/dev/null || true
}
trap end_all EXIT
trap 'exit 130' INT TERM

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

start() { # NAME COMMAND…: in the background, its log in $WORK/NAME.log
    local name=$1
    shift
    "$@" >>"$WORK/$name.log" 2>&1 </dev/null &
    PID[$name]=$!
}

wait_for() { # SECONDS TEXT FILE: until the file has the text; PATIENCE times as long
    for _ in $(seq $(($1 * 5 * ${PATIENCE:-1}))); do
        grep -aq -- "$2" "$3" 2>/dev/null && return
        sleep 0.2
    done
    tail -n 20 "$3" >&2
    fail "no '$2' in $3 after $1 s"
}

connect() { # ADDRESS-LINES…: how flwr finds the SuperLink
    mkdir -p "$FLWR_HOME"
    printf '[superlink]\ndefault = "here"\n\n[superlink.here]\n' >"$FLWR_HOME/config.toml"
    printf '%s\n' "$@" >>"$FLWR_HOME/config.toml"
}

make_sites() {
    say "three sites with different digits, in $WORK/data"
    python3 "$HERE/make_sites.py" "$WORK/data" --sites ${#SITES[@]} ${IMAGES:+--most "$IMAGES"}
}

plain_link() { # [NAME]: the SuperLink, without encryption; again at the same port with another name
    PORT=${PORT:-$(free_port)}
    connect "address = \"127.0.0.1:$PORT\"" "insecure = true"
    say "the SuperLink, port $PORT"
    start "${1:-superlink}" flower-superlink --insecure --host 127.0.0.1 --port "$PORT" \
        --database "$WORK/superlink.db" --disable-runtime-dependency-installation
    wait_for 60 "Uvicorn running" "$WORK/${1:-superlink}.log"
}

plain_node() { # NAME [NODE-CONFIG]: a SuperNode, without encryption
    FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1 start "$1" flower-supernode --insecure --superlink "127.0.0.1:${NODES_PORT:-$PORT}" \
        --port "$(free_port)" --node-config "${2-data=\"$WORK/data/$1\"}"
}

plain_nodes() {
    say "a SuperNode at each site"
    local site
    for site in "${SITES[@]}"; do plain_node "$site"; done
    for site in "${SITES[@]}"; do wait_for 60 "SuperNode ID" "$WORK/$site.log"; done
}

make_app() { # NAME WORDS…: the Flower app of a recipe, in $WORK/NAME
    local app=$WORK/$1
    shift
    fedssl deploy init "$app" default engine.sites=${#SITES[@]} cohort.size=null rounds=5 \
        engine.timeout=120 engine.threads=1 device=cpu "$@"
}

status_of() { # RUN-ID: of a run; flwr run exits with 0 even if the run failed
    flwr list here --run-id "$1" --format json | python3 -c '
import json, sys
run = json.load(sys.stdin)["runs"][0]
print(run["status"], run["status-details"], "after %.0f s" % run["elapsed"])'
}

run_app() { # NAME FLWR-OPTIONS…: to its end, with its log
    local app=$1
    shift
    say "the run"
    flwr run "$WORK/$app" here --stream "$@" > >(tee "$WORK/$app.log") 2>&1 &
    wait $!
    local run status
    run=$(sed -n 's/.*started run \([0-9]*\).*/\1/p' "$WORK/$app.log" | tail -n 1)
    for _ in $(seq 240); do # the stream may end before the run does
        status=$(status_of "$run")
        [[ $status == finished:* ]] && break
        sleep 5
    done
    echo "$status"
    [[ $status == finished:completed* ]] || fail "the run did not complete"
    ls "$WORK/$app/run"
}

same_as_local() { # NAME: the same run by the local engine, client by client; the weights must agree
    say "the same run without Flower (engine.name=local), and how far the weights are apart"
    fedssl run "$WORK/$1/fedssl_app/recipe.yaml" engine.name=local engine.merge=off \
        engine.sites=null data.root="$WORK/data/all" data.levels=client privacy.secure=false \
        evaluate.protocols=unlabeled --out "$WORK/$1-local" >"$WORK/$1-local.log" 2>&1 ||
        fail "the run without Flower: $(tail -n 1 "$WORK/$1-local.log")"
    python3 "$HERE/compare.py" "$WORK/$1/run" "$WORK/$1-local" --most "${MOST:-1e-5}" ||
        fail "the weights are not those of the local engine"
}

same_bytes() { # NAME: what the sites recorded must be what the server counted
    say "what the sites recorded that they sent, and what the server counted"
    python3 "$HERE/records.py" "$WORK/$1/run" "$FEDSSL_STATE" ||
        fail "the sites' records (sent.jsonl) are not what the server counted"
}
