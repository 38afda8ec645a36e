#!/usr/bin/env bash
# Compares commands of Docker that take connections over (exec, exec -i, attach, run -it) through the gateway with the
# same commands at the daemon itself: output and exit code must be equal. Starts a daemon of its own on a Unix socket,
# without networks. Needs root, docker.io, busybox-static, bsdutils, python3 and the release build.
set -euo pipefail
bin="${GW_PROGRAMS:-$(cd "$(dirname "$0")/.." && pwd)/target/release}"
work=$(mktemp -d)
cleanup() {
    kill $(jobs -p) 2>/dev/null || true
    wait 2>/dev/null || true
    umount "$work"/data/* 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT

dockerd --data-root="$work/data" --exec-root="$work/exec" --pidfile="$work/pid" --host="unix://$work/docker.sock" \
    --bridge=none --iptables=false --ip6tables=false --storage-driver=vfs 2> "$work/dockerd.log" &
for _ in $(seq 300); do [ -S "$work/docker.sock" ] && break; sleep 0.1; done
[ -S "$work/docker.sock" ] || { echo "dockerd cannot run here: $(tail -n 1 "$work/dockerd.log")"; exit 1; }
"$bin/gw-gateway" demo --json --port 0 --admin-port 0 --data-dir "$work/gateway" --backend "unix:$work/docker.sock" \
    --burst 100000 > "$work/demo.json" 2> "$work/gateway.log" &
until [ -s "$work/demo.json" ]; do sleep 0.05; done
about() { python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$work/demo.json" "$1"; }

# The client reaches the gateway by its name, and sends the service key.
url=$(about tenant_url)
host=${url#https://}
{ cat /etc/hosts; echo "127.0.0.1 ${host%:*}"; } > "$work/hosts"
mkdir "$work/client" "$work/direct"
cp "$(about ca_file)" "$work/client/ca.pem"
echo "{\"HttpHeaders\": {\"X-Gw-Service-Key\": \"$(about service_key)\"}}" > "$work/client/config.json"
directly() { DOCKER_HOST="unix://$work/docker.sock" DOCKER_CONFIG="$work/direct" timeout 60 "$@"; }
relayed() {
    DOCKER_HOST="tcp://$host" DOCKER_TLS_VERIFY=1 DOCKER_CERT_PATH="$work/client" DOCKER_CONFIG="$work/client" \
        timeout 60 unshare --mount sh -c 'mount --bind "$0" /etc/hosts && exec "$@"' "$work/hosts" "$@"
}

# An image of a static busybox.
mkdir -p "$work/root/bin"
cp "$(command -v busybox)" "$work/root/bin/busybox"
for applet in sh echo sha256sum tty; do ln -s busybox "$work/root/bin/$applet"; done
tar -C "$work/root" -c . | directly docker import - gw-loadtest > "$work/image"

# Runs a command with a container that waits for a line, and prints its output and exit code. CONTAINER is the
# container. A terminal also shows what it reads, once or twice.
said() { # directly|relayed INPUT COMMAND
    local container status=0
    container=$(directly docker run --detach --interactive --network none gw-loadtest sh -c 'read line; echo got $line; exit 5')
    local command="docker ${3//CONTAINER/$container}"
    local -a shell=(sh -c "$command")
    case $3 in run\ -it*) shell=(script --quiet --return --command "$command" /dev/null) ;; esac
    # The daemon ends the output of `attach` when the input ends.
    case $3 in exec*) hold=0 ;; *) hold=2 ;; esac
    { cat "$2"; sleep $hold; } | "$1" "${shell[@]}" > "$work/said" 2>&1 || status=$?
    directly docker rm --force "$container" > "$work/removed"
    grep -v '^hello.\?$' "$work/said" || true
    echo "exit status $status"
}

echo hello > "$work/line"
head -c 1000000 /dev/zero > "$work/megabyte"
: > "$work/nothing"
different=0
compare() { # INPUT EXIT-CODE COMMAND
    local expected got
    expected=$(said directly "$work/$1" "$3")
    got=$(said relayed "$work/$1" "$3")
    if [ "$got" = "$expected" ] && [ "${got##* }" = "$2" ]; then
        echo "equal: docker $3"
    else
        echo "different: docker $3: $got, directly $expected"
        different=1
    fi
}
compare nothing 0 'exec CONTAINER echo printed'
compare nothing 7 "exec CONTAINER sh -c 'echo no >&2; exit 7'"
compare line 4 "exec -i CONTAINER sh -c 'read line; echo got \$line; exit 4'"
compare megabyte 0 'exec -i CONTAINER sha256sum'
compare line 5 'attach CONTAINER'
compare line 3 "run -it --rm --network none gw-loadtest sh -c 'tty; read line; echo got \$line; exit 3'"
exit $different
