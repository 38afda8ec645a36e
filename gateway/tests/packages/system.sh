#!/bin/bash
# Runs both installed programs by their units, in a system that systemd has booted for this.
set -eux -o pipefail

apex=https://eu1.gw.localhost
export GW_ADMIN_TOKEN_FILE=/var/lib/gw-gateway/admin.token
export SSL_CERT_FILE=/etc/gw/dev-ca.crt

# wait_for COMMAND...: until it succeeds, 20 seconds at most.
wait_for() {
    local tries=0
    until "$@"; do
        ((++tries < 200)) || return 1
        sleep 0.1
    done
}

call() {
    curl --silent --show-error --fail --cacert $SSL_CERT_FILE -H "X-Gw-Service-Key: $key" \
        https://acme--api.eu1.gw.localhost/healthz
}

main_process() {
    systemctl show --property MainPID --value gw-gateway
}

replaced() {
    test "$(main_process)" != "$before" && test ! -e "/proc/$before"
}

# The installed example with a name that needs no DNS, and without one of the files that it refers to.
sed -i -e 's/^domain = .*/domain = "gw.localhost"/' /etc/gw/gateway.toml
driver=$(gw-gateway doctor --config /etc/gw/gateway.toml | sed -n 's/^ok *reactor *\([a-z_]*\).*/\1/p')

# The gateway listens on port 443 as its own user.
systemctl start gw-gateway
test "$(stat --format %U "/proc/$(main_process)")" = gw-gateway
grep -q "^CapEff:.0000000000000400$" "/proc/$(main_process)/status"
grep -q "^NoNewPrivs:.1$" "/proc/$(main_process)/status"
grep -q "^Seccomp:.2$" "/proc/$(main_process)/status"
# The same reactor as without the unit's restrictions.
journalctl --no-pager --unit gw-gateway | grep "reactor driver=${driver:?}"

# The agent enrolls with a token that its own user cannot read, and relays to the gateway's admin listener.
gw-gateway account create acme
gw-gateway service create acme api
key=$(gw-gateway key create acme --service api --json | sed 's/.*"service_key":"\([^"]*\)".*/\1/')
install -m 644 /var/lib/gw-gateway/dev-ca.crt $SSL_CERT_FILE
printf 'GW_GATEWAY=%s\nSSL_CERT_FILE=%s\n' $apex $SSL_CERT_FILE >>/etc/default/gw-agent
printf '[backends."acme--api.eu1.gw.localhost"]\nurls = ["http://127.0.0.1:9080"]\nhost = "rewrite"\n' >/etc/gw/agent.toml
(umask 077 && gw-gateway enrollment-token create acme --service api --json |
    sed 's/.*"token":"\([^"]*\)".*/\1/' >/etc/gw/enrollment-token)
systemctl start gw-agent-enroll
systemctl start gw-agent
wait_for gw-agent doctor --config /etc/gw/agent.toml
wait_for call
test "$(stat --format %U "/proc/$(systemctl show --property MainPID --value gw-agent)")" = gw-agent

# Reading the certificate again, and replacing the process, work within the unit's restrictions.
systemctl reload gw-gateway
before=$(main_process)
systemctl kill --kill-whom=main --signal=USR2 gw-gateway
wait_for replaced
systemctl is-active gw-gateway gw-agent
wait_for call

# A connection to a socket unit starts the gateway.
systemctl stop gw-gateway
systemctl start gw-gateway.socket gw-gateway-admin.socket
test "$(systemctl is-active gw-gateway)" = inactive
curl --silent --show-error --fail http://127.0.0.1:9080/readyz
wait_for call
systemctl stop gw-agent gw-gateway.socket gw-gateway-admin.socket gw-gateway
test "$(systemctl show --property Result --value gw-gateway)" = success
test "$(systemctl show --property Result --value gw-agent)" = success

# Units are enabled by the administrator only; removal stops them, and a purge leaves the keys.
systemctl is-enabled gw-gateway gw-agent && exit 1
systemctl enable --now gw-gateway
apt-get purge -y gw-gateway gw-agent
test "$(systemctl is-active gw-gateway)" != active
test ! -e /etc/gw/gateway.toml
test ! -e /etc/systemd/system/multi-user.target.wants/gw-gateway.service
test -e /var/lib/gw-gateway/admin.token
touch /root/passed
