//! A caller that speaks HTTP/1.1: one request at a time on a connection.

use std::io::{self, IoSlice};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use futures_util::future::{Either, select};
use gw_shared::net::TlsStream;
use gw_shared::runtime;
use gw_simulated_kernel::clock;

use super::backend::ANSWER_TO;
use super::body;
use super::caller::Caller;
use super::message::{self, Body, Head};
use crate::scenario::{Conduct, Method, Request};

/// Bytes of a body that are sent between two pauses.
const PIECE: usize = 16 * 1024;
/// Bytes that a slow reader reads at once.
const SIP: usize = 1024;
/// Most pieces that a caller sends after a switch of protocols.
const ECHOES_MAX: usize = 200;
/// Time after which a caller gives up a request.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) async fn run(caller: &Caller) {
    let mut connection = None;
    for request in &caller.plan.requests {
        if connection.is_none() {
            let connected = runtime::timeout(PATIENCE, caller.connect()).await;
            connection = connected.ok().and_then(Result::ok);
        }
        let Some(stream) = connection.take() else {
            continue;
        };
        caller.begins(request);
        let exchange = Exchange {
            caller,
            request,
            stream: &stream,
        };
        let exchanged = runtime::timeout(PATIENCE, exchange.run()).await;
        caller.ended(request);
        if matches!(exchanged, Ok(Ok(true))) {
            connection = Some(stream);
        } else if caller.seen(request, |seen| seen.is_complete) {
            stream.close_now();
        }
        if caller.plan.pause > Duration::ZERO {
            runtime::sleep(caller.plan.pause).await;
        }
    }
    if let Some(stream) = connection {
        drop(runtime::timeout(PATIENCE, stream.close()).await);
    }
}

struct Exchange<'a> {
    caller: &'a Caller,
    request: &'a Request,
    stream: &'a TlsStream,
}

