# What most pages begin with: a gateway by its unit, an account with two services, and files of an agent.
ln -s "$PROGRAMS/gw-gateway" "$PROGRAMS/gw-agent" /usr/local/bin/
for unit in gw-gateway gw-agent; do
    sed 's|/usr/bin/|/usr/local/bin/|' packaging/systemd/$unit.service >/etc/systemd/system/$unit.service
done
cat >/etc/gw/gateway.toml <<'END'
region = "eu1"
domain = "example.com"
data_dir = "/var/lib/gw-gateway"
tls_certificate = "/etc/gw/fullchain.pem"
tls_key = "/etc/gw/key.pem"
END
echo 'backend = "http://127.0.0.1:8080"' >/etc/gw/agent.toml
systemctl start gw-gateway
export GW_ADMIN_TOKEN_FILE=/var/lib/gw-gateway/admin.token
gw-gateway account create acme
gw-gateway service create acme api
gw-gateway service create acme web
