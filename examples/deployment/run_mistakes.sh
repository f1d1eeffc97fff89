#!/usr/bin/env bash
# What goes wrong at sites and at the server, and the one line that says so where a person looks: in
# the SuperNode's log and in that of `flwr run --stream`. Plain mode; about six minutes.
# Needs: pip install 'fedssl[flower]'.
set -euo pipefail
. "$(dirname "$0")/common.sh"

try() { # NAME TEXT FLWR-OPTIONS…: a run that must end by itself and say the text
    local app=$1 text=$2 since=$SECONDS
    shift 2
    flwr run "$WORK/$app" here --stream "$@" >"$WORK/$app.log" 2>&1 &
    wait $!
    says "$WORK/$app.log" "$text"
    local run
    run=$(sed -n 's/.*started run \([0-9]*\).*/\1/p' "$WORK/$app.log" | tail -n 1)
    [[ $(status_of "$run") == finished:failed* ]] || fail "it should have failed: $app"
    echo "(ended after $((SECONDS - since)) s)"
}

says() { # FILE TEXT: one line of a log does, however often
    local lines
    lines=$(grep -a -- "^fedssl: .*$2" "$1" | sort -u) || fail "no line in $1 with: $2"
    echo "$(basename "$1" .log): $lines"
    (($(wc -l <<<"$lines") == 1)) || fail "more than one line"
}

make_sites
mkdir "$WORK/data/empty" "$WORK/data/large"
python3 - "$WORK/data/large" <<'PY'
import sys
from PIL import Image
for i in range(40):
    Image.new("L", (24, 24), i).save(f"{sys.argv[1]}/{i}.png")
PY
plain_link

say "one site as it should be, one without data, one with a wrong folder, one with an empty folder"
make_app missing engine.timeout=90
plain_node site-a
plain_node no-data 'name="us"'
plain_node no-folder "data=\"$WORK/data/nowhere\""
plain_node empty
for name in site-a no-data no-folder empty; do wait_for 60 "SuperNode ID" "$WORK/$name.log"; done
try missing "only 1 of 3 sites connected in time (site-a)"
for text in "node-config data: not given" "no such folder" "no images"; do
    says "$WORK/missing.log" "$text"
done
says "$WORK/no-data.log" "not given"
says "$WORK/no-folder.log" "no such folder"
says "$WORK/empty.log" "no images"
for name in no-data no-folder empty; do kill "${PID[$name]}"; done

say "images of different sizes at two sites, and no data.size"
make_app sizes engine.sites=2 data.size=null
plain_node large
wait_for 60 "SuperNode ID" "$WORK/large.log"
try sizes "the images' height is"

say "resume, where there is nothing to resume"
make_app nothing engine.sites=2
try nothing "holds no run" --run-config 'resume=true'

say "a second run into the folder of one that is at work, and after it"
make_app twice engine.sites=2 rounds=1
flwr run "$WORK/twice" here --stream >"$WORK/once.log" 2>&1 &
ONCE=$!
for _ in $(seq 300); do
    [[ -e $WORK/twice/run/config.yaml ]] && break
    sleep 0.2
done
try twice "a run is at work there" --run-config 'resume=true'
wait "$ONCE"
try twice "holds a run. Continue it with"
say "done: everything is in $WORK"
