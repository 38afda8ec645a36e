//! A caller that speaks HTTP/1.1: one request at a time on a connection, or several that are
//! pipelined.

use std::io::{self, IoSlice};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use futures_util::future::{Either, select};
use gw_bed::body;
use gw_bed::http1::{self, Body, Head, Part};
use gw_shared::net::TlsStream;
use gw_shared::runtime;
use gw_simulated_kernel::clock;

use super::caller::{Caller, PATIENCE, PIECE, send_upload};
use super::message::{self, TRAILER};
use crate::scenario::{Conduct, Method, Request, Upload};

/// Bytes that a slow reader reads at once.
const SIP: usize = 1024;
/// Most pieces that a caller sends after a switch of protocols.
const ECHOES_MAX: usize = 200;
/// Wait for 100 (Continue): interval between looks, and their number.
const EXPECT_TICK: Duration = Duration::from_millis(5);
const EXPECT_TICKS: usize = 200;

pub(crate) async fn run(caller: &Caller) {
    let mut connection = None;
    let mut rest = &caller.plan.requests[..];
    while let Some((request, later)) = rest.split_first() {
        let pipelined = match can_be_pipelined(request) {
            true => {
                let most = caller.plan.pipelined.max(1) - 1;
                let others = later.iter().take(most);
                others.take_while(|one| can_be_pipelined(one)).count()
            }
            false => 0,
        };
        let (group, later) = rest.split_at(1 + pipelined);
        rest = later;
        if connection.is_none() {
            let connected = runtime::timeout(PATIENCE, caller.connect()).await;
            connection = connected.ok().and_then(Result::ok);
        }
        let Some(stream) = connection.take() else {
            continue;
        };
        if exchange(caller, group, &stream).await {
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

/// Whether a request can be sent before the response to the one before has arrived (RFC 9112,
/// section 9.3.2).
fn can_be_pipelined(request: &Request) -> bool {
    let is_safe = matches!(request.method, Method::Get | Method::Head);
    is_safe && request.conduct == Conduct::Patient
}

/// Sends requests at once. Returns whether the connection can be used again.
async fn exchange(caller: &Caller, group: &[Request], stream: &TlsStream) -> bool {
    let exchanges: Vec<Exchange<'_>> = group
        .iter()
        .map(|request| Exchange {
            caller,
            request,
            stream,
        })
        .collect();
    group.iter().for_each(|request| caller.begins(request));
    let mut buffer = BytesMut::new();
    let exchanged = match &exchanges[..] {
        [exchange] => runtime::timeout(PATIENCE, exchange.run(&mut buffer)).await,
        _ => runtime::timeout(PATIENCE, pipeline(&exchanges, &mut buffer)).await,
    };
    for request in group {
        let has_given_up = exchanged.is_err();
        caller.seen(request, |seen| seen.has_given_up = has_given_up);
        // The others ended with their responses.
        if caller.seen(request, |seen| seen.ended.is_none()) {
            caller.ended(request);
        }
    }
    matches!(exchanged, Ok(Ok(true))) && buffer.is_empty()
}

async fn pipeline(exchanges: &[Exchange<'_>], buffer: &mut BytesMut) -> io::Result<bool> {
    let [first, ..] = exchanges else {
        return Ok(true);
    };
    let heads: String = exchanges.iter().map(Exchange::head).collect();
    first.send(heads.as_bytes()).await?;
    for exchange in exchanges {
        exchange.head_is_sent();
    }
    for exchange in exchanges {
        let can_go_on = exchange.download(buffer).await?;
        exchange.caller.ended(exchange.request);
        if !can_go_on {
            return Ok(false);
        }
    }
    Ok(true)
}

struct Exchange<'a> {
    caller: &'a Caller,
    request: &'a Request,
    stream: &'a TlsStream,
}

impl Exchange<'_> {
    /// Sends the request and receives the response. Returns whether the connection can be used
    /// again.
    async fn run(&self, buffer: &mut BytesMut) -> io::Result<bool> {
        if self.request.conduct == Conduct::HalfHead {
            let head = self.head();
            self.send(&head.as_bytes()[..head.len() / 2]).await?;
            runtime::sleep(Duration::from_secs(1)).await;
            self.caller.seen(self.request, |seen| seen.has_left = true);
            return Ok(false);
        }
        let upload = std::pin::pin!(self.upload());
        let download = std::pin::pin!(self.download(buffer));
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
        for (name, value) in self.caller.session() {
            head += &format!("{name}: {value}\r\n");
        }
        match upload {
            _ if *method == Method::Upgrade => {
                head += "connection: upgrade\r\nupgrade: echo\r\n";
            }
            Some(upload) if upload.is_chunked => head += "transfer-encoding: chunked\r\n",
            Some(upload) => head += &format!("content-length: {}\r\n", upload.length),
            None => {}
        }
        if upload.is_some_and(|upload| upload.expects_continue) {
            head += "expect: 100-continue\r\n";
        }
        head + "\r\n"
    }

    fn head_is_sent(&self) {
        let now = clock::now();
        self.caller.seen(self.request, |seen| seen.head_sent = now);
    }

    /// Waits for 100 (Continue), for a while. Returns whether the body is to be sent (RFC 9110,
    /// section 10.1.1).
    async fn expect(&self) -> bool {
        for _ in 0..EXPECT_TICKS {
            let (has_continued, is_answered) = self.caller.seen(self.request, |seen| {
                (seen.has_continued, seen.status.is_some())
            });
            if has_continued || is_answered {
                return has_continued;
            }
            runtime::sleep(EXPECT_TICK).await;
        }
        true
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
        self.head_is_sent();
        let Some(upload) = upload.filter(|_| *method != Method::Upgrade) else {
            return Ok(self.stays());
        };
        if upload.expects_continue && !self.expect().await {
            // The response has come.
            return Ok(true);
        }
        let length = match conduct {
            Conduct::LeavesEarly => upload.length / 2,
            _ => upload.length,
        };
        let send = async |data: Vec<u8>| self.send(&http1::piece(&data, upload.is_chunked)).await;
        send_upload(self.request, length, send).await?;
        if !self.stays() {
            return Ok(false);
        }
        if upload.is_chunked {
            let trailers = match upload.has_trailers {
                true => format!("{TRAILER}: {id}\r\n"),
                false => String::new(),
            };
            self.send(format!("0\r\n{trailers}\r\n").as_bytes()).await?;
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

    /// Returns whether a further request can follow.
    async fn download(&self, buffer: &mut BytesMut) -> io::Result<bool> {
        let head = loop {
            let head = loop {
                if let Some(head) = http1::take_head(buffer) {
                    break Head::response(&head)?;
                }
                if self.receive(buffer).await? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            };
            if !(100..200).contains(&head.status) || head.status == 101 {
                break head;
            }
            self.caller.seen(self.request, |seen| match head.status {
                100 => seen.has_continued = true,
                _ => seen.interim += 1,
            });
        };
        self.caller
            .answered(self.request, head.status, |name| head.field(name));
        if head.status == 101 {
            match self.request.upload {
                Some(upload) if upload.in_halves => self.halves(buffer, upload).await?,
                _ => self.echo(buffer).await?,
            }
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
        self.body(&mut framing, buffer).await?;
        Ok(framing != Body::Close && !head.closes())
    }

    async fn body(&self, framing: &mut Body, buffer: &mut BytesMut) -> io::Result<()> {
        let Request {
            response, conduct, ..
        } = self.request;
        let mut error = Vec::new();
        loop {
            let is_complete = framing.decode(buffer, |part| match part {
                Part::Data(data) => self.caller.received(self.request, data, &mut error),
                Part::Trailer(line) => self.caller.seen(self.request, |seen| {
                    seen.trailer = message::trailer(line);
                }),
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
        self.caller.complete(self.request, &error);
        Ok(())
    }

    /// Sends everything after a switch of protocols and ends its direction, whatever the backend
    /// sends meanwhile.
    async fn halves(&self, buffer: &mut BytesMut, upload: Upload) -> io::Result<()> {
        let id = self.request.id;
        let sends = async {
            for sent in (0..upload.length).step_by(PIECE) {
                let length = PIECE.min(upload.length - sent);
                self.send(&body::bytes(id, true, sent, length)).await?;
                runtime::sleep(upload.pause).await;
            }
            self.stream.close().await
        };
        let receives = async {
            loop {
                self.caller
                    .seen(self.request, |seen| seen.body.add(id, false, buffer));
                buffer.clear();
                if self.receive(buffer).await? == 0 {
                    return Ok(());
                }
            }
        };
        futures_util::future::try_join(sends, receives).await?;
        self.caller
            .seen(self.request, |seen| seen.is_complete = true);
        Ok(())
    }

    /// Sends pieces after a switch of protocols and waits for the answer to each.
    async fn echo(&self, buffer: &mut BytesMut) -> io::Result<()> {
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
                if buffer.is_empty() && self.receive(buffer).await? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                self.caller
                    .seen(self.request, |seen| seen.body.add(id, false, buffer));
                received += buffer.len();
                buffer.advance(buffer.len());
            }
        }
        self.caller
            .seen(self.request, |seen| seen.is_complete = true);
        self.stream.close().await
    }
}
