//! A request's way through the gateway, top to bottom.

mod max_forwards;
mod outbound;
mod replay;
mod upgrade;

use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use futures_util::future::{Either, select};
use gw_shared::http::fields::{self, X_GW_REQUEST_ID};
use gw_shared::http::{InvalidBody, Part, RequestHead, UnreadHead};
use gw_shared::runtime;
use http::header::HeaderMap;
use http::{Response, StatusCode};

use self::outbound::outbound;
pub(crate) use self::replay::{REPLAY_FRAMING, Replay, replay};
use self::upgrade::switch;
use crate::apex;
use crate::auth::{self, Authenticated};
use crate::client_address::{Peer, client_address};
use crate::clock::Timestamp;
use crate::downstream::{BodyError, CallerGone, RequestBody, ResponseSink};
use crate::error::{Error, request_id_value};
use crate::hostname::Destination;
use crate::limit::{Bucket, Exhausted};
use crate::limits;
use crate::pipe::Frame;
use crate::request_scope::Journey;
use crate::store::{Directory, Service};
use crate::upstream::{self, Download, Exchange, PendingResponse, ResponseHead, Upload};
use crate::worker::Core;

/// How a request ended, for the connection it came on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The response went out whole.
    Complete,
    /// The same, and it was a refusal to somebody who is not known yet.
    Refused,
    /// The response began and could not be completed: it must not look complete.
    Cut,
    /// The caller went away.
    CallerGone,
}

/// Relays one request: find the service, authenticate, admit, open, stream both bodies, account.
pub(crate) async fn relay(
    core: &Rc<Core>,
    request: RequestHead,
    peer: &Peer,
    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Outcome {
    let client = client_address(peer.address, &request.headers, &core.policy.trusted_proxies);
    // Accounts when it is dropped, however this ends.
    let journey = &Journey::begin(core, &request, client);
    let (host, version, upgrades) = (request.authority.clone(), request.version, request.upgrade.is_some());
    let destination = core.region.destination(host.as_str());
    if destination == Destination::Apex {
        journey.asks_apex(&request);
    }
    let outcome = match destination {
        Destination::Tenant(label) => match open(journey, &label, request, peer, body.was_taken_back()) {
            // Boxed: it is rare, and every request would keep room for it.
            Ok(Opened::Exchange(exchange)) if upgrades => {
                Box::pin(switch(journey, exchange, version, body, response)).await
            }
            Ok(Opened::Exchange(exchange)) => stream(journey, exchange, body, response).await,
            Ok(Opened::EndsHere(answer)) => answer_with(journey, *answer, response).await,
            Ok(Opened::Nothing) => Outcome::CallerGone,
            Err(error) => refuse(journey, &error, response).await,
        },
        _ if core.is_ending() => refuse(journey, &Error::Overloaded("draining"), response).await,
        // Boxed: every idle connection would keep room for it.
        Destination::Apex => Box::pin(answer(journey, &request, body, response)).await,
        Destination::Elsewhere => refuse(journey, &Error::Misdirected, response).await,
    };
    journey.ends(outcome);
    outcome
}

/// What became of a request that may pass.
enum Opened {
    Exchange(Exchange),
    /// It was for us, by its `Max-Forwards`.
    EndsHere(Box<Response<Vec<u8>>>),
    /// Nobody waits for it any more: who takes back all that he asks for (CVE-2023-44487) gets no further than this.
    Nothing,
}

/// Everything that can be decided before the first byte of the body, in the order that the checks have.
fn open(
    journey: &Journey,
    label: &str,
    mut request: RequestHead,
    peer: &Peer,
    taken_back: bool,
) -> Result<Opened, Error> {
    #[cfg(test)]
    assert_ne!(request.target.path(), tests::PANICKING_PATH, "injected");
    let directory = journey.core.directory();
    let service = find(journey, &directory, label, &request)?;
    if journey.core.is_ending() {
        return Err(Error::Overloaded("draining"));
    }
    let authenticated = authenticate(journey, &directory, service, &request.headers)?;
    peer.serves(&service.account);
    tracing::debug!(request_id = %journey.id, service = %service.label, by = ?authenticated.by, "admitting");
    if taken_back {
        return Ok(Opened::Nothing);
    }
    if let Some(answer) = max_forwards::count_down(&mut request, journey.id) {
        return Ok(Opened::EndsHere(Box::new(answer)));
    }
    set_out(journey, authenticated, request, peer).map(Opened::Exchange)
}

/// The service of a request, if it is to be had.
fn find<'a>(
    journey: &Journey,
    directory: &'a Directory,
    label: &str,
    request: &RequestHead,
) -> Result<&'a Arc<Service>, Error> {
    let service = directory.service(label).ok_or(Error::ServiceNotFound)?;
    journey.is_for(service, request);
    if service.enabled { Ok(service) } else { Err(Error::ServiceDisabled) }
}

