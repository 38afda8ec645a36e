//! Contents, renewal and expiry of agents' certificates.

use std::fs;

use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, SanType};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde_json::{Value, json};
use time::OffsetDateTime;

use super::{
    agent_named, bearer, csr, enroll, identity, outcome, plain_csr, scene_with_high_limits, text,
};
use crate::support::agents::modified_agent::{self, ACCOUNT};
use crate::support::apex::{APEX, post_json};
use crate::support::on_disk;
use crate::support::peers::caller::{HOST, connect_to};
use crate::support::processes::prepared::Prepared;

#[test]
fn a_certificate_has_only_contents_set_by_the_gateway() {
    let scene = scene_with_high_limits();
    let token = scene.api().create_enrollment_token("demo", &["echo"]);
    let enrolled = enroll(&scene, &token).json();
    let key = KeyPair::generate().unwrap();
    let mut greedy = CertificateParams::new([HOST.to_owned()]).unwrap();
    greedy.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let victim = "gw://eu1.gw.localhost/victim/agent/ag_00000000000000000000";
    greedy
        .subject_alt_names
        .push(SanType::URI(victim.try_into().unwrap()));
    let fields = bearer(text(&enrolled, "enrollment_secret"));
    let request = json!({ "csr": csr(&greedy, &key) });
    let issued = post_json(&scene, "/csr", &fields, &request).json();
    let der = CertificateDer::from_pem_slice(text(&issued, "certificate").as_bytes()).unwrap();
    let (_, certificate) = x509_parser::parse_x509_certificate(&der).unwrap();
    assert!(!certificate.is_ca());
    let names = certificate.subject_alternative_name().unwrap().unwrap();
    let agent_id = text(&issued, "agent_id");
    let uri = format!("gw://eu1.gw.localhost/demo/agent/{agent_id}");
    let expected = [x509_parser::extensions::GeneralName::URI(&uri)];
    assert_eq!(names.value.general_names, expected);
    let usage = certificate.extended_key_usage().unwrap().unwrap().value;
    assert!(usage.client_auth && !usage.server_auth && !usage.any);
    assert_eq!(
        certificate.public_key().raw,
        rcgen::PublicKeyData::subject_public_key_info(&key)
    );
    let lifetime = certificate.validity().not_after.timestamp();
    let lifetime = lifetime - OffsetDateTime::now_utc().unix_timestamp();
    assert!((86_000..=86_400).contains(&lifetime), "{lifetime}");
    // The issuing authority signs only agent certificates.
    let authority = CertificateDer::from_pem_slice(text(&issued, "chain").as_bytes()).unwrap();
    let (_, authority) = x509_parser::parse_x509_certificate(&authority).unwrap();
    certificate
        .verify_signature(Some(authority.public_key()))
        .unwrap();
}

#[test]
fn an_agent_that_asks_for_certificates_in_a_loop_makes_twenty_changes() {
    // Certificates of one agent at once (docs/limits.md).
    const MOST: usize = 20;
    let scene = scene_with_high_limits();
    let enrolled = modified_agent::enroll(&scene);
    let key = KeyPair::try_from(&enrolled.key).unwrap();
    let request = json!({ "csr": plain_csr(&key), "agent_id": enrolled.agent });
    let outcomes: Vec<String> = (0..3 * MOST)
        .map(|_| outcome(&post_json(&scene, "/csr", "", &request)))
        .collect();
    // The first one is that of the enrollment.
    let (issued, refused) = outcomes.split_at(MOST - 1);
    assert!(issued.iter().all(|it| it.starts_with("200")), "{issued:?}");
    assert_eq!(refused, ["503 GW_OVERLOADED"; 2 * MOST + 1]);
    let answer = enrolled.tunnel(&scene).renew(&plain_csr(&key));
    assert_eq!(answer["type"], "renewal_refused", "{answer}");
    let log = format!("/audit-log?account={ACCOUNT}&limit=1000");
    let entries = scene.api().list(&log);
    let actor = format!("agent {}", enrolled.agent);
    let by_agent = entries.iter().filter(|it| it["actor"] == actor).count();
    assert_eq!(by_agent, MOST);
}

#[test]
fn only_the_agent_can_use_up_its_certificate_allowance() {
    let scene = scene_with_high_limits();
    let agent = agent_named(&scene, "agent");
    let ask_for = |csr: &str| {
        let request = json!({ "csr": csr, "agent_id": agent });
        outcome(&post_json(&scene, "/csr", "", &request))
    };
    let stranger = plain_csr(&KeyPair::generate().unwrap());
    let forged = include_str!("../../data/bad-signature.csr");
    // More requests than the agent's allowance.
    for _ in 0..25 {
        assert_eq!(ask_for(&stranger), "401 GW_ENROLLMENT_INVALID");
        assert_eq!(ask_for("hello"), "400 GW_CSR_INVALID");
        assert_eq!(ask_for(forged), "400 GW_CSR_INVALID");
    }
    let (_, key) = identity(&scene.state_dir("agent"));
    let own = plain_csr(&key);
    let outcomes: Vec<String> = (0..25).map(|_| ask_for(&own)).collect();
    // Enrollment has used the first of twenty certificates.
    assert_eq!(outcomes[..19], ["200 "; 19]);
    // The allowance applies to the agent's own requests.
    assert_eq!(outcomes[24], "503 GW_OVERLOADED");
}

#[test]
fn certificates_of_an_agent_take_little_room_on_the_disk() {
    // Certificates of one agent at once, and bytes of each with the write-ahead log
    // (docs/limits.md).
    const MOST: usize = 20;
    const EACH: u64 = 16 * 1024;
    let prepared = Prepared::new();
    let served = prepared.serve_with(&prepared.config());
    // Records, and the write-ahead log with the latest changes.
    let files = ["data/gw.sqlite", "data/gw.sqlite-wal"];
    let size = || {
        files
            .map(|file| on_disk(&prepared.path(file)))
            .iter()
            .sum::<u64>()
    };
    let before = size();
    let about = prepared.about(served.address);
    let agent = fs::read_to_string(prepared.path("agent/agent.json")).unwrap();
    let agent: Value = serde_json::from_str(&agent).unwrap();
    let (_, key) = identity(&prepared.path("agent"));
    let body = json!({ "csr": plain_csr(&key), "agent_id": agent["agent_id"] }).to_string();
    let mut caller = connect_to(&about, APEX, &[b"http/1.1"], None);
    let outcomes: Vec<String> = (0..=MOST)
        .map(|_| {
            caller.send(format!(
                "POST /csr HTTP/1.1\r\nHost: {APEX}\r\nContent-Type: application/json\r\n\
                 Content-Length: {}\r\n\r\n{body}",
                body.len()
            ));
            outcome(&caller.response())
        })
        .collect();
    let (issued, refused) = outcomes.split_at(MOST);
    assert_eq!(issued, ["200 "; MOST]);
    assert_eq!(refused, ["503 GW_OVERLOADED"]);
    let grown = size() - before;
    eprintln!("{grown} bytes for {MOST} certificates");
    assert!((1..=MOST as u64 * EACH).contains(&grown), "{grown}");
}
