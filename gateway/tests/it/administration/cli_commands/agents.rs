//! `gw-gateway agent`.

use serde_json::{Value, json};

use super::{CREATED_AT, account, assert_requests, json_of, page, succeed};
use crate::administration::assert_says;

const ID: &str = "ag_0123456789abcdefghij";
const RELEASE_KEY: &str = "t4kjPEvqLr7T1xWmcCbXnJ0yDbdUPyDhEdbsVZ2qRpw=";

fn agent() -> Value {
    json!({
        "agent_id": ID,
        "enrollment_id": "en_0123456789abcdefghij",
        "account": "acme",
        "name": "a machine",
        "services": ["api"],
        "status": "approved",
        "standby": true,
        "version": "0.1.0",
        "ephemeral": true,
        "absent_since": "2026-01-02T03:04:05Z",
        "enrollment_token": "0123456789abcdef",
        "certificate_not_after": null,
        "created_at": CREATED_AT,
        "update": {"state": "held_back", "release_keys": [RELEASE_KEY]},
        "refused_version": {
            "agent_id": ID,
            "service": "acme--web",
            "agent_version": "0.1.0",
            "gateway_version": "0.2.0",
            "seconds_ago": 5,
        },
        "ended_tunnels": [
            {"agent_id": ID, "service": "acme--api", "reason": "moved", "seconds_ago": 61},
            {
                "agent_id": ID,
                "service": "acme--web",
                "reason": "service_not_assigned",
                "seconds_ago": 7,
                "advice": "ask an administrator",
            },
        ],
        "tunnels": [{
            "service": "acme--api",
            "agent_id": ID,
            "agent_version": "0.1.0",
            "certificate_not_after": null,
            "generation": 1,
            "worker": 0,
            "age_seconds": 61,
            "idle_seconds": 0,
            "round_trip_us": 250,
            "in_flight": 2,
            "window": 524288,
            "held_bytes": 0,
            "slots": 128,
            "slots_in_use": 2,
            "draining": true,
            "state": "ready",
            "state_seconds": 9,
            "requests": 31,
            "share_percent": 48,
        }],
    })
}

#[test]
fn agents_are_listed() {
    let (_, out) = succeed("agent list acme", vec![(200, page(&[agent()]))]);
    let table = "AGENT                    ENROLLMENT               NAME       SERVICES  STATUS    \
                 STANDBY  TUNNELS  STATE                                         SLOTS     SHARE  \
                 VERSION  UPDATE     RELEASE KEYS  CERTIFICATE UNTIL\n\
                 ag_0123456789abcdefghij  en_0123456789abcdefghij  a machine  api       approved  \
                 yes      1        draining, ended 7s ago: service_not_assigned  2 of 128  48 %   \
                 0.1.0    held back  t4kjPEvq      -\n";
    assert_eq!(out, table);
}

#[test]
fn the_progress_counts_connected_agents_and_their_release_keys() {
    let [mut absent, mut pending] = [agent(), agent()];
    absent["tunnels"] = json!([]);
    pending["status"] = json!("pending");
    let replies = || {
        let agents = page(&[agent(), absent.clone(), pending.clone()]);
        vec![(200, page(&[account("acme")])), (200, agents)]
    };
    let (asked, out) = succeed("agent progress", replies());
    let of_acme = "GET /api/v1/accounts/acme/agents?limit=500";
    assert_eq!(asked, ["GET /api/v1/accounts?limit=500", of_acme]);
    let table = format!(
        "connected                                                 1 of 2\n\
         version 0.1.0                                             1 of 1\n\
         release key {RELEASE_KEY}  1 of 1\n\
         without updates                                           0 of 1\n\
         not connected                                             acme/{ID}\n"
    );
    assert_eq!(out, table);
    let counted = json_of(&succeed("agent progress --json", replies()).1);
    assert_eq!(counted["agents"], 2);
    assert_eq!(counted["release_keys"][RELEASE_KEY], 1);
}

#[test]
fn an_agent_is_shown_with_its_tunnels() {
    let (_, out) = succeed(&format!("agent show acme {ID}"), vec![(200, agent())]);
    let says = [
        "\n  enrollment token   0123456789abcdef\n",
        "  acme--api: draining, up 1m 1s, idle 0s, 2 requests in flight, 2 of 128 slots in use, \
         48 % of the requests, round trip 250.0µs\n",
        "since 2026-01-02T03:04:05Z; deleted after an hour without a tunnel\n",
        // With a tunnel of the same service, only the details have the one before.
        "acme--api: ended 1m 1s ago: moved\n",
        "acme--web: ended 7s ago: service_not_assigned; ask an administrator\n",
        "acme--web: version 0.1.0 is not served by the gateway's 0.2.0, 5s ago",
    ];
    assert_says(&out, &says);
}

