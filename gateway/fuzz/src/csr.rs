//! Certificate requests of agents.

use std::sync::LazyLock;
use std::time::Duration;

use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use gw_base::tls::pki::{AgentIdentity, Authority, CertificateRequest, agent_identity};
use gw_shared::id::AgentId;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use super::{NOW, account, key_pair, region};

/// A certificate request in PEM or DER. Otherwise: the length of a subject (one byte), the subject
/// and attributes in DER, which are put into a request with a valid signature.
pub fn csr(data: &[u8]) {
    const SEQUENCE: u8 = 0x30;
    let request = match data {
        [b'-', ..] => CertificateRequest::parse(&String::from_utf8_lossy(data)),
        [SEQUENCE, ..] => CertificateRequest::parse(&pem(data)),
        [subject_length, rest @ ..] => {
            let (subject, attributes) = rest.split_at(rest.len().min((*subject_length).into()));
            let requested = CertificateRequest::parse(&pem(&signed_request(subject, attributes)));
            if let Ok(request) = &requested {
                assert_eq!(request.subject_public_key_info(), spki(&key_pair(1)));
            }
            requested
        }
        [] => return,
    };
    let Ok(request) = request else { return };

    static AUTHORITY: LazyLock<Authority> = LazyLock::new(|| {
        let directory = tempfile::tempdir().expect("a folder for the authority");
        Authority::load_or_create(directory.path(), "agent-ca", "fuzzing").expect("an authority")
    });
    let region = region();
    let account = account();
    let agent = AgentId::new("ag_00000000000000000000").expect("an agent's id");
    let not_after = NOW.after(Duration::from_hours(24));
    let issued = AUTHORITY.issue_agent(&region, &account, &agent, &request, NOW, not_after);
    let issued =
        CertificateDer::from_pem_slice(issued.expect("a certificate").as_bytes()).expect("PEM");
    let (rest, certificate) = X509Certificate::from_der(&issued).expect("a certificate");
    assert!(rest.is_empty());
    assert_eq!(
        certificate.public_key().raw,
        request.subject_public_key_info()
    );
    assert_eq!(certificate.subject().to_string(), format!("CN={agent}"));
    let names = certificate
        .subject_alternative_name()
        .expect("names")
        .expect("names")
        .value;
    assert_eq!(
        names.general_names,
        [GeneralName::URI(&format!(
            "gw://{}/{account}/agent/{agent}",
            region.apex()
        ))]
    );
    let usage = certificate
        .extended_key_usage()
        .expect("usage")
        .expect("usage")
        .value;
    assert!(usage.client_auth && !usage.server_auth && !usage.any && usage.other.is_empty());
    let usage = certificate
        .key_usage()
        .expect("usage")
        .expect("usage")
        .value;
    assert!(usage.digital_signature() && !usage.key_cert_sign() && !usage.crl_sign());
    assert!(!certificate.is_ca());
    assert_eq!(
        certificate.extensions().len(),
        6,
        "names, key usage, extended key usage, basic constraints, two key identifiers"
    );
    assert_eq!(
        agent_identity(&issued, &region),
        Some(AgentIdentity { account, agent })
    );
}

fn pem(der: &[u8]) -> String {
    format!(
        "-----BEGIN CERTIFICATE REQUEST-----\n{}\n-----END CERTIFICATE REQUEST-----\n",
        STANDARD.encode(der)
    )
}

/// A certificate request (RFC 2986 §4) with a valid signature.
fn signed_request(subject: &[u8], attributes: &[u8]) -> Vec<u8> {
    const VERSION_1: &[u8] = &[0x02, 0x01, 0x00];
    let pair = key_pair(1);
    let info = der(0x30, &[VERSION_1, subject, &spki(&pair), attributes]);
    let signature = der(0x03, &[&[0], pair.sign(&info).as_ref()]);
    der(0x30, &[&info, ED25519_ALGORITHM, &signature])
}

/// AlgorithmIdentifier of Ed25519 (RFC 8410 §3).
const ED25519_ALGORITHM: &[u8] = &[0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70];

/// SubjectPublicKeyInfo (RFC 8410 §4).
fn spki(pair: &Ed25519KeyPair) -> Vec<u8> {
    der(
        0x30,
        &[
            ED25519_ALGORITHM,
            &der(0x03, &[&[0], pair.public_key().as_ref()]),
        ],
    )
}

/// Encodes one element with its length in the shortest form (X.690 §10.1).
fn der(tag: u8, contents: &[&[u8]]) -> Vec<u8> {
    let contents = contents.concat();
    let length = contents.len().to_be_bytes();
    let length = &length[length.iter().take_while(|byte| **byte == 0).count()..];
    let prefix = match (contents.len(), u8::try_from(length.len())) {
        (0, _) => vec![tag, 0],
        (1..0x80, _) => vec![tag, length[0]],
        (_, Ok(octets)) => [&[tag, 0x80 | octets], length].concat(),
        (_, Err(_)) => unreachable!("a length has at most 8 octets"),
    };
    [prefix, contents].concat()
}