/// Has the request admitted and opened on a tunnel, wherever that is.
fn set_out(
    journey: &Journey,
    authenticated: Authenticated,
    request: RequestHead,
    peer: &Peer,
) -> Result<Exchange, Error> {
    let has_body = request.framing.has_body() || request.upgrade.is_some();
    journey.sets_out(&request);
    let mut head = outbound(request, peer, journey.id)?;
    journey.write_to(head.headers_mut());
    let exchange = upstream::open(&journey.core, authenticated, head, has_body)?;
    journey.passed(exchange.response.passage());
    Ok(exchange)
}

/// Authenticates the caller. Failures are limited by address: who has had too many is told so instead of why. What is
/// right opens all the same, so that nobody locks out others behind the same address; only where forged tokens come
/// from, those that were not seen before have to wait, because each costs a signature check.
fn authenticate(
    journey: &Journey,
    directory: &Directory,
    service: &Arc<Service>,
    headers: &HeaderMap,
) -> Result<Authenticated, Error> {
    let (core, client) = (&journey.core, journey.client);
    let (failures, forgeries) = (&core.addresses.failures, &core.addresses.forgeries);
    let limited = |exhausted: Exhausted| Error::AuthRateLimited { retry_after: exhausted.until_one };
    let may_verify = || {
        forgeries.borrow_mut().is_exhausted(client, Instant::now()).map_or(Ok(()), |exhausted| Err(limited(exhausted)))
    };
    let tokens = &mut core.tokens.borrow_mut();
    let checks = auth::Checks { directory, issuer: &core.issuer, service, now: Timestamp::now, may_verify };
    let authenticated = auth::authenticate(checks, tokens, headers);
    journey.authenticated(authenticated.as_ref().ok().map(|authenticated| &authenticated.by));
    authenticated.map_err(|error| {
        if !error.is_failed_authentication() {
            return error;
        }
        if error == Error::TokenForged {
            // Counted; whether it is one too many is asked before the next.
            let _ = forgeries.borrow_mut().take(client, Instant::now());
        }
        failures.borrow_mut().take(client, Instant::now()).map_or_else(limited, |()| error)
    })
}

