//! The path of a relayed request, top to bottom: find the service, authenticate, admit, open, stream.

mod authenticate;
mod max_forwards;
mod on_node;
mod outbound;
mod replay;
mod stream;
mod upgrade;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use gw_shared::http::RequestHead;
use gw_shared::tunnel::head::OutboundRequest;
use http::Response;

pub(crate) use self::authenticate::AuthFailures;
use self::on_node::stream_on_node;
use self::outbound::outbound;
use self::stream::stream;
use self::upgrade::stream_upgrade;
use crate::auth::{Authenticated, VerifiedTokens};
use crate::client_address::Peer;
use crate::current::Current;
use crate::error::Error;
use crate::http_message::{Outcome, RequestBody, ResponseSink};
use crate::lifecycle::Lifecycle;
use crate::request_scope::{Observers, RequestScope, Stage, refuse, respond};
use crate::store::{Directory, Service};
use crate::upstream::cross_node::CrossNodeRequest;
use crate::upstream::{Opening, Upstream, UpstreamRequest};

/// Relays the requests of one worker's callers.
pub(crate) struct Relay {
    pub(crate) directory: Rc<Current<Directory>>,
    /// Issuer of access tokens: the base URL of the region.
    pub(crate) issuer: String,
    pub(crate) tokens: RefCell<VerifiedTokens>,
    pub(crate) auth_failures: AuthFailures,
    pub(crate) upstream: Rc<Upstream>,
    pub(crate) observers: Rc<Observers>,
    pub(crate) lifecycle: Rc<Lifecycle>,
}

impl Relay {
    /// Relays one request to the service with this label. Decides before the returned future is made: the future, which
    /// every idle connection reserves memory for, does not hold the request head.
    pub(crate) fn relay(
        &self,
        scope: &RequestScope,
        label: &str,
        request: RequestHead,
        peer: &Peer,
        body: &mut impl RequestBody,
        response: &mut impl ResponseSink,
    ) -> impl Future<Output = Outcome> {
        let (version, is_upgrade) = (request.version, request.upgrade.is_some());
        let decision = self.decide(scope, label, request, peer, body.was_taken_back());
        async move {
            match decision {
                // Boxed: upgrades are rare, and every request would reserve memory for them.
                Ok(Decision::Opened(request)) if is_upgrade => {
                    Box::pin(stream_upgrade(scope, request, version, body, response)).await
                }
                Ok(Decision::Opened(request)) => stream(scope, request, body, response).await,
                // Boxed: a gateway without other nodes never needs the memory.
                Ok(Decision::OnNode(request)) => {
                    Box::pin(stream_on_node(scope, *request, is_upgrade.then_some(version), body, response)).await
                }
                Ok(Decision::AnswerHere(answer)) => respond(scope, *answer, response).await,
                Ok(Decision::TakenBack) => Outcome::CallerGone,
                Err(error) => refuse(scope, &error, response).await,
            }
        }
    }

    /// Decides everything that precedes the first byte of the body, in the order in which errors are reported.
    fn decide(
        &self,
        scope: &RequestScope,
        label: &str,
        mut request: RequestHead,
        peer: &Peer,
        taken_back: bool,
    ) -> Result<Decision, Error> {
        #[cfg(test)]
        assert_ne!(request.target.path(), tests::PANICKING_PATH, "injected");
        let directory = self.directory.get();
        let service = self.find(scope, &directory, label, &request)?;
        if self.lifecycle.is_ending() {
            return Err(Error::Overloaded("draining"));
        }
        let authenticated = self.authenticate(scope, &directory, service, &request.headers)?;
        peer.serves(&service.account);
        tracing::debug!(request_id = %scope.id, service = %service.label, by = ?authenticated.by, "admitting");
        if taken_back {
            return Ok(Decision::TakenBack);
        }
        if let Some(answer) = max_forwards::count_down(&mut request, scope.id) {
            return Ok(Decision::AnswerHere(Box::new(answer)));
        }
        self.admit_and_open(scope, authenticated, request, peer).map(|opening| match opening {
            Opening::Opened(request) => Decision::Opened(request),
            Opening::OnNode(request) => Decision::OnNode(request),
        })
    }

