//! A gateway of an attacker: its certificate is trusted, and its answers are what the test gives.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use gw_shared::tunnel::{self, handshake};
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertificateSigningRequestParams, IsCa,
    Issuer, KeyPair, PublicKeyData,
};
use rustls::crypto::aws_lc_rs;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use rustls_pki_types::PrivateKeyDer;
use serde_json::{Value, json};

use crate::support::SOON;
use crate::support::peers::http1_peer::Peer;

/// A response of the gateway.
#[derive(Debug, Clone)]
pub(super) enum Reply {
    Json(u16, Value),
    /// As `Json` with status 200, with a certificate for the request in it.
    Certificate(Value),
    Raw(String),
}

impl Reply {
    pub(super) fn json(status: u16, value: &Value) -> Self {
        Self::Json(status, value.clone())
    }

    /// The JSON of the reply.
    pub(super) fn value(&self) -> &Value {
        match self {
            Self::Json(_, value) | Self::Certificate(value) => value,
            Self::Raw(_) => &Value::Null,
        }
    }
}

pub(super) struct HostileGateway {
    pub(super) url: String,
    pub(super) ca_pem: String,
    tunnels: Arc<Mutex<Option<Reply>>>,
}

/// State that all connections share.
struct Shared {
    issuer: Issuer<'static, KeyPair>,
    ca_pem: String,
    replies: Vec<(&'static str, Reply)>,
    messages: Vec<Vec<u8>>,
    tunnels: Arc<Mutex<Option<Reply>>>,
}

impl HostileGateway {
    /// The replies of an enrollment for these services.
    pub(super) fn enrolling(services: &[&str]) -> Vec<(&'static str, Reply)> {
        let agent_id = "ag_0123456789abcdefghij";
        let enrolled = json!({
            "enrollment_id": "en_0123456789abcdefghij",
            "agent_id": agent_id,
            "enrollment_secret": "gw_es_x",
            "status": "approved",
            "poll_after_seconds": 1,
        });
        let status = json!({ "status": "approved", "agent_id": agent_id, "poll_after_seconds": 1 });
        let certificate = json!({
            "certificate": "",
            "chain": "",
            "not_after": "2999-01-01T00:00:00Z",
            "agent_id": agent_id,
            "services": services,
        });
        vec![
            ("/enroll", Reply::Json(201, enrolled)),
            ("/enroll/status", Reply::Json(200, status)),
            ("/csr", Reply::Certificate(certificate)),
        ]
    }

    /// Answers requests for each path with its reply, and sends `messages` on each tunnel.
    pub(super) fn start(replies: Vec<(&'static str, Reply)>, messages: Vec<Vec<u8>>) -> Self {
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority_key = KeyPair::generate().unwrap();
        let ca_pem = authority.self_signed(&authority_key).unwrap().pem();
        let issuer = Issuer::new(authority, authority_key);
        let key = KeyPair::generate().unwrap();
        let names = ["eu1.gw.localhost", "*.eu1.gw.localhost"];
        let certificate = certificate(&key, &names, &issuer);
        let mut config =
            ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_no_client_auth()
                .with_single_cert(vec![certificate.into()], PrivateKeyDer::from(key))
                .unwrap();
        config.alpn_protocols = vec![tunnel::ALPN.to_vec(), b"http/1.1".to_vec()];
        let config = Arc::new(config);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!(
            "https://eu1.gw.localhost:{}",
            listener.local_addr().unwrap().port()
        );
        let tunnels = Arc::default();
        let shared = Shared {
            issuer,
            ca_pem: ca_pem.clone(),
            replies,
            messages,
            tunnels: Arc::clone(&tunnels),
        };
        let shared = Arc::new(shared);
        thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                socket.set_read_timeout(Some(SOON)).unwrap();
                let session = ServerConnection::new(Arc::clone(&config)).unwrap();
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.serve(Peer::new(StreamOwned::new(session, socket))));
            }
        });
        Self {
            url,
            ca_pem,
            tunnels,
        }
    }

    pub(super) fn refuse_tunnels_with(&self, reply: Reply) {
        *self.tunnels.lock().unwrap() = Some(reply);
    }
}

impl Shared {
    fn serve(&self, mut peer: Peer<StreamOwned<ServerConnection, TcpStream>>) {
        while let Ok((head, body, _)) = peer.request() {
            let path = head.target.path().to_owned();
            if path != handshake::PATH {
                let reply = self
                    .replies
                    .iter()
                    .find(|(of, _)| *of == path)
                    .map(|(_, reply)| reply);
                peer.send(self.text(reply.unwrap_or(&Reply::Json(404, Value::Null)), &body));
                continue;
            }
            if let Some(reply) = &*self.tunnels.lock().unwrap() {
                peer.send(self.text(reply, &body));
                continue;
            }
            peer.send(handshake::acceptance());
            // A message that the agent refuses may come before the others were sent.
            let sent = peer.stream.write_all(&self.messages.concat());
            drop(sent.and_then(|()| peer.stream.flush()));
            while peer.bytes(1).is_ok() {}
        }
    }

    fn text(&self, reply: &Reply, body: &[u8]) -> String {
        let (status, value) = match reply {
            Reply::Raw(text) => return text.clone(),
            Reply::Json(status, value) => (*status, value.clone()),
            Reply::Certificate(value) => {
                let request: Value = serde_json::from_slice(body).unwrap();
                let csr =
                    CertificateSigningRequestParams::from_pem(request["csr"].as_str().unwrap())
                        .unwrap();
                let mut value = value.clone();
                value["certificate"] = certificate(&csr.public_key, &[], &self.issuer).pem().into();
                value["chain"] = self.ca_pem.clone().into();
                (200, value)
            }
        };
        let json = value.to_string();
        format!(
            "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n\
             {json}",
            json.len()
        )
    }
}

fn certificate(
    key: &impl PublicKeyData,
    names: &[&str],
    issuer: &Issuer<'_, KeyPair>,
) -> Certificate {
    let params =
        CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
    params.signed_by(key, issuer).unwrap()
}
