#!/usr/bin/env bash
# One SuperLink and three SuperNodes on this machine, without encryption: a first try. Then the same
# run without Flower, and how far the weights are apart.
# Needs: pip install 'fedssl[flower]'. Words after the script's name change the recipe: rounds=2.
set -euo pipefail
. "$(dirname "$0")/common.sh"

make_sites
plain_link
plain_nodes
say "the app"
make_app app "$@"
find "$WORK/app" -type f | sort
run_app app
same_bytes app
case " $* " in
*" privacy.noise="*) echo "noise is different in every run: there is nothing to compare" ;;
*) same_as_local app ;;
esac
say "done: everything is in $WORK"