    /// The service with this label, if it is enabled.
    fn find<'a>(
        &self,
        scope: &RequestScope,
        directory: &'a Directory,
        label: &str,
        request: &RequestHead,
    ) -> Result<&'a Arc<Service>, Error> {
        let service = directory.service(label).ok_or(Error::ServiceNotFound)?;
        scope.note(Stage::Service { service, request });
        if service.enabled { Ok(service) } else { Err(Error::ServiceDisabled) }
    }

    /// Admits the request by the bucket of its service and opens it on a tunnel, unless another node owns the service.
    fn admit_and_open(
        &self,
        scope: &RequestScope,
        authenticated: Authenticated,
        request: RequestHead,
        peer: &Peer,
    ) -> Result<Opening, Error> {
        scope.note(Stage::Opening(&request));
        let outbound = self.outbound(scope, request, peer)?;
        let admission = self.upstream.admit(authenticated)?;
        let opening = self.upstream.open(admission, outbound)?;
        if let Opening::Opened(opened) = &opening {
            scope.note(Stage::Upstream(opened.response.progress()));
        }
        Ok(opening)
    }

    fn outbound(&self, scope: &RequestScope, request: RequestHead, peer: &Peer) -> Result<OutboundRequest, Error> {
        let mut outbound = outbound(request, peer, scope.id)?;
        scope.write_trace_context(&mut outbound.headers);
        Ok(outbound)
    }
}

/// Outcome of the checks before the first byte of the body.
enum Decision {
    Opened(UpstreamRequest),
    /// Another node of the region owns the service.
    OnNode(Box<CrossNodeRequest>),
    /// `Max-Forwards` is 0: the gateway answers (RFC 9110 §7.6.2).
    AnswerHere(Box<Response<Vec<u8>>>),
    /// The caller reset the stream already (rapid reset, CVE-2023-44487): nothing is opened upstream.
    TakenBack,
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
    use rustls_pki_types::CertificateDer;
    use rustls_pki_types::pem::PemObject;

    use crate::demo::{Demo, Options};
    use crate::telemetry::counters::WorkerReport;

    /// A request for it panics in the task of its connection.
    pub(super) const PANICKING_PATH: &str = "/panic";

    #[test]
    fn a_panic_costs_its_connection_and_nothing_else() {
        let demo = Demo::start(&Options::default()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let report = |is_expected: fn(&WorkerReport) -> bool| loop {
            match demo.gateway().control().reports().pop() {
                Some(report) if is_expected(&report) => return report,
                // A busy machine can hold the worker up.
                Some(_) | None => std::thread::sleep(Duration::from_millis(5)),
            }
            assert!(Instant::now() < deadline, "no such report");
        };
        // Those of the enrollment may not have been forgotten yet.
        report(|report| report.connections == 0);
        let (mut bystander, mut victim) = (connect(&demo), connect(&demo));
        assert!(get(&demo, &mut bystander, "/status/204").starts_with("HTTP/1.1 204 "));
        assert_eq!(get(&demo, &mut victim, PANICKING_PATH), "");
        assert!(get(&demo, &mut bystander, "/status/204").starts_with("HTTP/1.1 204 "));
        let report = report(|_| true);
        assert_eq!((report.totals["task_panics"], report.connections, report.tunnels.len()), (1, 1, 1));
        demo.stop();
    }

    fn connect(demo: &Demo) -> StreamOwned<ClientConnection, TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&demo.about.ca_file).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = "demo--echo.eu1.gw.localhost".try_into().unwrap();
        let session = ClientConnection::new(Arc::new(config), name).unwrap();
        StreamOwned::new(session, TcpStream::connect(demo.gateway().address()).unwrap())
    }

    /// The beginning of the response, or nothing if the connection ended.
    fn get(demo: &Demo, stream: &mut StreamOwned<ClientConnection, TcpStream>, path: &str) -> String {
        let key = &demo.about.service_key;
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: demo--echo.eu1.gw.localhost\r\nX-Gw-Service-Key: {key}\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut buffer = [0; 64 * 1024];
        let read = stream.read(&mut buffer).unwrap_or(0);
        String::from_utf8_lossy(&buffer[..read]).into_owned()
    }
}
