# Makes this namespace a machine of its own: loopback, /etc, /var/lib and /usr/local/bin are here alone. What a page takes
# as given is in $GIVEN: a certificate for the region eu1.example.com and its key, and an authority that programs trust.
mount -t tmpfs tmpfs "$MACHINE"
mkdir "$MACHINE/etc" "$MACHINE/lib" "$MACHINE/bin" "$MACHINE/original" "$MACHINE/units"
cp -a /etc/. "$MACHINE/etc" 2>/dev/null || true # without the files that this user cannot read
mount --bind /usr/local/bin "$MACHINE/original"
find "$MACHINE/original" -mindepth 1 -maxdepth 1 -printf '%P\n' |
    while read -r name; do ln -s "$MACHINE/original/$name" "$MACHINE/bin/$name"; done
mount --bind "$MACHINE/etc" /etc
mount --bind "$MACHINE/lib" /var/lib
mount --bind "$MACHINE/bin" /usr/local/bin
mount -t proc proc /proc 2>/dev/null || true # a container may refuse it

# SIOCSIFFLAGS with IFF_UP and IFF_RUNNING.
python3 -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 0x41))'

mkdir -p /etc/gw /etc/systemd/system
cp "$GIVEN/fullchain.pem" "$GIVEN/key.pem" /etc/gw/
cp "$GIVEN/key.pem" /etc/gw/privkey.pem # as certbot names it
rm -rf /etc/ssl/certs
mkdir -p /etc/ssl/certs
cp "$GIVEN/ca.pem" /etc/ssl/certs/ca-certificates.crt
echo 'hosts: files' >/etc/nsswitch.conf
cat >/etc/hosts <<'END'
127.0.0.1 localhost eu1.gw.localhost acme--api.eu1.gw.localhost demo--echo.eu1.gw.localhost
127.0.0.1 eu1.example.com acme--api.eu1.example.com acme--web.eu1.example.com doctor--doctor.eu1.example.com
END

# In a subshell, so that it is no job of the page.
(python3 "$GIVEN/backend.py" 8080 3000 &)
curl --silent --retry 50 --retry-delay 0 --retry-max-time 10 --retry-connrefused --output /dev/null http://127.0.0.1:8080/

# Runs a program that serves until it is stopped: waits until it serves, and stops it as Ctrl-C does.
foreground() {
    GW_AGENT_METRICS_LISTEN=127.0.0.1:9191 "$@" &
    local process=$!
    wait_for curl --silent --fail --output /dev/null http://127.0.0.1:9191/readyz
    kill -INT $process
    wait $process
}

# wait_for COMMAND...: until it succeeds, ten seconds at most. What it says of its last failure is printed.
wait_for() {
    local tries=0
    until "$@" 2>"$MACHINE/said"; do
        ((++tries < 100)) || { cat "$MACHINE/said" >&2; return 1; }
        sleep 0.1
    done
}

# A request is in the log half a second after its end, and a rotation is done after a second.
gw-gateway() {
    case $1 in
        request | signing-key) wait_for command gw-gateway "$@" ;;
        *) command gw-gateway "$@" ;;
    esac
}
