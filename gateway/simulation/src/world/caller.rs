//! Callers: clients of HTTP/1.1 and HTTP/2 over TLS that send what their plan says and note what
//! they see.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gw_bed::body;
use gw_shared::net::{Socket, TlsStream};
use gw_shared::runtime;
use gw_simulated_kernel::{clock, trace};
use rustls::ClientConfig;
use rustls::client::UnbufferedClientConnection;
use rustls_pki_types::ServerName;

use super::backend::ANSWER_TO;
use super::ledger::{Ledger, Seen};
use super::{SESSION, http1_caller, http2_caller};
use crate::scenario;

/// Bytes of a body that are sent between two pauses.
pub(crate) const PIECE: usize = 16 * 1024;
/// Time after which a caller gives up a request.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Where a caller sends its requests, and how.
pub(crate) struct Caller {
    pub(crate) number: usize,
    pub(crate) plan: scenario::Caller,
    pub(crate) gateway: SocketAddr,
    pub(crate) hostname: String,
    pub(crate) service_key: String,
    pub(crate) tls: Arc<ClientConfig>,
    pub(crate) ledger: Rc<Ledger>,
    /// The cookie of the gateway, as `NAME=VALUE`.
    pub(crate) cookie: RefCell<Option<String>>,
}

/// Sends all requests of the plan, and returns once each has ended.
pub(crate) async fn run(caller: Caller) {
    runtime::sleep(caller.plan.begins).await;
    if caller.plan.is_http2 {
        http2_caller::run(&Rc::new(caller)).await;
    } else {
        http1_caller::run(&caller).await;
    }
}

/// Sends the first `length` bytes of the body of a request by `send`, with the pauses of its plan.
pub(crate) async fn send_upload(
    request: &scenario::Request,
    length: usize,
    mut send: impl AsyncFnMut(Vec<u8>) -> io::Result<()>,
) -> io::Result<()> {
    let Some(upload) = request.upload else {
        return Ok(());
    };
    let half = upload.length / 2;
    for sent in (0..length).step_by(PIECE) {
        let piece = PIECE.min(length - sent);
        send(body::bytes(request.id, true, sent, piece)).await?;
        let has_passed_half = sent < half && sent + piece >= half;
        let pause = match has_passed_half {
            true => upload.pause + upload.stall,
            false => upload.pause,
        };
        if pause > Duration::ZERO {
            runtime::sleep(pause).await;
        }
    }
    Ok(())
}

impl Caller {
    /// Opens a connection to the gateway.
    pub(crate) async fn connect(&self) -> io::Result<TlsStream> {
        let socket = Socket::connect(self.gateway, None).await?;
        let name = ServerName::try_from(self.hostname.clone()).map_err(io::Error::other)?;
        let session = UnbufferedClientConnection::new(Arc::clone(&self.tls), name)
            .map_err(io::Error::other)?;
        let stream = TlsStream::new(socket, session);
        let shaken = stream.handshake().await;
        if let Err(error) = &shaken {
            trace::line(|line| line.push_str(&format!("TLS handshake failed: {error}")));
        }
        shaken?;
        Ok(stream)
    }

    pub(crate) fn begins(&self, request: &scenario::Request) {
        let now = clock::now();
        trace::line(|line| line.push_str(&format!("request {} begins", request.id)));
        self.seen(request, |seen| {
            seen.caller = self.number;
            seen.service = self.plan.service;
            seen.began = now;
        });
    }

    pub(crate) fn ended(&self, request: &scenario::Request) {
        let now = clock::now();
        self.seen(request, |seen| {
            seen.ended = now;
            trace::line(|line| {
                let how = match (seen.is_complete, seen.has_left) {
                    (true, _) => "complete",
                    (false, true) => "left",
                    (false, false) => "cut",
                };
                let error = seen.own_error.as_deref().unwrap_or_default();
                line.push_str(&format!(
                    "request {} ends: {how}, status {:?} {error}, {} bytes",
                    request.id, seen.status, seen.body.length
                ));
            });
            trace::mix(u64::from(request.id) << 32 | u64::from(seen.status.unwrap_or(0)));
        });
    }

    /// Fields by which requests belong to a session.
    pub(crate) fn session(&self) -> Vec<(&'static str, String)> {
        let cookie = self.cookie.borrow().clone();
        let cookie = cookie.map(|cookie| ("cookie", cookie));
        let session = (SESSION, format!("session {}", self.number));
        cookie.into_iter().chain([session]).collect()
    }

    /// The head of the final response has arrived.
    pub(crate) fn answered<'a>(
        &self,
        request: &scenario::Request,
        status: u16,
        field: impl Fn(&str) -> Option<&'a str>,
    ) {
        let cookie = field("set-cookie").and_then(|value| value.split(';').next());
        if let Some(cookie) = cookie {
            self.cookie.replace(Some(cookie.to_owned()));
        }
        let now = clock::now();
        self.seen(request, |seen| {
            seen.answered = now;
            seen.status = Some(status);
            seen.request_id = field("x-gw-request-id").map(ToOwned::to_owned);
            seen.own_error = field("x-gw-status").map(ToOwned::to_owned);
            seen.answer_to = field(ANSWER_TO).and_then(|id| id.parse().ok());
        });
    }

    /// A part of the body of the response has arrived. Keeps that of an error in `error`.
    pub(crate) fn received(&self, request: &scenario::Request, data: &[u8], error: &mut Vec<u8>) {
        self.seen(request, |seen| {
            seen.body.add(request.id, false, data);
            if seen.own_error.is_some() {
                error.extend_from_slice(data);
            }
        });
    }

    /// The response has ended as its framing says.
    pub(crate) fn complete(&self, request: &scenario::Request, error: &[u8]) {
        let text = String::from_utf8_lossy(error);
        let code = text.split_once("\"code\":\"").and_then(|(_, rest)| {
            let (code, _) = rest.split_once('"')?;
            Some(code.to_owned())
        });
        self.seen(request, |seen| {
            seen.code = code;
            seen.is_complete = true;
        });
    }

    pub(crate) fn seen<R>(
        &self,
        request: &scenario::Request,
        change: impl FnOnce(&mut Seen) -> R,
    ) -> R {
        self.ledger.seen(request.id, change)
    }
}
