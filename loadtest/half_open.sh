#!/usr/bin/env bash
# Tests a half-open tunnel: gateway and agent run in separate network namespaces joined by a veth pair, and the agent's
# side drops all packets while a request is on the tunnel. Prints when the request ends and with which status, and when
# the service recovers after packets flow again. Needs root, iproute2, nftables, curl, python3 and the release build.
set -euo pipefail
bin="$(cd "$(dirname "$0")/.." && pwd)/target/release"
work=$(mktemp -d)
cleanup() {
    kill $(jobs -p) 2>/dev/null || true
    ip netns del gw-half-gateway 2>/dev/null || true
    ip netns del gw-half-agent 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT

for side in gateway agent; do ip netns add gw-half-$side; ip -n gw-half-$side link set lo up; done
ip -n gw-half-gateway link add gw-half0 type veth peer name gw-half1 netns gw-half-agent
ip -n gw-half-gateway addr add 10.254.77.1/30 dev gw-half0; ip -n gw-half-gateway link set gw-half0 up
ip -n gw-half-agent addr add 10.254.77.2/30 dev gw-half1; ip -n gw-half-agent link set gw-half1 up

# The demo creates account, service, key and the agent's identity; then gateway and agent run as separate processes.
"$bin/gw-gateway" demo --json --port 0 --admin-port 0 --data-dir "$work/data" > "$work/demo.json" 2>/dev/null &
until [ -s "$work/demo.json" ]; do sleep 0.05; done
key=$(python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["service_key"])' "$work/demo.json")
kill %1; wait %1
python3 - "$work/data/agent/agent.json" <<'P'
import json, sys
state = json.load(open(sys.argv[1])); state.update(gateway_host="10.254.77.1", gateway_port=8443)
json.dump(state, open(sys.argv[1], "w"))
P
cat > "$work/gateway.toml" <<C
region = "eu1"
domain = "gw.localhost"
data_dir = "$work/data"
listen = "0.0.0.0:8443"
admin_listen = "127.0.0.1:0"
C
ip netns exec gw-half-agent python3 -c '
import http.server, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/long": time.sleep(300)
        self.send_response(200); self.send_header("Content-Length", "3"); self.end_headers(); self.wfile.write(b"ok\n")
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()' &
ip netns exec gw-half-gateway "$bin/gw-gateway" serve --config "$work/gateway.toml" 2> "$work/gateway.log" &
ip netns exec gw-half-agent "$bin/gw-agent" run --state-dir "$work/data/agent" --backend http://127.0.0.1:8000 2> "$work/agent.log" &

host=demo--echo.eu1.gw.localhost
call() {
    ip netns exec gw-half-gateway curl --silent --cacert "$work/data/dev-ca.crt" --resolve "$host:8443:127.0.0.1" \
        -H "X-Gw-Service-Key: $key" -w '%{http_code} after %{time_total} s' "https://$host:8443$1" | tr -d '\n'
}
until call / | grep -q 200; do sleep 0.2; done
echo "tunnel up: $(call /)"
call /long > "$work/long" & request=$!
sleep 1
ip netns exec gw-half-agent nft -f - <<'N'
table inet half {
    chain out { type filter hook output priority 0; oifname "gw-half1" drop; }
    chain in { type filter hook input priority 0; iifname "gw-half1" drop; }
}
N
echo "packets dropped"; dropped=$SECONDS
wait $request
took=$((SECONDS - dropped))
echo "request in flight: $(cat "$work/long"), $took s after the packets were dropped"
grep -q '}502 after' "$work/long" && [ "$took" -le 26 ] || { echo "the request did not end with 502 in time" >&2; exit 1; }
echo "next request: $(call /)"
ip netns exec gw-half-agent nft delete table inet half
echo "packets flow again"; flowing=$SECONDS
until call / | grep -q 200; do
    [ $((SECONDS - flowing)) -le 120 ] || { echo "the service did not recover" >&2; exit 1; }
    sleep 0.2
done
echo "service back after $((SECONDS - flowing)) s"
