//! The path of a relayed request, top to bottom: find the service, authenticate, admit, open, stream.

mod after_freeze;
mod authenticate;
mod carry;
mod for_node;
mod for_worker;
mod max_forwards;
mod on_node;
mod outbound;
mod replay;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use gw_shared::http::RequestHead;
use gw_shared::tunnel::head::OutboundRequest;
use http::Response;

pub(crate) use self::authenticate::AuthFailures;
use self::carry::{Stopped, carry};
pub(crate) use self::for_node::serve_link;
pub(crate) use self::for_worker::serve_for_worker;
use self::on_node::open_on_node;
use self::outbound::outbound;
use crate::auth::{Authenticated, VerifiedTokens};
use crate::current::Current;
use crate::error::{Error, Overload};
use crate::http_message::{Outcome, RequestBody, ResponseSink};
use crate::lifecycle::Lifecycle;
use crate::peer::Peer;
use crate::request_scope::{Observers, RequestScope, Stage, refuse, respond};
use crate::store::{Directory, Service};
use crate::upstream::{Opening, Upstream};

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
    /// Relays one request to the service with this label. Opens it before the returned future is made: the future, which
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
        let upgrade = request.upgrade.as_ref().map(|_| request.version);
        let opening = if self.upstream.tunnels.freeze.is_over(scope.began()) {
            Ok(self.open(scope, label, request, peer, body.was_taken_back()))
        } else {
            Err(Box::new(request))
        };
        async move {
            let opening = match opening {
                Ok(opening) => opening,
                // Boxed, as below.
                Err(request) => {
                    Box::pin(self.open_after_freeze(scope, label, *request, peer, body)).await
                }
            };
            let opened = match opening {
                Ok(Opening::Opened(request)) => Ok(request),
                // Boxed: a gateway without other nodes never needs the memory.
                Ok(Opening::OnNode(request)) => {
                    Box::pin(open_on_node(scope, *request, body, response)).await
                }
                Err(NotRelayed::Refused(error)) => Err(Stopped::Failed(error)),
                Err(NotRelayed::Answered(answer)) => {
                    return respond(scope, *answer, response).await;
                }
                Err(NotRelayed::TakenBack) => Err(Stopped::CallerGone),
            };
            let carried = match opened {
                Ok(request) => carry(Some(scope), request, upgrade, body, response).await,
                Err(stopped) => Err(stopped),
            };
            conclude(scope, carried, response).await
        }
    }

    /// Decides everything that precedes the first byte of the body, in the order in which errors are reported.
    fn open(
        &self,
        scope: &RequestScope,
        label: &str,
        mut request: RequestHead,
        peer: &Peer,
        taken_back: bool,
    ) -> Result<Opening, NotRelayed> {
        #[cfg(test)]
        assert_ne!(request.target.path(), tests::PANICKING_PATH, "injected");
        let directory = self.directory.get();
        let service = self.find(scope, &directory, label, &request)?;
        self.permit(service)?;
        let authenticated = self.authenticate(scope, &directory, service, &request.headers)?;
        peer.serves(&service.account);
        tracing::debug!(request_id = %scope.id, service = %service.label, by = ?authenticated.by, "admitting");
        if taken_back {
            return Err(NotRelayed::TakenBack);
        }
        if let Some(answer) = max_forwards::count_down(&mut request, scope.id) {
            return Err(NotRelayed::Answered(Box::new(answer)));
        }
        Ok(self.admit_and_open(scope, authenticated, request, peer)?)
    }

    /// The service with this label.
    fn find<'a>(
        &self,
        scope: &RequestScope,
        directory: &'a Directory,
        label: &str,
        request: &RequestHead,
    ) -> Result<&'a Arc<Service>, Error> {
        let service = directory.service(label).ok_or(Error::ServiceNotFound)?;
        scope.note(Stage::Service { service, request });
        Ok(service)
    }

    /// Checks that requests of the service are relayed.
    fn permit(&self, service: &Service) -> Result<(), Error> {
        if !service.settings.enabled {
            return Err(Error::ServiceDisabled);
        }
        if self.lifecycle.is_ending() {
            Err(Error::Overloaded(Overload::Draining))
        } else {
            Ok(())
        }
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
        let opening = self.upstream.open(authenticated, outbound)?;
        if let Opening::Opened(opened) = &opening {
            scope.note(Stage::Upstream(opened.response.progress()));
        }
        Ok(opening)
    }

    fn outbound(
        &self,
        scope: &RequestScope,
        request: RequestHead,
        peer: &Peer,
    ) -> Result<OutboundRequest, Error> {
        let mut outbound = outbound(request, peer, scope.id)?;
        scope.write_trace_context(&mut outbound.headers);
        Ok(outbound)
    }
}

/// Why a request goes no further than to the gateway.
enum NotRelayed {
    Refused(Error),
    /// `Max-Forwards` is 0: the gateway answers (RFC 9110 §7.6.2).
    Answered(Box<Response<Vec<u8>>>),
    /// The caller reset the stream already (rapid reset, CVE-2023-44487): nothing is opened upstream.
    TakenBack,
}

impl From<Error> for NotRelayed {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// Answers with the error if there is no response yet.
async fn conclude(
    scope: &RequestScope,
    carried: Result<(), Stopped>,
    response: &mut impl ResponseSink,
) -> Outcome {
    match carried {
        Ok(()) => Outcome::Complete,
        Err(Stopped::CallerGone) => Outcome::CallerGone,
        Err(Stopped::Failed(_)) if response.has_begun() => Outcome::Cut,
        Err(Stopped::Failed(error)) => refuse(scope, &error, response).await,
    }
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
        let mut bystander = connect(&demo);
        let mut victim = connect(&demo);
        assert!(get(&demo, &mut bystander, "/status/204").starts_with("HTTP/1.1 204 "));
        assert_eq!(get(&demo, &mut victim, PANICKING_PATH), "");
        assert!(get(&demo, &mut bystander, "/status/204").starts_with("HTTP/1.1 204 "));
        let report = report(|_| true);
        assert_eq!(
            (
                report.totals["task_panics"],
                report.connections,
                report.tunnels.len()
            ),
            (1, 1, 1)
        );
        demo.stop();
    }

    fn connect(demo: &Demo) -> StreamOwned<ClientConnection, TcpStream> {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_file(&demo.about.ca_file).unwrap())
            .unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = "demo--echo.eu1.gw.localhost".try_into().unwrap();
        let session = ClientConnection::new(Arc::new(config), name).unwrap();
        StreamOwned::new(
            session,
            TcpStream::connect(demo.gateway().address()).unwrap(),
        )
    }

    /// The beginning of the response, or nothing if the connection ended.
    fn get(
        demo: &Demo,
        stream: &mut StreamOwned<ClientConnection, TcpStream>,
        path: &str,
    ) -> String {
        let key = &demo.about.service_key;
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: demo--echo.eu1.gw.localhost\r\nX-Gw-Service-Key: {key}\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut buffer = [0; 64 * 1024];
        let read = stream.read(&mut buffer).unwrap_or(0);
        String::from_utf8_lossy(&buffer[..read]).into_owned()
    }
}
