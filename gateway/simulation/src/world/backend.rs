//! Backends: servers of HTTP/1.1 that answer as the plan of each request says.

use std::io::{self, IoSlice};
use std::rc::Rc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use gw_bed::body;
use gw_bed::http1::{self, Part};
use gw_shared::net::{Listener, Socket};
use gw_shared::runtime;
use gw_simulated_kernel::clock;

use super::ledger::Ledger;
use super::http2_backend;
use super::message::{self, TRAILER};
use crate::scenario::{Framing, Method, Request, Response, ResponseFault};

/// Field in which backends name the request that they answer.
pub(crate) const ANSWER_TO: &str = "x-sim-answer-to";

/// Largest piece of a response that is sent at once.
const PIECE: usize = 16 * 1024;

/// Serves HTTP/2 or HTTP/1.1 until the host is killed.
pub(crate) async fn serve(listener: Listener, agent: usize, is_http2: bool, ledger: Rc<Ledger>) {
    while let Ok((fd, _)) = listener.accept().await {
        let Ok(socket) = Socket::from_fd(fd) else {
            continue;
        };
        let ledger = Rc::clone(&ledger);
        runtime::spawn(async move {
            // The agent may have closed the connection.
            if is_http2 {
                drop(http2_backend::connection(socket, agent, ledger).await);
            } else {
                let connection = Connection {
                    socket,
                    agent,
                    ledger,
                    buffer: BytesMut::new(),
                };
                drop(connection.serve().await);
            }
        });
    }
}

struct Connection {
    socket: Socket,
    agent: usize,
    ledger: Rc<Ledger>,
    buffer: BytesMut,
}

/// Sends the body of a response by `send`, as far as its plan says.
pub(super) async fn send_response(
    plan: &Request,
    mut send: impl AsyncFnMut(Vec<u8>) -> io::Result<()>,
) -> io::Result<()> {
    let Response { length, fault, .. } = plan.response;
    let end = match fault {
        ResponseFault::ClosesInBody | ResponseFault::ResetsInBody => length / 2,
        _ => length,
    };
    let mut stalls = match fault {
        ResponseFault::Stalls(time) => Some(time),
        _ => None,
    };
    for sent in (0..end).step_by(PIECE) {
        let piece = PIECE.min(end - sent);
        send(body::bytes(plan.id, false, sent, piece)).await?;
        if sent + piece >= length / 2
            && let Some(time) = stalls.take()
        {
            runtime::sleep(time).await;
        }
    }
    Ok(())
}

/// What follows a response.
#[derive(PartialEq, Eq)]
enum Next {
    Request,
    Close,
}

impl Connection {
    async fn serve(mut self) -> io::Result<()> {
        while self.request().await? == Next::Request {}
        Ok(())
    }

