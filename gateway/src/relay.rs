//! A request's way through the gateway, top to bottom.

use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use futures_util::future::{Either, select};
use gw_shared::http::fields::{
    self, X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PROTO, X_GW_AUTHORIZATION, X_GW_REQUEST_ID, X_GW_SERVICE_KEY,
};
use gw_shared::http::{InvalidBody, Part, RequestHead};
use gw_shared::id::RequestId;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::{Scheme, Uri};
use http::{Request, Version};

use crate::auth::{self, Authenticated};
use crate::caller::{BodyError, CallerGone, RequestBody, ResponseSink};
use crate::client_address::client_address;
use crate::clock::Timestamp;
use crate::error::{Error, request_id_value};
use crate::exchange::{self, Exchange, PendingResponse, Upload};
use crate::hostname::Destination;
use crate::limit::Exhausted;
use crate::pipe::Frame;
use crate::platform;
use crate::store::{Directory, Service};
use crate::worker::Core;

/// How a request ended, for the connection it came on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The response went out whole.
    Complete,
    /// The response began and could not be completed: it must not look complete.
    Cut,
    /// The caller went away.
    CallerGone,
}

/// Relays one request: find the service, authenticate, admit, open, stream both bodies, account.
pub(crate) async fn relay(
    core: &Rc<Core>,
    request: RequestHead,
    peer: IpAddr,
    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Outcome {
    let id = core.ids.next_id();
    core.counters.requests.increment();
    let client = client_address(peer, &request.headers, &core.policy.trusted_proxies);
    let host = request.authority.clone();
    let outcome = match core.region.destination(host.as_str()) {
        _ if core.is_draining() => refuse(core, &Error::Overloaded("draining"), id, response).await,
        Destination::Tenant(label) => match open(core, &label, request, peer, client, id) {
            Ok(exchange) => stream(core, exchange, id, body, response).await,
            Err(error) => refuse(core, &error, id, response).await,
        },
        // Boxed: every idle connection would keep room for it.
        Destination::Apex => Box::pin(answer(core, &request, client, id, body, response)).await,
        Destination::Elsewhere => refuse(core, &Error::Misdirected, id, response).await,
    };
    core.counters.ended(outcome);
    outcome
}

/// Everything that can be decided before the first byte of the body, in the order that the checks have.
fn open(
    core: &Rc<Core>,
    label: &str,
    request: RequestHead,
    peer: IpAddr,
    client: IpAddr,
    id: RequestId,
) -> Result<Exchange, Error> {
    #[cfg(test)]
    assert_ne!(request.target.path(), tests::PANICKING_PATH, "injected");
    let directory = core.directory();
    let service = directory.service(label).ok_or(Error::ServiceNotFound)?;
    if !service.enabled {
        return Err(Error::ServiceDisabled);
    }
    let authenticated = authenticate(core, &directory, service, &request.headers, client)?;
    tracing::debug!(request_id = %id, service = %service.label, by = ?authenticated.by, "admitting");
    let has_body = request.framing != gw_shared::http::Framing::None;
    exchange::open(core, authenticated, outbound(request, peer, id)?, has_body)
}

/// Authenticates the caller. Failures are limited by address: who has had too many is told so instead of why. What is
/// right opens all the same, so that nobody locks out others behind the same address; only where forged tokens come
/// from, those that were not seen before have to wait, because each costs a signature check.
fn authenticate(
    core: &Core,
    directory: &Directory,
    service: &Arc<Service>,
    headers: &HeaderMap,
    client: IpAddr,
) -> Result<Authenticated, Error> {
    let (failures, forgeries) = (&core.addresses.failures, &core.addresses.forgeries);
    let limited = |exhausted: Exhausted| Error::AuthRateLimited { retry_after: exhausted.until_one };
    let may_verify = || {
        forgeries.borrow_mut().is_exhausted(client, Instant::now()).map_or(Ok(()), |exhausted| Err(limited(exhausted)))
    };
    let tokens = &mut core.tokens.borrow_mut();
    let checks = auth::Checks { directory, issuer: &core.issuer, service, now: Timestamp::now, may_verify };
    auth::authenticate(checks, tokens, headers).map_err(|error| {
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

/// The request as the agent gets it: what ends at this hop is gone, what we add is there (RFC 9110 §7.6).
fn outbound(request: RequestHead, peer: IpAddr, id: RequestId) -> Result<Request<()>, Error> {
    let RequestHead { method, target, authority, headers, .. } = request;
    // Credentials were for us, and so was the wish for 100 Continue: this hop answers it.
    const ENDS_HERE: [HeaderName; 3] = [X_GW_AUTHORIZATION, X_GW_SERVICE_KEY, header::EXPECT];
    let mut headers = fields::end_to_end(headers, |name| ENDS_HERE.contains(name));
    append_to_list(&mut headers, X_FORWARDED_FOR, &peer.to_canonical().to_string());
    append_to_list(&mut headers, header::VIA, "1.1 gw");
    headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static("https"));
    let host = HeaderValue::from_str(authority.as_str()).map_err(|_| Error::BadRequest("Host field".to_owned()))?;
    headers.insert(X_FORWARDED_HOST, host);
    headers.insert(X_GW_REQUEST_ID, request_id_value(id));

    let mut parts = http::uri::Parts::default();
    parts.scheme = Some(Scheme::HTTPS);
    parts.authority = Some(authority);
    parts.path_and_query = Some(target);
    let uri = Uri::from_parts(parts).map_err(|_| Error::BadRequest("request target".to_owned()))?;
    let mut outbound = Request::new(());
    *outbound.method_mut() = method;
    *outbound.uri_mut() = uri;
    *outbound.version_mut() = Version::HTTP_2;
    *outbound.headers_mut() = headers;
    Ok(outbound)
}

/// Appends to a comma-separated field, keeping what earlier hops wrote in front.
fn append_to_list(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    let mut earlier: Vec<u8> = headers.get_all(&name).iter().fold(Vec::new(), |mut list, value| {
        list.extend_from_slice(value.as_bytes());
        list.extend_from_slice(b", ");
        list
    });
    earlier.extend_from_slice(value.as_bytes());
    if let Ok(value) = HeaderValue::from_maybe_shared(bytes::Bytes::from(earlier)) {
        headers.insert(name, value);
    }
}

/// Carries the request body up and the response down at the same time, until the response is complete or one side is
/// gone. Whatever is dropped here is cancelled all the way to the backend.
async fn stream(
    core: &Rc<Core>,
    exchange: Exchange,
    id: RequestId,
    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Outcome {
    let Exchange { upload, response: pending } = exchange;
    let ended = {
        let down = std::pin::pin!(receive_response(pending, id, response));
        let up = std::pin::pin!(send_body(body, upload));
        match select(down, up).await {
            Either::Left((ended, _)) => ended,
            Either::Right((BodyError::Gone, _)) => return Outcome::CallerGone,
            Either::Right((BodyError::Malformed(error), _)) => Ended::BadBody(error),
        }
    };
    match ended {
        Ended::Complete => Outcome::Complete,
        Ended::Cut => Outcome::Cut,
        Ended::CallerGone => Outcome::CallerGone,
        Ended::Refused(error) => refuse(core, &error, id, response).await,
        Ended::BadBody(_) if response.has_begun() => Outcome::Cut,
        Ended::BadBody(error) => {
            response.begin_refusal(false);
            refuse(core, &Error::BadRequest(error.to_string()), id, response).await
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
async fn send_body(body: &mut impl RequestBody, mut upload: Upload) -> BodyError {
    loop {
        let sent = match body.part().await {
            Ok(Part::Data(data)) => {
                let last = body.is_done();
                // A backend that does not read must not keep us from seeing that the caller has left.
                let send = std::pin::pin!(upload.send(data, last));
                let sent = match select(send, std::pin::pin!(body.gone())).await {
                    Either::Left((sent, _)) => sent,
                    Either::Right((CallerGone, _)) => return BodyError::Gone,
                };
                if last {
                    break;
                }
                sent
            }
            Ok(Part::Trailers(trailers)) => {
                let _ = upload.finish(Some(fields::end_to_end_trailers(trailers))).await;
                break;
            }
            Ok(Part::End) => {
                let _ = upload.finish(None).await;
                break;
            }
            Err(error) => {
                upload.abort();
                return error;
            }
        };
        if sent.is_err() {
            // The backend has heard enough; its response says why.
            break;
        }
    }
    body.gone().await;
    BodyError::Gone
}

async fn receive_response(pending: PendingResponse, id: RequestId, response: &mut impl ResponseSink) -> Ended {
    let (mut head, mut download) = match pending.head().await {
        Ok(received) => received,
        Err(error) => return Ended::Refused(error),
    };
    head.headers.insert(X_GW_REQUEST_ID, request_id_value(id));
    if response.head(head).await.is_err() {
        return Ended::CallerGone;
    }
    let mut trailers = None;
    loop {
        let mut next = std::pin::pin!(std::future::poll_fn(|cx| download.poll_frame(cx)));
        // What can be sent together is; what there is when nothing more is ready goes out at once.
        let frame = match futures_util::poll!(next.as_mut()) {
            Poll::Ready(frame) => frame,
            Poll::Pending => {
                if response.flush().await.is_err() {
                    return Ended::CallerGone;
                }
                next.await
            }
        };
        let sent = match frame {
            Ok(Frame::Data(data)) => {
                let bytes = data.len();
                let sent = response.data(data).await;
                download.release(bytes);
                sent
            }
            Ok(Frame::Trailers(fields)) => {
                trailers = Some(fields);
                Ok(())
            }
            Ok(Frame::End) => {
                return match response.end(trailers).await {
                    Ok(()) => Ended::Complete,
                    Err(CallerGone) => Ended::CallerGone,
                };
            }
            Ok(Frame::Head(_)) | Err(_) => return Ended::Cut,
        };
        if sent.is_err() {
            return Ended::CallerGone;
        }
    }
}

/// Answers a request to the apex.
async fn answer(
    core: &Rc<Core>,
    request: &RequestHead,
    client: IpAddr,
    id: RequestId,
    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Outcome {
    let Ok(answer) = platform::serve(core, request, client, id, body).await else { return Outcome::CallerGone };
    response.begin_refusal(true);
    let sent = response.whole(answer).await;
    if sent.is_ok() { Outcome::Complete } else { Outcome::CallerGone }
}

/// Answers with a gateway error.
async fn refuse(core: &Rc<Core>, error: &Error, id: RequestId, response: &mut impl ResponseSink) -> Outcome {
    core.counters.refused(error);
    response.begin_refusal(true);
    let sent = response.whole(error.response(id)).await;
    if sent.is_ok() { Outcome::Complete } else { Outcome::CallerGone }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::sync::Arc;

    use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
    use rustls_pki_types::CertificateDer;
    use rustls_pki_types::pem::PemObject;

    use crate::demo::{Demo, Options};

    /// A request for it panics in the task of its connection.
    pub(super) const PANICKING_PATH: &str = "/panic";

    #[test]
    fn a_panic_costs_its_connection_and_nothing_else() {
        let demo = Demo::start(&Options::default()).unwrap();
        let (mut bystander, mut victim) = (connect(&demo), connect(&demo));
        assert!(get(&demo, &mut bystander, "/status/204").starts_with("HTTP/1.1 204 "));
        assert_eq!(get(&demo, &mut victim, PANICKING_PATH), "");
        assert!(get(&demo, &mut bystander, "/status/204").starts_with("HTTP/1.1 204 "));
        let reports = demo.gateway().control().reports();
        assert_eq!((reports[0].totals["task_panics"], reports[0].connections), (1, 1));
        assert_eq!(reports[0].tunnels.len(), 1);
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
