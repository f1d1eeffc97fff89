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
    start "$1" flower-supernode --superlink "127.0.0.1:$PORT" --port "$(free_port)" \
        --root-certificates "$3" --auth-supernode-private-key "$4" --node-config "data=\"$2\""
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

PORT=$(free_port)
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
wait_for 60 "Failed to activate SuperNode" "$WORK/stranger.log"
wait_for 60 "CERTIFICATE_VERIFY_FAILED" "$WORK/wrong-ca.log"
for name in stranger wrong-ca; do
    grep -a -A 2 "Failed to initialize" "$WORK/$name.log" | sed "s/^/$name: /"
done
flwr supernode list here --format json >"$WORK/nodes.json"
python3 - "$WORK/nodes.json" ${#SITES[@]} <<'END' || fail "not exactly the registered sites are online"
import json, sys
online = [n for n in json.load(open(sys.argv[1]))["nodes"] if n["status"] == "online"]
print(f"online: {len(online)} SuperNodes, those that were registered")
sys.exit(len(online) != int(sys.argv[2]))
END

run_app "$@"
