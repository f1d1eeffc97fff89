#!/usr/bin/env bash
# One SuperLink and three SuperNodes on this machine, with TLS and a key for each site; and two that
# are not let in. Needs: pip install 'fedssl[flower]', openssl, ssh-keygen. Words after the script's
# name change the recipe: rounds=2.
set -euo pipefail
. "$(dirname "$0")/common.sh"

authority() { # NAME: a certificate authority
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -days 365 \
        -subj "/CN=$1" -keyout "$WORK/$1.key" -out "$WORK/$1.crt" 2>/dev/null
}

node() { # NAME DATA CA KEY: a SuperNode
    FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1 start "$1" flower-supernode --superlink "127.0.0.1:${NODES_PORT:-$PORT}" --port "$(free_port)" \
        --root-certificates "$3" --auth-supernode-private-key "$4" --node-config "data=\"$2\""
}

refused() { # NAME TEXT: a SuperNode that must not come in; why, and that it has ended
    wait_for 60 "$2" "$WORK/$1.log"
    for _ in $(seq 50); do
        kill -0 "${PID[$1]}" 2>/dev/null || break
        sleep 0.2
    done
    grep -a -- "$2" "$WORK/$1.log" | tail -n 1 | cut -c 1-110 | sed "s/^/$1: /"
    ! grep -aq "SuperNode ID" "$WORK/$1.log" || fail "$1 was let in"
}

make_sites
say "certificates and keys"
umask 077
authority ca
authority other-ca
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -subj '/CN=localhost' \
    -keyout "$WORK/server.key" -out "$WORK/server.csr" 2>/dev/null
printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\n' >"$WORK/san"
openssl x509 -req -in "$WORK/server.csr" -CA "$WORK/ca.crt" -CAkey "$WORK/ca.key" \
    -CAcreateserial -days 365 -extfile "$WORK/san" -out "$WORK/server.crt" 2>/dev/null
for name in "${SITES[@]}" stranger; do
    ssh-keygen -q -t ecdsa -b 384 -N '' -C '' -f "$WORK/$name.key"
done

PORT=${PORT:-$(free_port)}
connect "address = \"127.0.0.1:$PORT\"" "root-certificates = \"$WORK/ca.crt\""
say "the SuperLink, port $PORT"
start superlink flower-superlink --host 127.0.0.1 --port "$PORT" \
    --database "$WORK/superlink.db" --disable-runtime-dependency-installation \
    --ssl-ca-certfile "$WORK/ca.crt" --ssl-certfile "$WORK/server.crt" \
    --ssl-keyfile "$WORK/server.key" --enable-supernode-auth
wait_for 60 "Uvicorn running" "$WORK/superlink.log"

say "the sites' public keys are registered"
for site in "${SITES[@]}"; do flwr supernode register "$WORK/$site.key.pub" here; done

say "a SuperNode at each site"
for site in "${SITES[@]}"; do
    node "$site" "$WORK/data/$site" "$WORK/ca.crt" "$WORK/$site.key"
done
for site in "${SITES[@]}"; do wait_for 60 "SuperNode ID" "$WORK/$site.log"; done

say "a SuperNode whose key is not registered, and one that trusts another authority"
node stranger "$WORK/data/site-a" "$WORK/ca.crt" "$WORK/stranger.key"
node wrong-ca "$WORK/data/site-a" "$WORK/other-ca.crt" "$WORK/site-a.key"
refused stranger "Failed to activate SuperNode"
refused wrong-ca CERTIFICATE_VERIFY_FAILED
flwr supernode list here --format json | python3 -c '
import json, sys
online = [node for node in json.load(sys.stdin)["nodes"] if node["status"] == "online"]
print(f"online: {len(online)} SuperNodes, those that were registered")
sys.exit(len(online) != int(sys.argv[1]))' ${#SITES[@]} || fail "not exactly the sites are online"

say "the app"
make_app app "$@"
run_app app
same_bytes app
case " $* " in
*" privacy.noise="*) echo "noise is different in every run: there is nothing to compare" ;;
*) same_as_local app ;;
esac
for name in stranger wrong-ca; do
    ! grep -aq "SuperNode ID" "$WORK/$name.log" || fail "$name was let in"
done
say "done: everything is in $WORK"
