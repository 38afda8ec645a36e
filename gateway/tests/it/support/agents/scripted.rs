//! Agents that answer as a test says, and backends that record what reached them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;

use gw_shared::tunnel::frame::{DATA_MAX, Kind, StreamId};

use super::modified_agent::{Frame, Tunnel};
use super::tunnel_frames::{self, begun, credit, data, frame, last_data, message};
use crate::support::peers::backend;
use crate::support::scene::Scene;

/// A request that reached an agent of the test.
#[derive(Debug, Clone)]
pub(crate) struct Attempt {
    /// Index of the agent.
    pub(crate) agent: usize,
    /// Number of the attempt, over all agents of the plan.
    pub(crate) nth: usize,
    pub(crate) stream: StreamId,
    pub(crate) head: String,
    /// The request ended with its head.
    pub(crate) is_whole: bool,
}

/// Agents that the test controls: each answers as `act` says, one request after the other, on a
/// thread.
pub(crate) struct Scripted {
    attempts: Receiver<Attempt>,
    sender: Sender<Attempt>,
    count: Arc<AtomicUsize>,
}

impl Scripted {
    pub(crate) fn new() -> Self {
        let (sender, attempts) = mpsc::channel();
        Self {
            attempts,
            sender,
            count: Arc::default(),
        }
    }

    /// Agents of a scene with a tunnel each, which all answer as `act` says.
    pub(crate) fn of(
        scene: &Scene,
        names: &[&str],
        act: impl Fn(&mut Tunnel, &Attempt) -> bool + Clone + Send + 'static,
    ) -> Self {
        let scripted = Self::new();
        for (number, name) in names.iter().enumerate() {
            scripted.serve(number, scene.tunnel(name), act.clone());
        }
        scripted
    }

    /// Serves a tunnel until it ends, or until `act` returns false.
    pub(crate) fn serve(
        &self,
        agent: usize,
        mut tunnel: Tunnel,
        act: impl Fn(&mut Tunnel, &Attempt) -> bool + Send + 'static,
    ) {
        let sender = self.sender.clone();
        let count = Arc::clone(&self.count);
        thread::spawn(move || {
            while let Ok(request) = tunnel.next_of(Kind::Request) {
                let Frame {
                    stream,
                    end,
                    payload,
                    ..
                } = request;
                let nth = count.fetch_add(1, Ordering::SeqCst);
                let head = String::from_utf8_lossy(&payload).into_owned();
                let attempt = Attempt {
                    agent,
                    nth,
                    stream,
                    head,
                    is_whole: end,
                };
                // Fails when the test has ended.
                let _ = sender.send(attempt.clone());
                if !act(&mut tunnel, &attempt) {
                    return;
                }
            }
        });
    }

    /// The attempts since the last call.
    pub(crate) fn attempts(&self) -> Vec<Attempt> {
        self.count.store(0, Ordering::SeqCst);
        self.attempts.try_iter().collect()
    }

    /// Waits for an attempt.
    pub(crate) fn next(&self) -> Attempt {
        self.attempts.recv_timeout(crate::support::SOON).unwrap()
    }
}

/// Reads the body of a request to its end; returns it with its trailers.
pub(crate) fn body(tunnel: &mut Tunnel, attempt: &Attempt) -> (Vec<u8>, String) {
    let mut body = Vec::new();
    let mut is_whole = attempt.is_whole;
    let mut trailers = String::new();
    while !is_whole {
        let next = tunnel.next().unwrap();
        if next.stream != attempt.stream {
            continue;
        }
        match next.kind {
            Kind::Data if next.payload.is_empty() => {}
            Kind::Data => {
                body.extend_from_slice(&next.payload);
                if !next.end {
                    tunnel
                        .0
                        .send(credit(next.stream, next.payload.len() as u32));
                }
            }
            Kind::Trailers => trailers = String::from_utf8(next.payload.clone()).unwrap(),
            _ => {}
        }
        is_whole = next.end;
    }
    (body, trailers)
}

/// A complete response with a body. Reports the upload first, if the request has a body of this
/// length.
pub(crate) fn answered(attempt: &Attempt, uploaded: usize, body: &[u8]) -> Vec<u8> {
    let report = tunnel_frames::uploaded(attempt.stream, uploaded as u64);
    let pieces = body
        .chunks(DATA_MAX)
        .flat_map(|piece| data(attempt.stream, piece))
        .collect();
    let report = if attempt.is_whole { Vec::new() } else { report };
    [
        report,
        begun(attempt.stream),
        pieces,
        last_data(attempt.stream, b""),
    ]
    .concat()
}

/// A REFUSED with the flag that says that nothing of the request was sent to a backend.
pub(crate) fn refused_unsent(stream: StreamId, code: &str) -> Vec<u8> {
    let payload = [
        &[0; 4][..],
        &[0xff; 4],
        &[code.len() as u8 | 0x80],
        code.as_bytes(),
        b"in a test",
    ]
    .concat();
    frame(Kind::Refused, true, stream, &payload)
}

/// What an agent reports of itself.
pub(crate) fn statistics(slots: u32, backend: &str, standby: bool) -> Vec<u8> {
    message(format!(
        r#"{{"type":"statistics","slots":{slots},"slots_in_use":0,"backend_connections":0,
            "backend":"{backend}","standby":{standby}}}"#
    ))
}

/// A backend that records the bodies of the requests that it answered, by their `X-Number`, and
/// answers with the body.
pub(crate) struct Recording {
    pub(crate) url: String,
    pub(crate) requests: Arc<Mutex<Vec<Recorded>>>,
}

/// A request that reached a backend.
#[derive(Debug, Clone)]
pub(crate) struct Recorded {
    pub(crate) method: String,
    pub(crate) number: String,
    pub(crate) body: Vec<u8>,
    pub(crate) trailer: String,
}

impl Recording {
    pub(crate) fn start() -> Self {
        let requests = Arc::<Mutex<Vec<Recorded>>>::default();
        let known = Arc::clone(&requests);
        let url = backend::start(move |mut peer| {
            while let Ok((head, body, trailers)) = peer.request() {
                let text = |fields: &gw_shared::http::Fields, name: &str| {
                    fields
                        .get(name)
                        .map_or("", |value| value.to_str().unwrap())
                        .to_owned()
                };
                let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
                let number = text(&head.headers, "x-number");
                let trailer = text(&trailers, "x-check");
                let method = head.method.to_string();
                known.lock().unwrap().push(Recorded {
                    method,
                    number,
                    body: body.clone(),
                    trailer,
                });
                peer.send([answer.into_bytes(), body].concat());
            }
        });
        Self { url, requests }
    }
}