    async fn receive(&mut self) -> io::Result<()> {
        let received =
            std::future::poll_fn(|cx| self.socket.poll_recv_buf(cx, &mut self.buffer)).await?;
        if received == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    async fn request(&mut self) -> io::Result<Next> {
        let head = loop {
            if let Some(head) = http1::take_head(&mut self.buffer) {
                break head;
            }
            self.receive().await?;
        };
        let request = http1::Head::request(&head)?;
        let id = message::id(&request.target)?;
        let Some(plan) = self.ledger.plan(id) else {
            return Err(io::Error::other(format!("request {id} was never planned")));
        };
        let attempt = self.ledger.arrives(id, self.agent);
        let decoder = request.body()?;
        if plan.method == Method::Upgrade && request.wants_upgrade() {
            return self.switch(&plan, attempt).await;
        }
        if plan.response.is_early {
            self.answer(&plan).await?;
            self.answered(id, attempt);
            // As many servers do: reads a while, so that the answer is not lost to a reset, then
            // closes.
            self.socket.shutdown_write();
            let rest = self.upload(id, attempt, decoder);
            drop(runtime::timeout(Duration::from_secs(2), rest).await);
            return Ok(Next::Close);
        }
        if request.field("expect").is_some() {
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        self.upload(id, attempt, decoder).await?;
        if plan.response.delay > Duration::ZERO {
            runtime::sleep(plan.response.delay).await;
        }
        let next = self.answer(&plan).await?;
        self.answered(id, attempt);
        Ok(next)
    }

    fn answered(&self, id: u32, attempt: usize) {
        self.ledger
            .attempt(id, attempt, |attempt| attempt.answered = clock::now());
    }

    /// Reads the request body.
    async fn upload(
        &mut self,
        id: u32,
        attempt: usize,
        mut decoder: http1::Body,
    ) -> io::Result<()> {
        loop {
            let ledger = &self.ledger;
            let is_complete = decoder.decode(&mut self.buffer, |part| {
                ledger.attempt(id, attempt, |attempt| match part {
                    Part::Data(data) => attempt.upload.add(id, true, data),
                    Part::Trailer(line) => attempt.trailer = message::trailer(line),
                });
            })?;
            if is_complete {
                break;
            }
            self.receive().await?;
        }
        self.ledger
            .attempt(id, attempt, |attempt| attempt.upload_is_complete = true);
        Ok(())
    }

    async fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.socket.send_all(&mut [IoSlice::new(bytes)]).await
    }

    async fn answer(&mut self, plan: &Request) -> io::Result<Next> {
        let response = &plan.response;
        for _ in 0..response.interim {
            self.send(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
                .await?;
        }
        match response.fault {
            ResponseFault::Closes => return Ok(Next::Close),
            ResponseFault::Resets => {
                self.socket.reset_when_dropped();
                return Ok(Next::Close);
            }
            ResponseFault::Garbage => {
                self.send(b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n").await?;
                return Ok(Next::Close);
            }
            _ => {}
        }
        let has_body = plan.method != Method::Head && !matches!(response.status, 204 | 304);
        let mut head = format!(
            "HTTP/1.1 {} X\r\n{ANSWER_TO}: {}\r\n",
            response.status, plan.id
        );
        if response.status != 204 {
            match response.framing {
                Framing::Length => head += &format!("content-length: {}\r\n", response.length),
                Framing::Chunked => head += "transfer-encoding: chunked\r\n",
                Framing::Close => head += "connection: close\r\n",
            }
        }
        head += "\r\n";
        self.send(head.as_bytes()).await?;
        let closes = response.framing == Framing::Close && response.status != 204;
        if !has_body {
            return Ok(if closes { Next::Close } else { Next::Request });
        }
        self.body(plan).await?;
        Ok(match response.fault {
            ResponseFault::None | ResponseFault::Stalls(_) if !closes => Next::Request,
            _ => Next::Close,
        })
    }

    async fn body(&mut self, plan: &Request) -> io::Result<()> {
        let response = &plan.response;
        let is_chunked = response.framing == Framing::Chunked;
        let send = async |data: Vec<u8>| self.send(&http1::piece(&data, is_chunked)).await;
        send_response(plan, send).await?;
        match response.fault {
            ResponseFault::ResetsInBody => self.socket.reset_when_dropped(),
            ResponseFault::ClosesInBody => {}
            ResponseFault::TooLong if response.framing == Framing::Length => {
                self.send(b"more than the announced length").await?;
            }
            _ if is_chunked => {
                let trailers = if response.has_trailers {
                    format!("{TRAILER}: {}\r\n", plan.id)
                } else {
                    String::new()
                };
                self.send(format!("0\r\n{trailers}\r\n").as_bytes()).await?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Switches protocols.
    async fn switch(&mut self, plan: &Request, attempt: usize) -> io::Result<Next> {
        let head = format!(
            "HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: echo\r\n{ANSWER_TO}: {}\r\n\r\n",
            plan.id
        );
        self.send(head.as_bytes()).await?;
        if plan.upload.is_some_and(|upload| upload.in_halves) {
            return self.halves(plan, attempt).await;
        }
        self.echo(plan, attempt).await
    }

    /// Sends its bytes before or after it reads the caller's, slowly.
    async fn halves(&mut self, plan: &Request, attempt: usize) -> io::Result<Next> {
        let Response {
            length,
            delay,
            is_early,
            ..
        } = plan.response;
        let answer = async |socket: &Socket| {
            for sent in (0..length).step_by(PIECE) {
                let piece = body::bytes(plan.id, false, sent, PIECE.min(length - sent));
                socket.send_all(&mut [IoSlice::new(&piece)]).await?;
            }
            socket.shutdown_write();
            Ok::<_, io::Error>(())
        };
        if is_early {
            answer(&self.socket).await?;
        }
        loop {
            let received = self.buffer.split();
            self.ledger.attempt(plan.id, attempt, |attempt| {
                attempt.upload.add(plan.id, true, &received);
            });
            runtime::sleep(delay).await;
            let received =
                std::future::poll_fn(|cx| self.socket.poll_recv_buf(cx, &mut self.buffer)).await;
            if received.is_err() {
                self.ledger.attempt(plan.id, attempt, |attempt| {
                    attempt.upload_is_broken = true;
                });
            }
            if received? == 0 {
                break;
            }
        }
        if !is_early {
            answer(&self.socket).await?;
        }
        self.switched(plan, attempt)
    }

    fn switched(&self, plan: &Request, attempt: usize) -> io::Result<Next> {
        self.ledger.attempt(plan.id, attempt, |attempt| {
            attempt.upload_is_complete = true;
            attempt.answered = clock::now();
        });
        Ok(Next::Close)
    }

    /// Returns what arrives, as the body of a response.
    async fn echo(&mut self, plan: &Request, attempt: usize) -> io::Result<Next> {
        let mut echoed = 0;
        loop {
            let length = self.buffer.len();
            let (ledger, received) = (&self.ledger, &self.buffer);
            ledger.attempt(plan.id, attempt, |attempt| {
                attempt.upload.add(plan.id, true, received);
            });
            self.buffer.advance(length);
            let answer = body::bytes(plan.id, false, echoed, length);
            self.send(&answer).await?;
            echoed += length;
            let received =
                std::future::poll_fn(|cx| self.socket.poll_recv_buf(cx, &mut self.buffer)).await?;
            if received == 0 {
                return self.switched(plan, attempt);
            }
        }
    }
}
