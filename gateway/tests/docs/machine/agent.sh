# An agent of both services, by its unit.
gw-gateway enrollment-token create acme --service api --service web --json | jq -r .token >/etc/gw/enrollment-token
gw-agent enroll --gateway https://eu1.example.com --token-file /etc/gw/enrollment-token
systemctl start gw-agent

# Variables that pages name.
SERVICE_KEY=$(gw-gateway key create acme --service api --json | jq -r .service_key)
BACKEND_TOKEN=opaque

served() {
    curl --silent --fail --output /dev/null -H "X-Gw-Service-Key: $SERVICE_KEY" https://acme--api.eu1.example.com/
}
wait_for served
ID=$(curl --silent --fail --output /dev/null --write-out '%header{x-gw-request-id}' -H "X-Gw-Service-Key: $SERVICE_KEY" \
    https://acme--api.eu1.example.com/)
