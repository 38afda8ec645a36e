use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::server::ServerConfig;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::time_provider::TimeProvider;
use rustls::{ClientConnection, ServerConnection, version};
use rustls_pki_types::PrivateKeyDer;

use super::*;
use crate::net::tls::TlsFailure;

/// 2026-01-01
const NOW: u64 = 1_767_225_600;

#[derive(Debug)]
struct At(u64);

impl TimeProvider for At {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(self.0)))
    }
}

struct Server {
    leaf: CertificateDer<'static>,
    key: KeyPair,
}

/// What `openssl req -x509` makes: a certificate that has signed itself, with CA:TRUE, for `names`.
fn appliance(names: &[&str]) -> Server {
    let key = KeyPair::generate().unwrap();
    let params = appliance_params(names);
    let leaf = params.self_signed(&key).unwrap().der().clone();
    Server { leaf, key }
}

fn appliance_params(names: &[&str]) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, "nas");
    params.not_before = rcgen::date_time_ymd(2025, 1, 1);
    params.not_after = rcgen::date_time_ymd(2027, 1, 1);
    params
}

fn trusting(certificates: &[&Server]) -> Trusted {
    Trusted::only(certificates.iter().map(|it| it.leaf.clone()).collect()).unwrap()
}

/// The error of a client that connects to `a.example` at this time, in words.
fn refusal(
    server: &Server,
    key: &KeyPair,
    trusted: Trusted,
    or_names: &[&'static str],
    now: u64,
    version: &'static SupportedProtocolVersion,
) -> Option<String> {
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let key = aws_lc_rs::sign::any_supported_type(&key).unwrap();
    // Unlike `with_single_cert`, does not check that they belong together.
    let pair = SingleCertAndKey::from(CertifiedKey::new(vec![server.leaf.clone()], key));
    let server = ServerConfig::builder_with_provider(Arc::clone(&PROVIDER))
        .with_protocol_versions(&[version])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(pair));
    let or_names = or_names.iter().map(|name| (*name).try_into().unwrap());
    let client = client_config(rustls::ALL_VERSIONS, Arc::new(trusted), or_names.collect());
    let mut client = client.unwrap().with_no_client_auth();
    client.time_provider = Arc::new(At(now));
    let mut client = ClientConnection::new(Arc::new(client), "a.example".try_into().unwrap());
    let client = client.as_mut().unwrap();
    let mut server = ServerConnection::new(Arc::new(server)).unwrap();
    while client.is_handshaking() || server.is_handshaking() {
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        server.read_tls(&mut &bytes[..]).unwrap();
        server.process_new_packets().unwrap();
        let mut bytes = Vec::new();
        server.write_tls(&mut bytes).unwrap();
        client.read_tls(&mut &bytes[..]).unwrap();
        if let Err(error) = client.process_new_packets() {
            return Some(TlsFailure(error).to_string());
        }
    }
    None
}

/// [`refusal`] of a server with its own key, of TLS 1.3, now.
fn refusal_of(server: &Server, trusted: Trusted, or_names: &[&'static str]) -> Option<String> {
    refusal(server, &server.key, trusted, or_names, NOW, &version::TLS13)
}

#[test]
fn a_certificate_in_the_file_is_trusted_whatever_its_names_and_usages_are() {
    for names in [&[][..], &["elsewhere.example"]] {
        let nas = appliance(names);
        for version in [&version::TLS12, &version::TLS13] {
            let refused = refusal(&nas, &nas.key, trusting(&[&nas]), &[], NOW, version);
            assert_eq!(refused, None);
        }
    }
}

#[test]
fn the_dates_of_a_certificate_in_the_file_are_checked() {
    let nas = appliance(&[]);
    let expired = "expired on Fri, 01 Jan 2027 00:00:00 GMT, and";
    let early = "is valid from Wed, 01 Jan 2025 00:00:00 GMT on, and";
    let two_years = 2 * 365 * 86_400;
    for (now, expected) in [(NOW + two_years, expired), (NOW - two_years, early)] {
        let trusted = trusting(&[&nas]);
        let refused = refusal(&nas, &nas.key, trusted, &[], now, &version::TLS13).unwrap();
        let beginning = format!("its certificate {expected}");
        assert!(refused.starts_with(&beginning), "{refused}");
    }
}

#[test]
fn a_server_with_another_key_than_that_of_its_certificate_is_refused() {
    let nas = appliance(&[]);
    let other = KeyPair::generate().unwrap();
    for version in [&version::TLS12, &version::TLS13] {
        let refused = refusal(&nas, &other, trusting(&[&nas]), &[], NOW, version);
        let expected = "the signature of its handshake is not by the key of its certificate";
        assert_eq!(refused.as_deref(), Some(expected));
    }
}

#[test]
fn an_unknown_certificate_is_refused_with_its_names() {
    let known = appliance(&[]);
    let nas = appliance(&["nas.example", "10.0.0.5"]);
    let refused = refusal_of(&nas, trusting(&[&known]), &[]);
    let expected = "its certificate, for nas.example, 10.0.0.5, is self-signed, is that of an \
                    authority (CA:TRUE) and is not trusted";
    assert_eq!(refused.as_deref(), Some(expected));
}

#[test]
fn a_certificate_of_an_authority_is_refused_although_a_trusted_one_has_issued_it() {
    let known = appliance(&[]);
    let issuer = Issuer::new(appliance_params(&[]), &known.key);
    let key = KeyPair::generate().unwrap();
    let mut params = appliance_params(&["a.example"]);
    params.distinguished_name.push(DnType::CommonName, "leaf");
    let leaf = params.signed_by(&key, &issuer).unwrap().der().clone();
    let issued = Server { leaf, key };
    let refused = refusal_of(&issued, trusting(&[&known]), &[]).unwrap();
    let expected = "is issued by \"CN=nas\", is that of an authority (CA:TRUE)";
    assert!(refused.contains(expected), "{refused}");
    assert_eq!(refusal_of(&issued, trusting(&[&known, &issued]), &[]), None);
}

#[test]
fn a_certificate_may_be_for_any_of_the_names() {
    let authority = appliance(&[]);
    let issuer = Issuer::new(appliance_params(&[]), &authority.key);
    let key = KeyPair::generate().unwrap();
    let mut params = appliance_params(&["b.example"]);
    params.is_ca = IsCa::NoCa;
    let leaf = params.signed_by(&key, &issuer).unwrap().der().clone();
    let server = Server { leaf, key };
    let refused = refusal_of(&server, trusting(&[&authority]), &[]);
    let expected = "its certificate is for b.example, not for a.example";
    assert_eq!(refused.as_deref(), Some(expected));
    let with = |names| refusal_of(&server, trusting(&[&authority]), names);
    assert!(with(&["c.example"]).is_some_and(|text| text.contains("not for a.example")));
    assert_eq!(with(&["c.example", "b.example"]), None);
}
