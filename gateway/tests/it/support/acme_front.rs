//! An HTTPS server before Pebble, which answers with Pebble's certificate. It passes requests on
//! with their `Host`, so that the URLs in Pebble's answers lead to it. A test decides about each
//! request, and looks at all requests later.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use gw_shared::http::head::RequestHead;
use http::Method;
use rustls::crypto::aws_lc_rs;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use ureq::tls::{RootCerts, TlsConfig};

use super::SOON;
use super::acme_servers::pebble::Pebble;
use super::peers::http1_peer::Peer;

/// Longest body of an answer of Pebble, in bytes.
const BODY_MAX: u64 = 1 << 20;

/// Kind of a request, by the path that Pebble gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Directory,
    Nonce,
    Account,
    NewOrder,
    Order,
    Authorization,
    Challenge,
    Finalize,
    Certificate,
    /// Pebble 2.4 has none: a test answers it.
    RenewalInfo,
    Other,
}

impl Kind {
    fn of(path: &str) -> Self {
        match path.trim_start_matches('/').split('/').next() {
            Some("dir") => Self::Directory,
            Some("nonce-plz") => Self::Nonce,
            Some("sign-me-up" | "my-account") => Self::Account,
            Some("order-plz") => Self::NewOrder,
            Some("my-order") => Self::Order,
            Some("authZ") => Self::Authorization,
            Some("chalZ") => Self::Challenge,
            Some("finalize-order") => Self::Finalize,
            Some("certZ") => Self::Certificate,
            Some("renewalInfo") => Self::RenewalInfo,
            _ => Self::Other,
        }
    }
}

/// A request to the authority.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) kind: Kind,
    pub(crate) path: String,
    /// Arrival.
    pub(crate) at: Instant,
    /// Payload of its JWS (RFC 8555 §6.2). `Null` without one.
    pub(crate) payload: Value,
    /// Status of the answer, once there is one.
    pub(crate) status: Option<u16>,
}

impl Request {
    /// The first name of a new order.
    pub(crate) fn name(&self) -> &str {
        let name = &self.payload["identifiers"][0]["value"];
        name.as_str().unwrap_or_default()
    }
}

/// Change of a JSON document in an answer of Pebble.
type Change = Box<dyn FnOnce(&mut Value) + Send>;

/// Decision about one request.
pub(crate) enum Verdict {
    Forward,
    /// Pebble's answer, with a change of its JSON document.
    Change(Change),
    /// This answer. Pebble learns nothing of the request.
    Answer(Answer),
    /// Waits for the next rule.
    Hold,
}

/// An answer of the front or of Pebble.
pub(crate) struct Answer {
    status: u16,
    fields: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Answer {
    /// A JSON document.
    pub(crate) fn json(document: &Value) -> Self {
        Self {
            status: 200,
            fields: vec![("Content-Type".to_owned(), "application/json".to_owned())],
            body: document.to_string().into_bytes(),
        }
    }

    /// The rate limit of an authority (RFC 8555 §6.6), which asks for this wait.
    pub(crate) fn rate_limited(wait: Duration) -> Self {
        let problem = json!({
            "type": "urn:ietf:params:acme:error:rateLimited",
            "detail": "too many new orders recently",
            "status": 429,
        });
        let mut answer = Self::json(&problem).with("Retry-After", &wait.as_secs().to_string());
        answer.status = 429;
        answer.fields[0].1 = "application/problem+json".to_owned();
        answer
    }

    /// As this one, with one field more.
    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.fields.push((name.to_owned(), value.to_owned()));
        self
    }
}

type Rule = Arc<dyn Fn(&Request) -> Verdict + Send + Sync>;

/// The server. It runs until the tests end.
pub(crate) struct Front {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    /// The name of the server in the requests.
    host: String,
    pebble: String,
    agent: ureq::Agent,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    rule: Rule,
    /// Number of rules so far: a request that waits is decided again for each.
    rules: usize,
    requests: Vec<Request>,
}

