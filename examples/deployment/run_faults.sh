#!/usr/bin/env bash
# Three sites and a server on this machine, some of which are killed (SIGKILL) in the middle of a
# round: FedEMA with BYOL, whose clients keep a state. Plain mode; 8 to 15 minutes on two cores.
# 1. A site is killed, and started again; then the server's program is killed, and resumed.
# 2. The whole server is killed, started again, and the run resumed: the SuperNodes come back by
#    themselves, and the weights must be those of a run without Flower.
# Needs: pip install 'fedssl[flower]'.
set -euo pipefail
. "$(dirname "$0")/common.sh"
WORDS=(algorithm.name=fedema objective.name=byol 'objective.projector=[64,32]'
    'objective.predictor=[64,32]' encoder.norm=batch algorithm.local_steps=null
    algorithm.local_epochs=1 algorithm.batch=32 client.lr=0.03 server.optimizer=sgd server.lr=1
    rounds=6 engine.timeout=180 cohort.minimum=2)

program() { # PID NAME: the processes of this name below a process
    local pid
    for pid in $(descendants "$1"); do
        if tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -q -- "/$2 "; then echo "$pid"; fi
    done
}

submit() { # NAME FLWR-OPTIONS…: starts a run, and sets RUN to its number
    local app=$1
    shift
    RUN=$(flwr run "$WORK/$app" here --format json "$@" |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["run-id"])')
    echo "run $RUN of $app $*"
}

rounds_done() { # NAME: how many rounds the metrics have
    { cat "$WORK/$1/run/metrics.jsonl" 2>/dev/null || true; } | wc -l
}

committed() { # NAME: how many rounds the checkpoint has
    python3 -c '
import json, sys
with open(sys.argv[1], "rb") as file:
    print(json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]["round"])' \
        "$WORK/$1/run/checkpoint/state.safetensors" 2>/dev/null || echo 0
}

wait_rounds() { # NAME COUNT: until so many rounds are done
    for _ in $(seq 1500); do
        (($(rounds_done "$1") >= $2)) && return
        sleep 0.2
    done
    fail "round $2 of $1 is not done after 300 s"
}

next_message() { # SITE: until a new message has been at work there for a second
    local before now
    before=$(program "${PID[$1]}" flwr-clientapp)
    for _ in $(seq 600); do
        now=$(program "${PID[$1]}" flwr-clientapp)
        if [[ -n $now && $now != "$before" ]]; then
            sleep 1
            return
        fi
        sleep 0.1
    done
    fail "no message for $1 within a minute"
}

kill_tree() { # NAME: what was started under this name and all below it, at once
    local all
    mapfile -t all < <(descendants "${PID[$1]}")
    kill -9 "${all[@]}" 2>/dev/null || true
    wait "${PID[$1]}" 2>/dev/null || true
}

kill_server() { # the program that runs the rounds; the SuperLink stays
    local pid
    pid=$(program "${PID[superlink]}" flwr-serverapp)
    [[ -n $pid ]] || fail "no server app is running"
    kill -9 "$pid"
}

wait_end() { # until run $RUN has ended, well
    local status
    for _ in $(seq 150); do
        status=$(status_of "$RUN")
        [[ $status == finished:* ]] && break
        sleep 2
    done
    flwr log "$RUN" here --show 2>/dev/null | grep -a "fedssl\|no reply\|skipped" || true
    echo "run $RUN: $status"
    [[ $status == finished:completed* ]] || fail "the run did not complete"
}

make_sites
plain_link
plain_nodes

say "1. a site and the server are killed"
make_app first "${WORDS[@]}" checkpoint.seconds=0
submit first
wait_rounds first 1
next_message site-b
kill_tree site-b # SuperNode, its helper, and the client's program that is at work
LOST=$(($(rounds_done first) + 1))
plain_node site-b
echo "site-b: killed in round $LOST, and started again at once"
wait_rounds first $((LOST + 2))
next_message site-a
kill_server
echo "server: killed in round $(($(rounds_done first) + 1)), $(committed first) in the checkpoint"
submit first --run-config 'resume=true'
wait_end
python3 "$HERE/check_faults.py" "$WORK/first/run" "$FEDSSL_STATE" --lost site-b "$LOST"

say "2. SuperLink and server are killed, after rounds that are not in the checkpoint"
make_app second "${WORDS[@]}" checkpoint.seconds=45
submit second
for _ in $(seq 1000); do # until the checkpoint has a round, and lacks a later one; or 5 are done
    before=$(rounds_done second)
    sleep 0.5 # a checkpoint is written just after the line
    kept=$(committed second)
    ((before >= 5 || (kept >= 1 && before > kept))) && break
done
next_message site-c
kill_tree superlink
echo "server: killed in round $(($(rounds_done second) + 1)), $(committed second) in the checkpoint"
plain_link superlink-again
submit second --run-config 'resume=true'
wait_end
python3 "$HERE/check_faults.py" "$WORK/second/run" "$FEDSSL_STATE"
same_as_local second
say "done: everything is in $WORK"
