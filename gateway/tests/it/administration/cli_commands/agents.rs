//! `gw-gateway agent`.

use serde_json::{Value, json};

use super::{CREATED_AT, page, succeed};

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
    let agent = agent();
    let (asked, out) = succeed(
        "agent list acme",
        vec![(200, page(std::slice::from_ref(&agent)))],
    );
    assert_eq!(asked, ["GET /api/v1/accounts/acme/agents?limit=500"]);
    let table = "AGENT                    ENROLLMENT               NAME       SERVICES  STATUS    \
                 STANDBY  TUNNELS  STATE                                         SLOTS     SHARE  \
                 VERSION  UPDATE     RELEASE KEYS  CERTIFICATE UNTIL\n\
                 ag_0123456789abcdefghij  en_0123456789abcdefghij  a machine  api       approved  \
                 yes      1        draining, ended 7s ago: service_not_assigned  2 of 128  48 %   \
                 0.1.0    held back  t4kjPEvq      -\n";
    assert_eq!(out, table);
    let line = "agent list acme --enrollment-token 0123456789abcdef";
    let (asked, _) = succeed(line, vec![(200, page(std::slice::from_ref(&agent)))]);
    assert_eq!(
        asked,
        ["GET /api/v1/accounts/acme/agents?limit=500&enrollment_token=0123456789abcdef"]
    );
}

#[test]
fn the_progress_counts_connected_agents_and_their_release_keys() {
    let agent = agent();
    let mut absent = agent.clone();
    let mut pending = agent.clone();
    absent["tunnels"] = json!([]);
    pending["status"] = json!("pending");
    let replies = || {
        let accounts = json!({"id": "acme", "capture_allowed": false, "created_at": CREATED_AT});
        vec![
            (200, page(&[accounts])),
            (200, page(&[agent.clone(), absent.clone(), pending.clone()])),
        ]
    };
    let (asked, out) = succeed("agent progress", replies());
    assert_eq!(
        asked,
        [
            "GET /api/v1/accounts?limit=500",
            "GET /api/v1/accounts/acme/agents?limit=500"
        ]
    );
    let table = format!(
        "connected                                                 1 of 2\n\
         version 0.1.0                                             1 of 1\n\
         release key {RELEASE_KEY}  1 of 1\n\
         without updates                                           0 of 1\n\
         not connected                                             acme/{ID}\n"
    );
    assert_eq!(out, table);
    let counted: Value =
        serde_json::from_str(&succeed("agent progress --json", replies()).1).unwrap();
    assert_eq!(
        (&counted["agents"], &counted["release_keys"][RELEASE_KEY]),
        (&json!(2), &json!(1))
    );
}

#[test]
fn an_agent_is_shown_with_its_tunnels() {
    let (asked, out) = succeed(&format!("agent show acme {ID}"), vec![(200, agent())]);
    assert_eq!(asked, [format!("GET /api/v1/accounts/acme/agents/{ID}")]);
    assert!(
        out.contains("\n  enrollment token   0123456789abcdef\n"),
        "{out}"
    );
    assert!(
        out.contains(
            "  acme--api: draining, up 1m 1s, idle 0s, 2 requests in flight, 2 of 128 slots in \
             use, 48 % of the requests, round trip 250.0µs\n"
        ),
        "{out}"
    );
    assert!(
        out.contains("since 2026-01-02T03:04:05Z; deleted after an hour without a tunnel\n"),
        "{out}"
    );
    // With a tunnel of the same service, only the details have the one before.
    for ended in [
        "acme--api: ended 1m 1s ago: moved\n",
        "acme--web: ended 7s ago: service_not_assigned; ask an administrator\n",
    ] {
        assert!(out.contains(ended), "{out}");
    }
    assert!(
        out.contains("acme--web: version 0.1.0 is not served by the gateway's 0.2.0, 5s ago"),
        "{out}"
    );
}

#[test]
fn agents_are_approved_revoked_changed_and_deleted() {
    let reply = || vec![(200, agent())];
    let item = format!("/api/v1/accounts/acme/agents/{ID}");
    assert_eq!(
        succeed(&format!("agent approve acme {ID}"), reply()).0,
        [format!("POST {item}/approve")]
    );
    assert_eq!(
        succeed(&format!("agent revoke acme {ID}"), reply()).0,
        [format!("POST {item}/revoke")]
    );
    let (asked, _) = succeed(
        &format!("agent change acme {ID} --service b --name n"),
        reply(),
    );
    assert_eq!(
        asked,
        [format!(r#"PATCH {item} {{"name":"n","services":["b"]}}"#)]
    );
    let (asked, _) = succeed(&format!("agent change acme {ID} --standby false"), reply());
    assert_eq!(asked, [format!(r#"PATCH {item} {{"standby":false}}"#)]);
    let (asked, _) = succeed(&format!("agent delete acme {ID}"), vec![(204, Value::Null)]);
    assert_eq!(asked, [format!("DELETE {item}")]);
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
fn tunnels() {
    let ready = json!({
        "state": "ready",
        "state_seconds": 60,
        "requests": 7,
        "share_percent": 88,
        "slots": 8,
        "slots_in_use": 1,
    });
    let of_node_1 = json!({ "node": 1 });
    let unhealthy = json!({
        "state": "unhealthy", "state_seconds": 5, "state_reason": "no backend takes \
            connections", "standby": true,
        "requests": 1, "share_percent": 12,
    });
    let first = agent_with_tunnels(
        1,
        &json!([
            tunnel("acme--web", 1, of_node_1),
            tunnel("acme--api", 1, unhealthy)
        ]),
    );
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
    let listed: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (
            listed["items"].as_array().unwrap().len(),
            &listed["items"][0]["service"]
        ),
        (1, &json!("acme--web"))
    );
    assert_eq!(
        (&listed["items"][0]["state"], &listed["missing_nodes"]),
        (&json!("unknown"), &json!([7]))
    );
    assert_eq!(
        succeed("tunnel list acme", vec![(200, page(&[]))]).1,
        "No tunnels.\n"
    );
}
