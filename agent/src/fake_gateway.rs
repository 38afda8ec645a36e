//! A gateway for unit tests: a certificate authority, and a TLS server whose HTTP/1.1 responses the
//! test provides.

use std::io;
use std::net::TcpListener;
use std::ops::Range;
use std::sync::Mutex;

use gw_bed::http1::Head;
use gw_bed::threads::{Peer, ServerTls, listen_tls};
use gw_shared::error_body::{ErrorBody, ErrorDetail};
use gw_shared::id::AgentId;
use gw_shared::identity::enrollment::CertificateReply;
use gw_shared::tunnel;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, IsCa, Issuer, KeyPair,
    PublicKeyData, date_time_ymd,
};
use rustls::ServerConfig;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde::Serialize;

use crate::config::Config;
use crate::identity::state::{Enrollment, StateDir};
use crate::tunnel::AgentContext;

pub(crate) const APEX: &str = "eu1.gw.localhost";
/// The service of the tests' agents.
pub(crate) const HOSTNAME: &str = "acme--api.eu1.gw.localhost";

/// Validity periods in years: one that contains the present, and one in the past.
pub(crate) const NOW: Range<i32> = 2020..4000;
pub(crate) const LONG_AGO: Range<i32> = 2020..2021;

/// The gateway's certificate authority.
pub(crate) struct Authority {
    pub(crate) pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    fn sign(&self, key: &impl PublicKeyData, names: &[&str], years: Range<i32>) -> String {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.use_authority_key_identifier_extension = true;
        params.not_before = date_time_ymd(years.start, 1, 1);
        params.not_after = date_time_ymd(years.end, 1, 1);
        params.signed_by(key, &self.issuer).unwrap().pem()
    }

    /// The answer of `/csr`.
    pub(crate) fn certify(&self, csr: &str, years: Range<i32>) -> CertificateReply {
        let request = CertificateSigningRequestParams::from_pem(csr).unwrap();
        CertificateReply {
            certificate: self.sign(&request.public_key, &[], years),
            chain: self.pem.clone(),
            not_after: "as in the certificate".into(),
            agent_id: AgentId::random(),
            services: vec![HOSTNAME.into()],
        }
    }

    /// A private key and a certificate for an agent.
    pub(crate) fn identity_pem(&self, years: Range<i32>) -> String {
        let key = KeyPair::generate().unwrap();
        key.serialize_pem() + &self.sign(&key, &[], years)
    }

    fn server_config(&self) -> ServerConfig {
        let key = KeyPair::generate().unwrap();
        let certificate = self.sign(&key, &[APEX, &format!("*.{APEX}")], NOW);
        let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
        let identity = (certificate, PrivateKeyDer::from(key));
        gw_bed::tls::server(identity, &[tunnel::ALPN, b"http/1.1"])
    }
}

/// A request received by the fake gateway.
pub(crate) struct Request {
    /// Start line and fields.
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

/// Serves on loopback; `answer` returns the whole response, including its head. Returns the port.
pub(crate) fn serve(
    authority: &Authority,
    answer: impl FnMut(&Request) -> String + Send + 'static,
) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let answer = Mutex::new(answer);
    listen_tls(listener, authority.server_config(), move |mut peer| {
        while let Ok(request) = read_request(&mut peer) {
            let response = answer.lock().unwrap()(&request);
            peer.send(response);
        }
    });
    port
}

fn read_request(peer: &mut Peer<ServerTls>) -> io::Result<Request> {
    let head = peer.raw_head()?;
    let length = Head::request(&head)?.content_length()?.unwrap_or(0);
    Ok(Request {
        head: String::from_utf8(head.to_vec()).unwrap(),
        body: peer.bytes(length as usize)?,
    })
}

/// A response with a JSON body; `fields` are complete header lines.
pub(crate) fn json(status: u16, fields: &str, body: &impl Serialize) -> String {
    let body = serde_json::to_string(body).unwrap();
    format!(
        "HTTP/1.1 {status} X\r\n{fields}content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// A response with the gateway's error body.
pub(crate) fn refusal(status: u16, fields: &str, code: &str) -> String {
    let error = ErrorDetail {
        code: code.into(),
        message: "because".into(),
        detail: None,
        request_id: String::new(),
    };
    json(status, fields, &ErrorBody { error })
}

/// An agent for [`HOSTNAME`] that is enrolled at a gateway on `port` with a certificate that is
/// valid in `years`, and its state folder. Its tasks are not running.
pub(crate) fn agent(
    authority: &Authority,
    years: Range<i32>,
    port: u16,
) -> (tempfile::TempDir, AgentContext) {
    let directory = tempfile::tempdir().unwrap();
    let enrollment = Enrollment {
        agent_id: AgentId::random(),
        gateway_name: APEX.into(),
        gateway_host: "127.0.0.1".into(),
        gateway_port: port,
        services: vec![HOSTNAME.into()],
        later: Default::default(),
    };
    StateDir::new(directory.path())
        .complete(
            &enrollment,
            &authority.identity_pem(years),
            Some(&authority.pem),
        )
        .unwrap();
    let backends = ["http://backend.invalid".to_owned()];
    let config = Config::load(None, Some(directory.path().into()), &backends, |_| None).unwrap();
    (directory, AgentContext::alone(config))
}