impl Exchange<'_> {
    /// Sends the request and receives the response. Returns whether the connection can be used again.
    async fn run(&self) -> io::Result<bool> {
        if self.request.conduct == Conduct::HalfHead {
            let head = self.head();
            self.send(&head.as_bytes()[..head.len() / 2]).await?;
            runtime::sleep(Duration::from_secs(1)).await;
            self.caller.seen(self.request, |seen| seen.has_left = true);
            return Ok(false);
        }
        let upload = std::pin::pin!(self.upload());
        let download = std::pin::pin!(self.download());
        match select(upload, download).await {
            Either::Left((Ok(true), download)) => download.await,
            Either::Left((Ok(false), _)) => Ok(false),
            // The gateway may have answered before it stopped reading.
            Either::Left((Err(_), download)) => download.await.map(|_| false),
            // The rest of the upload is of no use.
            Either::Right((downloaded, _)) => downloaded.map(|_| false),
        }
    }

    async fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(&mut [IoSlice::new(bytes)]).await?;
        self.stream.flush().await
    }

    fn head(&self) -> String {
        let Request {
            id, method, upload, ..
        } = self.request;
        let name = match method {
            Method::Get | Method::Upgrade => "GET",
            Method::Head => "HEAD",
            Method::Post => "POST",
            Method::Put => "PUT",
        };
        let Caller {
            hostname,
            service_key,
            ..
        } = self.caller;
        let mut head = format!(
            "{name} /r/{id} HTTP/1.1\r\nhost: {hostname}\r\nx-gw-service-key: {service_key}\r\n"
        );
        match upload {
            _ if *method == Method::Upgrade => {
                head += "connection: upgrade\r\nupgrade: echo\r\n";
            }
            Some(upload) if upload.is_chunked => head += "transfer-encoding: chunked\r\n",
            Some(upload) => head += &format!("content-length: {}\r\n", upload.length),
            None => {}
        }
        head + "\r\n"
    }

    /// Returns false if the caller leaves.
    async fn upload(&self) -> io::Result<bool> {
        let Request {
            id,
            method,
            upload,
            conduct,
            ..
        } = self.request;
        self.send(self.head().as_bytes()).await?;
        let now = clock::now();
        self.caller.seen(self.request, |seen| seen.head_sent = now);
        let Some(upload) = upload.filter(|_| *method != Method::Upgrade) else {
            return Ok(self.stays());
        };
        let leaves_at = (*conduct == Conduct::LeavesEarly).then_some(upload.length / 2);
        let mut sent = 0;
        while sent < leaves_at.unwrap_or(upload.length) {
            let length = PIECE.min(leaves_at.unwrap_or(upload.length) - sent);
            let data = body::bytes(*id, true, sent, length);
            if upload.is_chunked {
                let mut chunk = format!("{length:x}\r\n").into_bytes();
                chunk.extend_from_slice(&data);
                chunk.extend_from_slice(b"\r\n");
                self.send(&chunk).await?;
            } else {
                self.send(&data).await?;
            }
            sent += length;
            if upload.pause > Duration::ZERO {
                runtime::sleep(upload.pause).await;
            }
        }
        if !self.stays() {
            return Ok(false);
        }
        if upload.is_chunked {
            self.send(b"0\r\n\r\n").await?;
        }
        Ok(true)
    }

    fn stays(&self) -> bool {
        if self.request.conduct == Conduct::LeavesEarly {
            self.caller.seen(self.request, |seen| seen.has_left = true);
            return false;
        }
        true
    }

    async fn receive(&self, buffer: &mut BytesMut) -> io::Result<usize> {
        if let Conduct::SlowReader(pause) = self.request.conduct {
            runtime::sleep(pause).await;
            let mut sip = [0; SIP];
            let read = std::future::poll_fn(|cx| self.stream.poll_read(cx, &mut sip)).await?;
            buffer.extend_from_slice(&sip[..read]);
            return Ok(read);
        }
        std::future::poll_fn(|cx| self.stream.poll_read_buf(cx, buffer)).await
    }

    async fn download(&self) -> io::Result<bool> {
        let mut buffer = BytesMut::new();
        let head = loop {
            let head = loop {
                if let Some(head) = message::take_head(&mut buffer) {
                    break Head::response(&head)?;
                }
                if self.receive(&mut buffer).await? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            };
            if !(100..200).contains(&head.status) || head.status == 101 {
                break head;
            }
            self.caller.seen(self.request, |seen| seen.interim += 1);
        };
        self.caller.seen(self.request, |seen| {
            seen.status = Some(head.status);
            seen.own_error = head.field("x-gw-status").map(ToOwned::to_owned);
            seen.answer_to = head.field(ANSWER_TO).and_then(|id| id.parse().ok());
        });
        if head.status == 101 {
            self.echo(buffer).await?;
            return Ok(false);
        }
        let has_body = self.request.method != Method::Head && !matches!(head.status, 204 | 304);
        let mut framing = match has_body {
            false => Body::Length(0),
            true if head.field("transfer-encoding").is_none()
                && head.field("content-length").is_none() =>
            {
                Body::Close
            }
            true => head.body()?,
        };
        self.body(&mut framing, &mut buffer).await?;
        Ok(framing != Body::Close && !head.closes() && buffer.is_empty())
    }

    async fn body(&self, framing: &mut Body, buffer: &mut BytesMut) -> io::Result<()> {
        let Request {
            id,
            response,
            conduct,
            ..
        } = self.request;
        loop {
            let is_complete = framing.decode(buffer, |data| {
                self.caller
                    .seen(self.request, |seen| seen.body.add(*id, false, data));
            })?;
            if is_complete {
                break;
            }
            let received = self.caller.seen(self.request, |seen| seen.body.length);
            if *conduct == Conduct::LeavesInResponse && received >= response.length / 2 {
                self.caller.seen(self.request, |seen| seen.has_left = true);
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            if self.receive(buffer).await? == 0 {
                if *framing == Body::Close {
                    break;
                }
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        self.caller
            .seen(self.request, |seen| seen.is_complete = true);
        Ok(())
    }

    /// Sends pieces after a switch of protocols and waits for the answer to each.
    async fn echo(&self, mut buffer: BytesMut) -> io::Result<()> {
        let id = self.request.id;
        let total = self.request.upload.map_or(0, |upload| upload.length);
        // Not so many that their round trips outlast the patience of the caller.
        let piece = SIP.max(total / ECHOES_MAX);
        let mut received = 0;
        let mut sent = 0;
        while sent < total {
            let length = piece.min(total - sent);
            self.send(&body::bytes(id, true, sent, length)).await?;
            sent += length;
            while received < sent {
                if buffer.is_empty() && self.receive(&mut buffer).await? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                self.caller
                    .seen(self.request, |seen| seen.body.add(id, false, &buffer));
                received += buffer.len();
                buffer.advance(buffer.len());
            }
        }
        self.caller
            .seen(self.request, |seen| seen.is_complete = true);
        self.stream.close().await
    }
}
