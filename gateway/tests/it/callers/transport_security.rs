//! HTTP Strict Transport Security of a service (RFC 6797).

use http::Method;
use serde_json::json;

use crate::support::peers::caller::connect_to;
use crate::support::peers::http2_caller::on_a_reactor;
use crate::support::peers::{backend, http2_caller};
use crate::support::scene::Scene;

const FIELD: &str = "strict-transport-security";

fn set(scene: &Scene, seconds: u32) {
    let changes = json!({ "hsts_max_age_seconds": seconds });
    scene.api().change_service("demo", "echo", &changes);
}

/// Values of the field in the response to `request`.
fn policies(scene: &Scene, host: &str, request: impl AsRef<[u8]>) -> Vec<String> {
    let mut caller = connect_to(&scene.about, host, &[b"http/1.1"], None);
    caller.send(request);
    let response = caller.response();
    response
        .headers
        .get_all(FIELD)
        .map(|value| value.to_str().unwrap().to_owned())
        .collect()
}

#[test]
fn responses_of_a_service_have_its_policy_unless_the_backend_has_one() {
    let backend = backend::start(|mut peer| {
        while let Ok((head, _, _)) = peer.request() {
            let own = match head.target.path() {
                "/own" => "Strict-Transport-Security: max-age=7; includeSubDomains\r\n",
                _ => "",
            };
            peer.send(format!("HTTP/1.1 200 OK\r\n{own}Content-Length: 0\r\n\r\n"));
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    let host = crate::support::peers::caller::HOST;
    let apex = "eu1.gw.localhost";
    let of = |target: &str| policies(&scene, host, scene.get(target));
    assert_eq!(of("/"), [""; 0]);
    set(&scene, 300);
    assert_eq!(of("/"), ["max-age=300"]);
    assert_eq!(of("/own"), ["max-age=7; includeSubDomains"]);
    let without_key = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
    assert_eq!(policies(&scene, host, without_key), ["max-age=300"]);
    let elsewhere = format!("GET / HTTP/1.1\r\nHost: demo--other.{apex}\r\n\r\n");
    assert_eq!(policies(&scene, host, elsewhere), [""; 0]);
    let keys = format!("GET /.well-known/jwks.json HTTP/1.1\r\nHost: {apex}\r\n\r\n");
    assert_eq!(policies(&scene, apex, keys), [""; 0]);
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        assert_eq!(caller.get("/").await.header(FIELD), "max-age=300");
    });
    set(&scene, 0);
    assert_eq!(of("/"), [""; 0]);
    let mut caller = scene.connect();
    caller.send(scene.get("/own"));
    let head = caller.response_head(&Method::GET).unwrap();
    assert_eq!(
        head.headers.get(FIELD).unwrap(),
        "max-age=7; includeSubDomains"
    );
}
