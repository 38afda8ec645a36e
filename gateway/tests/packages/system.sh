#!/bin/bash
# Runs both installed programs by their units, in a system that systemd has booted for this.
set -eux -o pipefail

apex=https://eu1.gw.localhost
export GW_ADMIN_TOKEN_FILE=/var/lib/gw-gateway/admin.token
authority=/etc/gw/gw-ca.crt

# wait_for COMMAND...: until it succeeds, 20 seconds at most.
wait_for() {
    local tries=0
    until "$@"; do
        ((++tries < 200)) || return 1
        sleep 0.1
    done
}

call() {
    curl --silent --show-error --fail --cacert $authority -H "X-Gw-Service-Key: $key" \
        https://acme--api.eu1.gw.localhost/healthz
}

main_process() {
    systemctl show --property MainPID --value gw-gateway
}

replaced() {
    test "$(main_process)" != "$before" && test ! -e "/proc/$before"
}

# Units are enabled by the administrator only: here by `init`, which puts its answers into the installed example, and runs
# the installed unit. A second run changes nothing.
systemctl is-enabled gw-gateway gw-agent && exit 1
# The names in place of DNS, so that each check of doctor passes.
echo "127.0.0.1 eu1.example.com doctor--doctor.eu1.example.com" >>/etc/hosts
# As docs/packages.md has it: before the first start, as the user of the service, which only the unit lets bind port 443.
doctor() {
    runuser -u gw-gateway -- gw-gateway doctor --config /etc/gw/gateway.toml
}
doctor | grep "^ok *listen .*443 is free, and the unit of the gateway may bind it"
gw-gateway init --account acme </dev/null >/root/init
grep "^/etc/gw/gateway.toml: written, in place of the example of the package.$" /root/init
grep "is answered: 502 Bad Gateway GW_SERVICE_NOT_FOUND$" /root/init
gw-gateway healthy
doctor | grep "^ok *listen .*443: a gateway has it and answers"
test "$(systemctl is-enabled gw-gateway)" = enabled
test ! -e /etc/systemd/system/gw-gateway.service
before=$(main_process)
gw-gateway init --account acme </dev/null | grep "^/etc/gw/gateway.toml: exists with these settings, unchanged.$"
test "$(main_process)" = "$before"
driver=$(gw-gateway doctor --config /etc/gw/gateway.toml | sed -n 's/^ok *reactor *\([a-z_]*\).*/\1/p')

# The gateway listens on port 443 as its own user.
test "$(stat --format %U "/proc/$(main_process)")" = gw-gateway
grep -q "^CapEff:.0000000000000400$" "/proc/$(main_process)/status"
grep -q "^NoNewPrivs:.1$" "/proc/$(main_process)/status"
grep -q "^Seccomp:.2$" "/proc/$(main_process)/status"
# The same reactor as without the unit's restrictions.
journalctl --no-pager --unit gw-gateway | grep "reactor driver=${driver:?}"

# The agent enrolls with a token that its own user cannot read, and relays to the gateway's admin listener.
gw-gateway service create acme api
key=$(gw-gateway key create acme --service api --json | sed 's/.*"service_key":"\([^"]*\)".*/\1/')
install -m 600 /var/lib/gw-gateway/dev-ca.crt $authority
printf 'GW_GATEWAY=%s\nGW_ENROLL_OPTIONS="--ca-file %s"\n' $apex $authority >>/etc/default/gw-agent
printf '[backends."acme--api.eu1.gw.localhost"]\nurls = ["http://127.0.0.1:9080"]\nhost = "rewrite"\n' >/etc/gw/agent.toml
(umask 077 && gw-gateway enrollment-token create acme --service api --json |
    sed 's/.*"token":"\([^"]*\)".*/\1/' >/etc/gw/enrollment-token)
systemctl start gw-agent-enroll && exit 1
journalctl --no-pager --unit gw-agent-enroll | grep -e "--ca-file: $authority: cannot be read: Permission denied"
chmod 644 $authority
systemctl start gw-agent-enroll
systemctl start gw-agent
wait_for gw-agent doctor --config /etc/gw/agent.toml
wait_for call
test "$(stat --format %U "/proc/$(systemctl show --property MainPID --value gw-agent)")" = gw-agent

# What `service create` prints is for a user that cannot enter the folder of the gateway.
gw-gateway service create acme web --with-key --with-agent --backend-port 9080 --config /etc/gw/gateway.toml >/root/created
useradd --create-home caller
runuser -l caller -c 'test ! -r /var/lib/gw-gateway/dev-ca.crt'
sed -n '/^cat > gw-ca.crt/,/^END$/p' /root/created | runuser -l caller -c sh
runuser -l caller -c "$(sed -n '/^gw-agent http 9080 /,/^END$/p' /root/created)" &
agent=$!
sed -n '/^curl /,/^$/p' /root/created >/root/call
# The backend is the admin listener, which refuses the name of a service.
called() {
    runuser -l caller -c "$(cat /root/call)" | grep "is the name of a service, and this is the admin listener"
}
wait_for called
kill $agent
wait $agent || true

