//! Keys of agents that a renewal has replaced.

use gw_base::service::rate::Rate;
use gw_control_plane::control::changes::audit;
use gw_control_plane::control::identity::certificate;
use gw_control_plane::control::{AgentProof, AuditEntryView, Control};
use gw_gateway::demo::{Demo, Options};
use gw_shared::id::AgentId;
use gw_shared::tunnel::frame::Kind;
use gw_store::{AuditQuery, PublicKeyHash};
use rcgen::{CertificateParams, KeyPair, PublicKeyData};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;

use crate::support::agents::modified_agent;
use crate::support::agents::modified_agent::{ACCOUNT, HOST, STREAMS, Tunnel, connection};
use crate::support::agents::tunnel_frames::hello;
use crate::support::apex::post_json;
use crate::support::eventually;

/// An agent that has a certificate for the key in its state folder.
fn enroll(demo: &Demo) -> (AgentId, KeyPair) {
    let enrolled = modified_agent::enroll(demo);
    (enrolled.agent, KeyPair::try_from(&enrolled.key).unwrap())
}

fn csr(key: &KeyPair) -> String {
    CertificateParams::default()
        .serialize_request(key)
        .unwrap()
        .pem()
        .unwrap()
}

/// Renews the certificate for `key`, as through a tunnel.
fn renew(demo: &Demo, agent: &AgentId, key: &KeyPair) -> CertificateDer<'static> {
    let proof = AgentProof::Tunnel(agent.clone());
    let reply = certificate::sign(demo.gateway().control(), &proof, &csr(key)).unwrap();
    CertificateDer::from_pem_slice(reply.certificate.as_bytes()).unwrap()
}

/// Opens a tunnel with this certificate, and waits until the gateway has registered it.
fn tunnel(demo: &Demo, certificate: &CertificateDer<'static>, key: &KeyPair) -> Tunnel {
    let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).unwrap();
    let mut tunnel = Tunnel::upgrade(
        connection(&demo.about, HOST, (certificate.clone(), key)),
        HOST,
    );
    tunnel.0.send(hello(STREAMS));
    // READY
    tunnel.next_of(Kind::Message).unwrap();
    tunnel
}

/// Entries of the audit log about forgotten keys.
fn forgotten_keys(control: &Control) -> Vec<AuditEntryView> {
    let query = AuditQuery {
        account: None,
        before: None,
        limit: 100,
    };
    let mut entries = audit::list(control, &query).unwrap().items;
    entries.retain(|entry| entry.action == "agent.forget_key");
    entries
}

#[test]
fn a_replaced_key_signs_no_request_once_a_tunnel_has_used_the_new_one() {
    let demo = Demo::start(&Options {
        adjust: |config| config.enrollment_requests = Rate::new(10_000, 10_000).unwrap(),
        ..crate::support::options(None)
    })
    .unwrap();
    let control = demo.gateway().control();
    let (agent, stolen) = enroll(&demo);
    let ask_with = |key: &KeyPair| {
        post_json(
            &demo,
            "/csr",
            "",
            &json!({ "csr": csr(key), "agent_id": agent }),
        )
    };
    let previous_key = || control.records().agents[&agent].previous_key.clone();
    let forgotten = || forgotten_keys(control);

    // The agent may not have got the new certificate: the key before it still gets one, also after
    // a tunnel of its own.
    let new = KeyPair::generate().unwrap();
    renew(&demo, &agent, &new);
    let answer = ask_with(&stolen);
    assert_eq!(answer.status, 200, "{}", answer.json());
    let old =
        CertificateDer::from_pem_slice(answer.json()["certificate"].as_str().unwrap().as_bytes())
            .unwrap();
    let certificate = renew(&demo, &agent, &new);
    drop(tunnel(&demo, &old, &stolen));
    assert_eq!(
        previous_key(),
        Some(PublicKeyHash::of(&stolen.subject_public_key_info()))
    );
    assert!(forgotten().is_empty());

    let first = tunnel(&demo, &certificate, &new);
    eventually("the replaced key is forgotten", || {
        previous_key().is_none().then_some(())
    });
    assert_eq!(
        (
            ask_with(&stolen).status.as_u16(),
            ask_with(&stolen).code().as_str()
        ),
        (401, "GW_ENROLLMENT_INVALID")
    );
    assert_eq!(ask_with(&new).status, 200);

    // One change for a renewal, however many tunnels follow.
    drop((first, tunnel(&demo, &certificate, &new)));
    let entries = forgotten();
    let entry = &entries[0];
    assert_eq!(
        (entries.len(), entry.actor.as_str(), entry.target.as_str()),
        (1, "gateway", agent.as_str())
    );
    assert_eq!(entry.account.as_deref(), Some(ACCOUNT));
}