impl Front {
    /// Starts a server before `pebble` that passes all requests on.
    pub(crate) fn start(pebble: &Pebble) -> Self {
        let tls = server_config(pebble);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            host: address.to_string(),
            pebble: pebble.directory().trim_end_matches("/dir").to_owned(),
            agent: agent(pebble),
            state: Mutex::new(State {
                rule: Arc::new(|_| Verdict::Forward),
                rules: 0,
                requests: Vec::new(),
            }),
            changed: Condvar::new(),
        });
        let known = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&known);
                let session = ServerConnection::new(Arc::clone(&tls)).unwrap();
                thread::spawn(move || shared.serve(StreamOwned::new(session, stream)));
            }
        });
        Self { address, shared }
    }

    /// URL of the directory.
    pub(crate) fn directory(&self) -> String {
        format!("https://{}/dir", self.address)
    }

    /// URL of the renewal information, for a directory that has it.
    pub(crate) fn renewal_info(&self) -> String {
        format!("https://{}/renewalInfo", self.address)
    }

    /// Decides by `rule` from now on, also about requests that wait.
    pub(crate) fn set(&self, rule: impl Fn(&Request) -> Verdict + Send + Sync + 'static) {
        let mut state = self.shared.state.lock().unwrap();
        state.rule = Arc::new(rule);
        state.rules += 1;
        self.shared.changed.notify_all();
    }

    /// The requests of this kind, in order of their arrival.
    pub(crate) fn requests(&self, kind: Kind) -> Vec<Request> {
        let state = self.shared.state.lock().unwrap();
        let of_kind = state.requests.iter().filter(|it| it.kind == kind);
        of_kind.cloned().collect()
    }

    /// Kinds of all requests, in order of their arrival.
    pub(crate) fn kinds(&self) -> Vec<Kind> {
        let state = self.shared.state.lock().unwrap();
        state.requests.iter().map(|it| it.kind).collect()
    }

    /// The new orders for this name.
    pub(crate) fn orders_of(&self, name: &str) -> Vec<Request> {
        let mut orders = self.requests(Kind::NewOrder);
        orders.retain(|order| order.name() == name);
        orders
    }

    /// Waits for `count` requests of this kind that are not the same request again, by their paths
    /// and payloads.
    #[track_caller]
    pub(crate) fn await_different(&self, kind: Kind, count: usize) {
        let state = self.shared.state.lock().unwrap();
        let different = |state: &State| {
            let of_kind = state.requests.iter().filter(|it| it.kind == kind);
            let different: BTreeSet<String> = of_kind
                .map(|it| format!("{} {}", it.path, it.payload))
                .collect();
            different.len()
        };
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(state, SOON, |state| different(state) < count)
            .unwrap();
        let found = different(&state);
        drop(state);
        assert!(found >= count, "{found} of {count} requests: {kind:?}");
    }
}

impl Shared {
    /// Answers the requests of a connection until it ends.
    fn serve(&self, stream: StreamOwned<ServerConnection, TcpStream>) {
        let mut peer = Peer::new(stream);
        while let Ok((head, body, _)) = peer.request() {
            let answer = self.answer(&head, body);
            let mut text = format!("HTTP/1.1 {} Answer\r\n", answer.status);
            for (name, value) in &answer.fields {
                text += &format!("{name}: {value}\r\n");
            }
            let has_body = head.method != Method::HEAD && answer.status != 204;
            if has_body {
                text += &format!("Content-Length: {}\r\n", answer.body.len());
            }
            text += "\r\n";
            let mut bytes = text.into_bytes();
            if has_body {
                bytes.extend(answer.body);
            }
            // A gateway that was killed does not read it.
            if peer.try_send(&bytes).is_err() {
                return;
            }
        }
    }