#[test]
fn commands_for_agents_have_their_requests() {
    let table = r#"
        agent list acme
            GET /accounts/acme/agents?limit=500
        agent list acme --enrollment-token 0123456789abcdef
            GET /accounts/acme/agents?limit=500&enrollment_token=0123456789abcdef
        agent show acme {id}
            GET /accounts/acme/agents/{id}
        agent approve acme {id}
            POST /accounts/acme/agents/{id}/approve
        agent revoke acme {id}
            POST /accounts/acme/agents/{id}/revoke
        agent change acme {id} --service b --name n
            PATCH /accounts/acme/agents/{id} {"name":"n","services":["b"]}
        agent change acme {id} --standby false
            PATCH /accounts/acme/agents/{id} {"standby":false}
        agent delete acme {id}
            DELETE /accounts/acme/agents/{id}"#;
    assert_requests(&agent(), ID, table);
}

fn agent_with_tunnels(number: usize, tunnels: &Value) -> Value {
    json!({
        "agent_id": format!("ag_{number:020}"),
        "account": "acme",
        "name": "a",
        "services": ["api"],
        "status": "approved",
        "version": "0.2.0",
        "certificate_not_after": null,
        "created_at": CREATED_AT,
        "tunnels": tunnels,
    })
}

fn tunnel(service: &str, number: usize, mut more: Value) -> Value {
    let mut tunnel = json!({
        "service": service,
        "agent_id": format!("ag_{number:020}"),
        "agent_version": "0.2.0",
        "certificate_not_after": null,
        "generation": 1,
        "worker": 0,
        "age_seconds": 61,
        "idle_seconds": 0,
        "round_trip_us": 250,
        "in_flight": 2,
        "window": 524288,
        "held_bytes": 0,
        "slots": null,
        "slots_in_use": null,
        "draining": false,
    });
    tunnel
        .as_object_mut()
        .unwrap()
        .append(more.as_object_mut().unwrap());
    tunnel
}

#[test]
fn tunnels_are_listed_by_service() {
    let ready = json!({
        "state": "ready",
        "state_seconds": 60,
        "requests": 7,
        "share_percent": 88,
        "slots": 8,
        "slots_in_use": 1,
    });
    let unhealthy = json!({
        "state": "unhealthy", "state_seconds": 5, "state_reason": "no backend takes \
            connections", "standby": true,
        "requests": 1, "share_percent": 12,
    });
    let of_node_1 = tunnel("acme--web", 1, json!({ "node": 1 }));
    let unhealthy = tunnel("acme--api", 1, unhealthy);
    let first = agent_with_tunnels(1, &json!([of_node_1, unhealthy]));
    let mut second = agent_with_tunnels(2, &json!([tunnel("acme--api", 2, ready)]));
    second["missing_nodes"] = json!([7]);
    let replies = || vec![(200, page(&[first.clone(), second.clone()]))];
    let (asked, out) = succeed("tunnel list acme", replies());
    assert_eq!(asked, ["GET /api/v1/accounts/acme/agents?limit=500"]);
    let table = "\
SERVICE    AGENT                    STATE                                           STANDBY  \
    SLOTS   REQUESTS  SHARE  IN FLIGHT  UP     NODE  VERSION
acme--api  ag_00000000000000000001  unhealthy for 5s: no backend takes connections  yes      \
    -       1         12 %   2          1m 1s  -     0.2.0
acme--api  ag_00000000000000000002  ready for 1m                                    no       \
    1 of 8  7         88 %   2          1m 1s  -     0.2.0
acme--web  ag_00000000000000000001  unknown                                         no       \
    -       0         -      2          1m 1s  1     0.2.0
Missing: the tunnels of nodes that do not answer: 7.
";
    assert_eq!(out, table);
    let (_, out) = succeed("tunnel list acme --service web --json", replies());
    let listed = json_of(&out);
    assert_eq!(listed["items"].as_array().unwrap().len(), 1);
    assert_eq!(listed["items"][0]["service"], "acme--web");
    assert_eq!(listed["items"][0]["state"], "unknown");
    assert_eq!(listed["missing_nodes"], json!([7]));
    let (_, out) = succeed("tunnel list acme", vec![(200, page(&[]))]);
    assert_eq!(out, "No tunnels.\n");
}