/// Carries the request body up and the response down at the same time, until the response is complete or one side is
/// gone. Whatever is dropped here is cancelled all the way to the backend.
async fn stream(
    journey: &Journey,
    exchange: Exchange,
    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Outcome {
    let Exchange { upload, response: pending } = exchange;
    let ended = {
        let down = std::pin::pin!(receive_response(journey, pending, response));
        let up = std::pin::pin!(send_body(journey, body, upload));
        match select(down, up).await {
            Either::Left((ended, _)) => ended,
            Either::Right((BodyError::Gone, _)) => return Outcome::CallerGone,
            Either::Right((BodyError::Malformed(error), _)) => Ended::BadBody(error),
        }
    };
    conclude(journey, ended, response).await
}

async fn conclude(journey: &Journey, ended: Ended, response: &mut impl ResponseSink) -> Outcome {
    match ended {
        Ended::Complete => Outcome::Complete,
        Ended::Cut => Outcome::Cut,
        Ended::CallerGone => Outcome::CallerGone,
        Ended::Refused(error) => refuse(journey, &error, response).await,
        Ended::BadBody(_) if response.has_begun() => Outcome::Cut,
        Ended::BadBody(error) => {
            response.begin_refusal(false);
            refuse(journey, &Error::BadRequest(error.to_string()), response).await
        }
    }
}

enum Ended {
    Complete,
    Cut,
    CallerGone,
    Refused(Error),
    BadBody(InvalidBody),
}

/// Passes the body on as it arrives, then watches for the caller. Returns only when the caller is gone or talks
/// nonsense: a response can be complete long before, or long after, its request.
async fn send_body(journey: &Journey, body: &mut impl RequestBody, upload: Upload) -> BodyError {
    if let Err(error) = pass_on(journey, body, upload).await {
        return error;
    }
    body.gone().await;
    BodyError::Gone
}

/// Passes the body on to its end, or until the backend has heard enough.
async fn pass_on(journey: &Journey, body: &mut impl RequestBody, mut upload: Upload) -> Result<(), BodyError> {
    let mut tiny = None;
    loop {
        match body.part().await {
            Ok(Part::Data(data)) => {
                let last = body.is_done();
                if data.len() < limits::TINY_PIECE && !last {
                    let now = Instant::now();
                    let bucket = tiny.get_or_insert_with(|| Bucket::new(limits::TINY_PIECES, now));
                    if bucket.take(now).is_err() {
                        // What comes meanwhile comes as one.
                        runtime::sleep(limits::TINY_PIECE_WAIT).await;
                    }
                }
                journey.received(&data, last);
                // A backend that does not read must not keep us from seeing that the caller has left.
                let send = std::pin::pin!(upload.send(data, last));
                let sent = match select(send, std::pin::pin!(body.gone())).await {
                    Either::Left((sent, _)) => sent,
                    Either::Right((CallerGone, _)) => return Err(BodyError::Gone),
                };
                // If it was not taken, the response says why.
                if last || sent.is_err() {
                    return Ok(());
                }
            }
            Ok(Part::Trailers(trailers)) => {
                journey.received_whole();
                let _ = upload.finish(Some(fields::end_to_end_trailers(trailers))).await;
                return Ok(());
            }
            Ok(Part::End) => {
                journey.received_whole();
                let _ = upload.finish(None).await;
                return Ok(());
            }
            Err(error) => {
                upload.abort();
                return Err(error);
            }
        }
    }
}

async fn receive_response(journey: &Journey, pending: PendingResponse, response: &mut impl ResponseSink) -> Ended {
    let (head, mut download) = match receive_head(journey, pending, response).await {
        Ok(received) => received,
        Err(ended) => return ended,
    };
    if response.head(head).await.is_err() {
        return Ended::CallerGone;
    }
    receive_body(journey, &mut download, response).await
}

/// Passes interim responses on and returns the final head, as the caller is to get it.
async fn receive_head(
    journey: &Journey,
    mut pending: PendingResponse,
    response: &mut impl ResponseSink,
) -> Result<(ResponseHead, Download), Ended> {
    while let Some(interim) = pending.interim().await {
        pending.gather_while(response.interim(interim)).await.map_err(|CallerGone| Ended::CallerGone)?;
    }
    let (passage, received) = pending.head().await;
    journey.passed(passage);
    let (mut head, download) = received.map_err(Ended::Refused)?;
    journey.answered(&head);
    head.headers.insert(X_GW_REQUEST_ID, request_id_value(journey.id));
    journey.core.date(&mut head.headers);
    Ok((head, download))
}

async fn receive_body(journey: &Journey, download: &mut Download, response: &mut impl ResponseSink) -> Ended {
    let mut trailers = None;
    loop {
        // What can be sent together is; what there is when nothing more is ready goes out at once.
        let frame = match futures_util::poll!(std::future::poll_fn(|cx| download.poll_frame(cx))) {
            Poll::Ready(frame) => frame,
            Poll::Pending => {
                if download.gather_while(response.flush()).await.is_err() {
                    return Ended::CallerGone;
                }
                std::future::poll_fn(|cx| download.poll_frame(cx)).await
            }
        };
        let sent = match frame {
            Ok(Frame::Data(data)) => {
                let (bytes, last) = (data.len(), download.is_done());
                journey.passing_on(&data);
                let sent = download.gather_while(response.data(data, last)).await;
                download.release(bytes);
                sent
            }
            Ok(Frame::Trailers(fields)) => {
                trailers = Some(fields);
                Ok(())
            }
            Ok(Frame::End) => {
                journey.passed_on_whole();
                return match response.end(trailers).await {
                    Ok(()) => Ended::Complete,
                    Err(CallerGone) => Ended::CallerGone,
                };
            }
            Ok(Frame::Head(_) | Frame::Broken(_)) | Err(_) => return Ended::Cut,
        };
        if sent.is_err() {
            return Ended::CallerGone;
        }
    }
}

/// Answers a request to the apex.
async fn answer(
    journey: &Journey,
    request: &RequestHead,
    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Outcome {
    // Bodies for the apex are small: nobody needs to wait with them.
    let go_on =
        ResponseHead { status: StatusCode::CONTINUE, headers: HeaderMap::new(), has_body: false, upgrade: None };
    if request.expects_continue && response.interim(go_on).await.is_err() {
        return Outcome::CallerGone;
    }
    let Ok(answer) = apex::serve(journey, request, body).await else {
        return Outcome::CallerGone;
    };
    answer_with(journey, answer, response).await
}

/// Answers with a response of ours.
async fn answer_with(journey: &Journey, answer: Response<Vec<u8>>, response: &mut impl ResponseSink) -> Outcome {
    journey.answered_here(answer.status(), answer.body().len());
    response.begin_refusal(true);
    let sent = response.whole(journey.core.dated(answer)).await;
    if sent.is_ok() { Outcome::Complete } else { Outcome::CallerGone }
}

/// Answers a request that could not be understood. It is recorded if what could be read of it names a service or the
/// apex.
pub(crate) async fn refuse_unread(
    core: &Rc<Core>,
    head: UnreadHead,
    peer: &Peer,
    error: &Error,
    response: &mut impl ResponseSink,
) -> Outcome {
    let client = client_address(peer.address, &head.headers, &core.policy.trusted_proxies);
    let host = head.authority.clone();
    let journey = Journey::unread(core, head, client);
    match host.as_ref().map(|host| core.region.destination(host.as_str())) {
        Some(Destination::Tenant(label)) => {
            if let Some(service) = core.directory().service(&label) {
                journey.names(service);
            }
        }
        Some(Destination::Apex) => journey.is_for_apex(),
        Some(Destination::Elsewhere) | None => {}
    }
    journey.refused(error);
    let refusal = error.response(journey.id);
    journey.answered_here(refusal.status(), refusal.body().len());
    let sent = response.whole(core.dated(refusal)).await;
    let outcome = if sent.is_ok() { Outcome::Refused } else { Outcome::CallerGone };
    journey.ends(outcome);
    outcome
}

/// Answers with a gateway error.
async fn refuse(journey: &Journey, error: &Error, response: &mut impl ResponseSink) -> Outcome {
    journey.refused(error);
    let outcome = answer_with(journey, error.response(journey.id), response).await;
    if outcome == Outcome::Complete && error.is_before_authentication() { Outcome::Refused } else { outcome }
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
