//! HTTP Strict Transport Security of a service (RFC 6797).

use serde_json::json;

use crate::support::apex::APEX;
use crate::support::peers::backend;
use crate::support::peers::caller::{HOST, connect_to};
use crate::support::peers::http2_caller::{self, on_a_reactor};
use crate::support::scene::Scene;

const FIELD: &str = "strict-transport-security";
/// The policy of the backend for `/own`.
const OWN: &str = "max-age=7; includeSubDomains";

/// A scene with this policy, in front of a backend that has one of its own for `/own`.
fn with_policy(seconds: u32) -> Scene {
    let backend = backend::start(|mut peer| {
        while let Ok((head, _, _)) = peer.request() {
            let own = match head.target.path() {
                "/own" => format!("Strict-Transport-Security: {OWN}\r\n"),
                _ => String::new(),
            };
            peer.send(format!("HTTP/1.1 200 OK\r\n{own}Content-Length: 0\r\n\r\n"));
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    set(&scene, seconds);
    scene
}

fn set(scene: &Scene, seconds: u32) {
    let changes = json!({ "hsts_max_age_seconds": seconds });
    scene.api().change_service("demo", "echo", &changes);
}

/// Values of the field in the response to `request`.
fn policies(scene: &Scene, host: &str, request: impl AsRef<[u8]>) -> Vec<String> {
    let response = connect_to(&scene.about, host, &[b"http/1.1"], None).ask(request);
    let values = response.headers.get_all(FIELD);
    values
        .map(|value| value.to_str().unwrap().to_owned())
        .collect()
}

#[test]
fn all_responses_of_a_service_have_its_policy() {
    let scene = with_policy(300);
    let refused = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n");
    for request in [scene.get("/"), refused] {
        assert_eq!(policies(&scene, HOST, &request), ["max-age=300"]);
    }
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        assert_eq!(caller.get("/").await.header(FIELD), "max-age=300");
    });
}

#[test]
fn responses_have_no_policy_unless_their_service_has_one() {
    let scene = Scene::service().agent().start();
    let relayed = || policies(&scene, HOST, scene.get("/"));
    assert_eq!(relayed(), [""; 0], "the default");
    set(&scene, 300);
    assert_eq!(relayed(), ["max-age=300"]);
    let other = format!("demo--other.{APEX}");
    for (server_name, host, path) in [
        (HOST, other.as_str(), "/"),
        (APEX, APEX, "/.well-known/jwks.json"),
    ] {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n");
        assert_eq!(policies(&scene, server_name, request), [""; 0], "{host}");
    }
    set(&scene, 0);
    assert_eq!(relayed(), [""; 0], "removed");
}

#[test]
fn a_policy_of_the_backend_replaces_that_of_the_service() {
    let scene = with_policy(300);
    let own = || policies(&scene, HOST, scene.get("/own"));
    assert_eq!(own(), [OWN]);
    set(&scene, 0);
    assert_eq!(own(), [OWN]);
}
