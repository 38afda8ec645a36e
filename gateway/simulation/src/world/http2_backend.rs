//! Backends that speak HTTP/2 without TLS.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use gw_shared::http2::stream::send;
use gw_shared::net::Socket;
use gw_shared::runtime;
use gw_simulated_kernel::clock;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{Request as HttpRequest, Response as HttpResponse};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::backend::{ANSWER_TO, send_response};
use super::http2_caller::trailers;
use super::ledger::Ledger;
use super::message::TRAILER;
use crate::scenario::{Framing, Method, Request, ResponseFault};

/// Serves a connection until it ends.
pub(super) async fn connection(
    socket: Socket,
    agent: usize,
    ledger: Rc<Ledger>,
) -> Result<(), h2::Error> {
    let mut connection = h2::server::handshake(Stream(socket)).await?;
    while let Some(accepted) = connection.accept().await {
        let (request, response) = accepted?;
        let ledger = Rc::clone(&ledger);
        runtime::spawn(async move {
            // The agent may have reset the stream.
            drop(exchange(request, response, agent, &ledger).await);
        });
    }
    Ok(())
}

async fn exchange(
    request: HttpRequest<RecvStream>,
    mut response: SendResponse<Bytes>,
    agent: usize,
    ledger: &Ledger,
) -> io::Result<()> {
    let id = super::message::id(request.uri().path())?;
    let plan = ledger
        .plan(id)
        .ok_or_else(|| io::Error::other("a request that was never planned"))?;
    let attempt = ledger.arrives(id, agent);
    let expects = request.headers().contains_key("expect");
    let upload = upload(id, attempt, request.into_body(), ledger);
    if plan.response.is_early {
        answer(&plan, &mut response).await?;
        ledger.attempt(id, attempt, |attempt| attempt.answered = clock::now());
        return upload.await;
    }
    if expects {
        let go_on = HttpResponse::builder().status(100).body(());
        response
            .send_informational(go_on.map_err(io::Error::other)?)
            .map_err(io::Error::other)?;
    }
    upload.await?;
    runtime::sleep(plan.response.delay).await;
    answer(&plan, &mut response).await?;
    ledger.attempt(id, attempt, |attempt| attempt.answered = clock::now());
    Ok(())
}

/// Reads the request body.
async fn upload(id: u32, attempt: usize, mut body: RecvStream, ledger: &Ledger) -> io::Result<()> {
    while let Some(data) = body.data().await {
        let data = data.map_err(io::Error::other)?;
        ledger.attempt(id, attempt, |attempt| attempt.upload.add(id, true, &data));
        body.flow_control()
            .release_capacity(data.len())
            .map_err(io::Error::other)?;
    }
    let trailers = body.trailers().await.map_err(io::Error::other)?;
    let trailer = trailers.and_then(|trailers| trailers.get(TRAILER)?.to_str().ok()?.parse().ok());
    ledger.attempt(id, attempt, |attempt| {
        attempt.trailer = trailer;
        attempt.upload_is_complete = true;
    });
    Ok(())
}

async fn answer(plan: &Request, response: &mut SendResponse<Bytes>) -> io::Result<()> {
    let Request {
        id,
        method,
        response: planned,
        ..
    } = plan;
    for _ in 0..planned.interim {
        let hints = HttpResponse::builder().status(103).header("link", "</x>");
        let hints = hints.body(()).map_err(io::Error::other)?;
        response
            .send_informational(hints)
            .map_err(io::Error::other)?;
    }
    match planned.fault {
        ResponseFault::Closes | ResponseFault::Resets => {
            response.send_reset(Reason::INTERNAL_ERROR);
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        ResponseFault::Garbage => {
            response.send_reset(Reason::PROTOCOL_ERROR);
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        _ => {}
    }
    let has_body = *method != Method::Head && planned.status != 204;
    let mut head = HttpResponse::builder()
        .status(planned.status)
        .header(ANSWER_TO, *id);
    if planned.framing == Framing::Length && planned.status != 204 {
        head = head.header("content-length", planned.length);
    }
    let head = head.body(()).map_err(io::Error::other)?;
    let stream = response
        .send_response(head, !has_body)
        .map_err(io::Error::other)?;
    if has_body {
        send_body(plan, stream).await?;
    }
    Ok(())
}

async fn send_body(plan: &Request, mut stream: SendStream<Bytes>) -> io::Result<()> {
    let response = &plan.response;
    let is_cut = matches!(
        response.fault,
        ResponseFault::ClosesInBody | ResponseFault::ResetsInBody
    );
    let gone = |_| io::Error::from(io::ErrorKind::ConnectionReset);
    send_response(plan, async |data: Vec<u8>| {
        send(&mut stream, data.into(), false).await.map_err(gone)
    })
    .await?;
    if is_cut {
        stream.send_reset(Reason::INTERNAL_ERROR);
        return Ok(());
    }
    if response.fault == ResponseFault::TooLong && response.framing == Framing::Length {
        let more = Bytes::from_static(b"more than the announced length");
        send(&mut stream, more, false).await.map_err(gone)?;
    }
    let ended = match response.has_trailers {
        true => stream.send_trailers(trailers(plan.id)),
        false => stream.send_data(Bytes::new(), true),
    };
    ended.map_err(io::Error::other)
}

/// A socket as h2 takes it.
struct Stream(Socket);

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = ready!(self.0.poll_recv(cx, buffer.initialize_unfilled()))?;
        buffer.advance(read);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            match self.0.try_send(&[IoSlice::new(bytes)]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(self.0.poll_writable(cx))?;
                }
                sent => return Poll::Ready(sent),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.shutdown_write();
        Poll::Ready(Ok(()))
    }
}
