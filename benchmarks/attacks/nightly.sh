#!/usr/bin/env bash
# All attacks with their full counts, one line each: about an hour on two quiet cores. Fails if one of
# them finds something. SEED (of what is drawn) is the day unless given.
set -uo pipefail
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python} SEED=${SEED:-$(date +%Y%m%d)} failed=0
attack() { "$PYTHON" "$@" || { echo "found by: $*, SEED=$SEED" >&2 && failed=1; }; }
attack kills.py --count 1000 --seed "$SEED"
attack kills.py --operations
attack messages.py --count 50000 --seed "$SEED"
attack sums.py --count 5000 --seed "$SEED"
attack configurations.py --count 5000 --seed "$SEED"
attack wire.py
attack inversion.py  # a measurement: it finds images, and fails only if it cannot run
exit $failed