# Reading the certificate again, and replacing the process, work within the unit's restrictions.
systemctl reload gw-gateway
before=$(main_process)
systemctl kill --kill-whom=main --signal=USR2 gw-gateway
wait_for replaced
systemctl is-active gw-gateway gw-agent
wait_for call

# A restart and a reload of the only agent fail no request.
agent_process() {
    systemctl show --property MainPID --value gw-agent
}
({ set +x; } 2>/dev/null; until test -e /root/restarted; do call || echo; done) >/root/calls 2>&1 &
callers=$!
before=$(agent_process)
systemctl restart gw-agent
test "$(agent_process)" != "$before"
workers() {
    cat "/proc/$(agent_process)/task/$(agent_process)/children"
}
before=$(workers)
systemctl reload gw-agent
worker_replaced() {
    now=$(workers) && test "$now" != "$before" && test "$(echo "$now" | wc -w)" = 1
}
wait_for worker_replaced
touch /root/restarted
wait $callers
test -s /root/calls
# Whatever is not the answer is the message of a failed call.
failed=$(grep --invert-match --line-regexp ok /root/calls || true)
test -z "$failed"

# A connection to a socket unit starts the gateway.
systemctl stop gw-gateway
systemctl start gw-gateway.socket gw-gateway-admin.socket
test "$(systemctl is-active gw-gateway)" = inactive
curl --silent --show-error --fail http://127.0.0.1:9080/readyz
wait_for call
systemctl stop gw-agent gw-gateway.socket gw-gateway-admin.socket gw-gateway
test "$(systemctl show --property Result --value gw-gateway)" = success
test "$(systemctl show --property Result --value gw-agent)" = success

# Removal stops the units, and a purge leaves the keys.
install /usr/bin/gw-gateway /usr/local/bin/gw-gateway
systemctl start gw-gateway
apt-get purge -y gw-gateway gw-agent
test "$(systemctl is-active gw-gateway)" != active
test ! -e /etc/gw/gateway.toml
test ! -e /etc/gw/agent.toml
test ! -e /etc/default/gw-agent
test ! -e /etc/systemd/system/multi-user.target.wants/gw-gateway.service
test -e /var/lib/gw-gateway/admin.token

# For a program that was installed by hand, `init` makes the user and the unit, too.
hash -r
userdel gw-gateway
init=(gw-gateway init --account acme --data-dir /srv/gw --listen 127.0.0.1:8443)
"${init[@]}" </dev/null
test "$(systemctl show --property FragmentPath --value gw-gateway)" = /etc/systemd/system/gw-gateway.service
test "$(systemctl is-enabled gw-gateway)" = enabled
test "$(stat --format '%a %U' /srv/gw)" = "700 gw-gateway"
test "$(stat --format %U "/proc/$(main_process)")" = gw-gateway
gw-gateway account show acme --config /etc/gw/gateway.toml
before=$(main_process)
"${init[@]}" </dev/null
test "$(main_process)" = "$before"

# It refuses files that the service would not see, and shows the journal of a service that does not start.
cp /usr/local/bin/gw-gateway /root/gw-gateway
said=$(/root/gw-gateway init --account acme </dev/null 2>&1) && exit 1
grep "services do not see /root" <<<"$said"
other=(gw-gateway init --account acme --data-dir /srv/gw --listen 192.0.2.1:443)
said=$("${other[@]}" </dev/null 2>&1) && exit 1
grep "/etc/gw/gateway.toml exists with other settings; --force replaces it" <<<"$said"
said=$("${other[@]}" --force </dev/null 2>&1) && exit 1
grep "The journal of gw-gateway ends with:" <<<"$said"
grep "cannot listen on 192.0.2.1:443" <<<"$said"
systemctl stop gw-gateway
gw-gateway init --account other --data-dir /srv/gw --force --no-start </dev/null
test "$(systemctl is-active gw-gateway)" != active
test "$(find /srv/gw ! -user gw-gateway)" = ""

# Without a start it makes a new data folder for the user, and gives away nothing that exists.
gw-gateway init --account other --data-dir /srv/new/data --force --no-start </dev/null
test "$(stat --format '%a %U' /srv/new/data)" = "700 gw-gateway"
test "$(find /srv/new/data ! -user gw-gateway)" = ""
test "$(stat --format %U /srv/new)" = root
mkdir /srv/shared
touch /srv/shared/file
said=$(gw-gateway init --account other --data-dir /srv/shared --force --no-start </dev/null 2>&1) && exit 1
grep "/srv/shared: it exists and belongs to user 0" <<<"$said"
test "$(stat --format %U /srv/shared /srv/shared/file | uniq)" = root
touch /root/passed