    fn answer(&self, head: &RequestHead, body: Vec<u8>) -> Answer {
        let path = head.target.to_string();
        let request = Request {
            kind: Kind::of(&path),
            path,
            at: Instant::now(),
            payload: payload(&body),
            status: None,
        };
        let mut state = self.state.lock().unwrap();
        let number = state.requests.len();
        state.requests.push(request.clone());
        self.changed.notify_all();
        drop(state);
        let answer = match self.decide(&request) {
            Verdict::Answer(answer) => answer,
            Verdict::Change(change) => {
                let mut answer = self.forward(head, body);
                let mut document = serde_json::from_slice(&answer.body).unwrap();
                change(&mut document);
                answer.body = document.to_string().into_bytes();
                answer
            }
            Verdict::Forward | Verdict::Hold => self.forward(head, body),
        };
        let mut state = self.state.lock().unwrap();
        state.requests[number].status = Some(answer.status);
        self.changed.notify_all();
        answer
    }

    /// The decision about a request, once it is another than to wait.
    fn decide(&self, request: &Request) -> Verdict {
        let mut state = self.state.lock().unwrap();
        loop {
            let (rule, rules) = (Arc::clone(&state.rule), state.rules);
            drop(state);
            match rule(request) {
                Verdict::Hold => {}
                verdict => return verdict,
            }
            state = self.state.lock().unwrap();
            state = self
                .changed
                .wait_while(state, |state| state.rules == rules)
                .unwrap();
        }
    }

    fn forward(&self, head: &RequestHead, body: Vec<u8>) -> Answer {
        let mut request = http::Request::builder()
            .method(head.method.clone())
            .uri(format!("{}{}", self.pebble, head.target))
            .header("Host", &self.host);
        for name in ["content-type", "user-agent", "accept"] {
            if let Some(value) = head.headers.get(name) {
                request = request.header(name, value.clone());
            }
        }
        // `ureq` sends a body with POST only.
        let answer = match head.method == Method::POST {
            true => self.agent.run(request.body(body).unwrap()),
            false => self.agent.run(request.body(()).unwrap()),
        };
        let Ok(mut answer) = answer else {
            return Answer {
                status: 502,
                fields: Vec::new(),
                body: Vec::new(),
            };
        };
        let fields = [
            "Content-Type",
            "Location",
            "Link",
            "Replay-Nonce",
            "Retry-After",
        ];
        let fields = fields.into_iter().flat_map(|name| {
            let values = answer.headers().get_all(name).into_iter();
            values.map(|value| (name.to_owned(), value.to_str().unwrap().to_owned()))
        });
        Answer {
            status: answer.status().as_u16(),
            fields: fields.collect(),
            body: answer
                .body_mut()
                .with_config()
                .limit(BODY_MAX)
                .read_to_vec()
                .unwrap(),
        }
    }
}

/// A rule that lets challenges wait without end.
pub(crate) fn keep_pending(request: &Request) -> Verdict {
    match request.kind {
        Kind::Challenge => Verdict::Answer(Answer::json(&json!({
            "type": "tls-alpn-01",
            "url": request.path,
            "token": "waits",
            "status": "processing",
        }))),
        _ => Verdict::Forward,
    }
}

/// The payload of a JWS in its JSON form. `Null` if there is none.
fn payload(body: &[u8]) -> Value {
    let jws: Value = serde_json::from_slice(body).unwrap_or_default();
    let payload = jws["payload"].as_str().unwrap_or_default();
    let payload = BASE64_URL_SAFE_NO_PAD.decode(payload).unwrap_or_default();
    serde_json::from_slice(&payload).unwrap_or_default()
}

/// The certificate and key of Pebble, which the gateway trusts.
fn server_config(pebble: &Pebble) -> Arc<ServerConfig> {
    let file = |name: &str| pebble.ca_file().with_file_name(name);
    let certificate = CertificateDer::from_pem_file(file("server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(file("server.key")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    Arc::new(config)
}

/// A client that trusts Pebble.
fn agent(pebble: &Pebble) -> ureq::Agent {
    let root = CertificateDer::from_pem_file(pebble.ca_file()).unwrap();
    let root = ureq::tls::Certificate::from_der(&root).to_owned();
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::new_with_certs(&[root]))
        .unversioned_rustls_crypto_provider(Arc::new(aws_lc_rs::default_provider()))
        .build();
    let config = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .timeout_global(Some(SOON))
        .tls_config(tls)
        .build();
    config.new_agent()
}
