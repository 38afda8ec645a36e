//! Keys of agents that a renewal has replaced.

use gw_shared::tunnel::frame::Kind;
use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};

use crate::support::agents::modified_agent::{self, ACCOUNT, HOST, STREAMS, Tunnel, connection};
use crate::support::agents::tunnel_frames::hello;
use crate::support::apex::post_json;
use crate::support::eventually;
use crate::support::request_log::assert_fields;
use crate::support::scene::Scene;

fn csr(key: &KeyPair) -> String {
    let csr = CertificateParams::default().serialize_request(key);
    csr.unwrap().pem().unwrap()
}

fn certificate_of(reply: &Value) -> CertificateDer<'static> {
    let text = reply["certificate"].as_str();
    let text = text.unwrap_or_else(|| panic!("no certificate: {reply}"));
    CertificateDer::from_pem_slice(text.as_bytes()).unwrap()
}

/// Renews the certificate through a tunnel, for `key`. Returns once all workers know of it.
fn renew(scene: &Scene, tunnel: &mut Tunnel, key: &KeyPair) -> CertificateDer<'static> {
    let reply = tunnel.renew(&csr(key));
    scene.api().await_workers();
    certificate_of(&reply)
}

/// Opens a tunnel with this certificate, and waits until the gateway has registered it.
fn tunnel(scene: &Scene, certificate: &CertificateDer<'static>, key: &KeyPair) -> Tunnel {
    let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).unwrap();
    let connection = connection(&scene.about, HOST, (certificate.clone(), key));
    let mut tunnel = Tunnel::upgrade(connection, HOST);
    tunnel.0.send(hello(STREAMS));
    // The first message is READY.
    tunnel.next_of(Kind::Message).unwrap();
    tunnel
}

#[test]
fn a_replaced_key_signs_no_request_once_a_tunnel_has_used_the_new_one() {
    let scene = Scene::service()
        .agent()
        .configuration("enrollment_requests_per_minute = 10000\n")
        .start();
    let enrolled = modified_agent::enroll(&scene);
    let agent = &enrolled.agent;
    let stolen = KeyPair::try_from(&enrolled.key).unwrap();
    let ask_with = |key: &KeyPair| {
        let request = json!({ "csr": csr(key), "agent_id": agent });
        post_json(&scene, "/csr", "", &request)
    };
    let forgotten = || scene.api().audit("agent.forget_key");

    // The agent may not have received the new certificate. So the key before it still gets one,
    // also after a tunnel with that key.
    let mut before = enrolled.tunnel(&scene);
    let new = KeyPair::generate().unwrap();
    renew(&scene, &mut before, &new);
    let answer = ask_with(&stolen);
    assert_eq!(answer.status, 200, "{}", answer.json());
    let old = certificate_of(&answer.json());
    let certificate = renew(&scene, &mut before, &new);
    drop(tunnel(&scene, &old, &stolen));
    assert_eq!(forgotten(), [Value::Null; 0]);

    let first = tunnel(&scene, &certificate, &new);
    eventually("the replaced key is forgotten", || {
        (!forgotten().is_empty()).then_some(())
    });
    let refused = ask_with(&stolen);
    assert_eq!(refused.status, 401);
    assert_eq!(refused.code(), "GW_ENROLLMENT_INVALID");
    assert_eq!(ask_with(&new).status, 200);

    // A renewal makes one change, however many tunnels follow.
    drop((first, tunnel(&scene, &certificate, &new)));
    let entries = forgotten();
    assert_eq!(entries.len(), 1, "{entries:?}");
    let expected = json!({ "actor": "gateway", "target": agent, "account": ACCOUNT });
    assert_fields(&entries[0], &expected);
}
