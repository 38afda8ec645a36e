#!/usr/bin/env bash
# Tests transfers on a long path: gateway and agent run in separate network namespaces joined by long_wire.py (by
# default 100 Mbit/s and 50 ms in each direction). Prints the rate of one download and one upload after ramp-up, and the
# duration of a small request alone and beside eight downloads. Fails below 80 % of the link rate.
# Needs root, iproute2, /dev/net/tun, curl, python3 and the release build, or GW_BIN=folder with the programs.
#     long_path.sh [MBIT [DELAY_MS]]
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
bin="${GW_BIN:-$here/../target/release}"
mbit=${1:-100} delay=${2:-50} size=${SIZE:-100000000}
work=$(mktemp -d)
cleanup() {
    kill $(jobs -p) 2>/dev/null || true
    ip netns del gw-long-gateway 2>/dev/null || true
    ip netns del gw-long-agent 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT

for side in gateway agent; do ip netns add gw-long-$side; ip -n gw-long-$side link set lo up; done
python3 "$here/long_wire.py" gw-long-gateway 10.254.78.1/30 gw-long-agent 10.254.78.2/30 "$delay" "$mbit" > "$work/wire" & wire=$!
until grep -q up "$work/wire"; do kill -0 $wire; sleep 0.05; done

# The demo creates account, service, key and the agent's identity; then gateway and agent run as separate processes.
"$bin/gw-gateway" demo --json --port 0 --admin-port 0 --data-dir "$work/data" > "$work/demo.json" 2>/dev/null & demo=$!
until [ -s "$work/demo.json" ]; do sleep 0.05; done
key=$(python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["service_key"])' "$work/demo.json")
kill $demo; wait $demo
python3 - "$work/data/agent/agent.json" <<'P'
import json, sys
state = json.load(open(sys.argv[1])); state.update(gateway_host="10.254.78.1", gateway_port=8443)
json.dump(state, open(sys.argv[1], "w"))
P
cat > "$work/gateway.toml" <<C
region = "eu1"
domain = "gw.localhost"
data_dir = "$work/data"
listen = "0.0.0.0:8443"
admin_listen = "127.0.0.1:0"
C
ip netns exec gw-long-agent python3 -c '
import http.server
block = bytes(1 << 16)
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        size = int(self.path.rpartition("/")[2])
        self.send_response(200); self.send_header("Content-Length", str(size)); self.end_headers()
        while size > 0:
            self.wfile.write(block[:size]); size -= len(block)
    def do_PUT(self):
        left = int(self.headers["Content-Length"])
        while left > 0: left -= len(self.rfile.read(min(left, 1 << 16)))
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()' 2>/dev/null &
GW_LOG=info,gw_gateway::tunnel=debug ip netns exec gw-long-gateway "$bin/gw-gateway" serve --config "$work/gateway.toml" 2> "$work/gateway.log" &
ip netns exec gw-long-agent "$bin/gw-agent" run --state-dir "$work/data/agent" --backend http://127.0.0.1:8000 2> "$work/agent.log" &

host=demo--echo.eu1.gw.localhost
call() { # PATH [curl options]
    ip netns exec gw-long-gateway curl --silent --http1.1 --cacert "$work/data/dev-ca.crt" --resolve "$host:8443:127.0.0.1" \
        -H "X-Gw-Service-Key: $key" -H "Expect:" "${@:2}" "https://$host:8443$1"
}
until [ "$(call /3 -o /dev/null -w '%{http_code}')" = 200 ]; do sleep 0.2; done

# Prints the rate of the bytes on stdin; the first 1.5 seconds are the ramp-up.
rate() {
    python3 -c '
import sys, time
marks, total = [], 0
while chunk := sys.stdin.buffer.read1(1 << 20):
    total += len(chunk); marks.append((time.monotonic(), total))
start = marks[0][0]
ramp = next((m for m in marks if m[0] >= start + 1.5), marks[0])
print(f"{(marks[-1][1] - ramp[1]) * 8e-6 / (marks[-1][0] - ramp[0]):.0f} Mbit/s after ramp-up, {total * 8e-6 / (marks[-1][0] - start):.0f} in all")'
}
check() { # NAME RESULT
    echo "$1: $2"
    [ "${2%% *}" -ge $((mbit * 8 / 10)) ] || { echo "$1 is below 80 % of the path" >&2; failed=1; }
}
failed=
check download "$(call "/$size" | rate)"
# The backend's progress is known only at the end; the gateway buffers no more than its budget.
head -c "$size" /dev/zero > "$work/upload"
seconds=$(call / -X PUT -T "$work/upload" -o /dev/null -w '%{time_total}')
check upload "$(python3 -c 'import sys; print(f"{int(sys.argv[1]) * 8e-6 / float(sys.argv[2]):.0f} Mbit/s in all")' "$size" "$seconds")"
small() { call /100 -o /dev/null -w '%{time_total} %{time_appconnect}\n' | python3 -c 'a, b = map(float, input().split()); print(f"{(a - b) * 1000:.0f} ms")'; }
echo "small request alone: $(small) $(small) $(small)"
bulk=()
for _ in 1 2 3 4 5 6 7 8; do call /1000000000 > /dev/null & bulk+=($!); done
sleep 4
echo "small request beside eight downloads: $(small) $(small) $(small)"
kill "${bulk[@]}" 2>/dev/null || true
grep -c 'window.*bytes' "$work/gateway.log" | sed 's/$/ changes of the window/' || true
[ -z "$failed" ]
