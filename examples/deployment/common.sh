# What run_plain.sh and run_tls.sh share. Everything is in $WORK; everything started is ended.
SITES=(site-a site-b site-c)
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=${WORK:-$(mktemp -d -t fedssl-deployment.XXXXXX)}
mkdir -p "$WORK"
WORK=$(cd "$WORK" && pwd)
export FLWR_HOME=$WORK/flower FEDSSL_STATE=$WORK/state FEDSSL_CACHE=$WORK/cache
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1
STARTED=()

say() { printf '\n== %s\n' "$*"; }

fail() {
    printf 'failed: %s; logs are in %s\n' "$*" "$WORK" >&2
    exit 1
}

end_all() {
    trap - EXIT
    local pid
    for pid in "${STARTED[@]}"; do kill "$pid" 2>/dev/null || true; done
    for _ in $(seq 50); do
        local left=0
        for pid in "${STARTED[@]}"; do kill -0 "$pid" 2>/dev/null && left=1; done
        ((left)) || break
        sleep 0.2
    done
    for pid in "${STARTED[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
}
trap end_all EXIT
trap 'exit 130' INT TERM

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

start() { # NAME COMMAND…: in the background, its log in $WORK/NAME.log
    local name=$1
    shift
    "$@" >"$WORK/$name.log" 2>&1 </dev/null &
    STARTED+=($!)
}

wait_for() { # SECONDS TEXT FILE: until the file has the text
    for _ in $(seq $(($1 * 5))); do
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
    python3 "$HERE/make_sites.py" "$WORK/data" --sites ${#SITES[@]}
}

run_app() { # the app of a recipe, run to its end
    say "the app"
    fedssl deploy init "$WORK/app" default engine.sites=${#SITES[@]} cohort.size=null \
        rounds="${ROUNDS:-5}" engine.timeout=120 engine.threads=1 "$@"
    find "$WORK/app" -type f | sort
    say "the run"
    flwr run "$WORK/app" here --stream
    # flwr run exits with 0 even if the run failed.
    flwr list here --format json >"$WORK/runs.json"
    python3 - "$WORK/runs.json" <<'END' || fail "the run did not complete"
import json, sys
run = json.load(open(sys.argv[1]))["runs"][0]
print(run["status"], run["status-details"], f"{run['elapsed']:.0f} s")
sys.exit(run["status"] != "finished:completed")
END
    say "the result"
    ls -l "$WORK/app/run"
    echo "everything is in $WORK"
}
