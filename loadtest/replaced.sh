#!/usr/bin/env bash
# Sends requests (100,000 by default) while the gateway is replaced twice and then each of two agents is restarted.
# Callers keep their connections as long as allowed and do not retry; one failed request fails the run.
set -euo pipefail
cd "$(dirname "$0")/.."
export GW_TEST_REPLACED_REQUESTS=${1:-100000}
cargo build --release -p gw-gateway -p gw-agent
exec cargo test --release -p gw-gateway --test it -- --nocapture --exact \
    takeover::no_request_fails_while_gateway_and_agents_are_replaced
