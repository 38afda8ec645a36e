//! An agent that the test controls: a real certificate and a real tunnel, with arbitrary frames.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::Duration;

use gw_gateway::demo::Demo;
use gw_shared::id::AgentId;
use gw_shared::tunnel::handshake;
use http::Method;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::caller::{self, Caller, Tls, connect_to};
use super::http1_peer::Peer;
use super::http2_frames::{DATA, END_HEADERS, END_STREAM, HEADERS, PING, SETTINGS, block, frame};
use super::setup;

/// Host name of the service that only this agent serves.
pub(crate) const HOST: &str = "demo--evil.eu1.gw.localhost";

/// Id of the control stream, the first stream that a gateway opens.
pub(crate) const CONTROL: u32 = 1;
const ACK: u8 = 1;

/// An enrolled agent, and a key for callers of its service.
pub(crate) struct Enrolled {
    pub(crate) agent: AgentId,
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
    service_key: String,
}

/// A frame from the gateway.
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

/// The agent's end of a tunnel.
pub(crate) struct Tunnel(pub(crate) Peer<Tls>);

/// Creates the service and enrolls its agent through `/enroll` and `/csr`.
pub(crate) fn enroll(demo: &Demo) -> Enrolled {
    let control = demo.gateway().control();
    setup::service(control, "demo", "evil");
    let state = tempfile::tempdir().unwrap();
    let port = demo.gateway().address().port();
    let agent = setup::agent(control, "demo", &["evil"], port, &demo.about.ca_file, state.path());
    let identity = gw_agent::identity::state::StateDir::new(state.path()).identity().unwrap();
    let (_, service_key) = setup::service_key(control, "demo", &["evil"]);
    Enrolled { agent, certificate: identity.certificate, key: identity.key.clone_key(), service_key }
}

impl Enrolled {
    /// A TLS connection that has presented the certificate and sent no request.
    pub(crate) fn connection(&self, demo: &Demo) -> Peer<Tls> {
        let identity = (self.certificate.clone(), self.key.clone_key());
        let mut peer = connect_to(&demo.about, HOST, &[b"gw-tunnel/1"], Some(identity));
        while peer.stream.conn.is_handshaking() {
            peer.stream.conn.complete_io(&mut peer.stream.sock).unwrap();
        }
        peer.stream.sock.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        peer
    }

    /// An upgraded connection on which the agent has sent no frame.
    pub(crate) fn upgraded(&self, demo: &Demo) -> Tunnel {
        let mut peer = self.connection(demo);
        peer.send(handshake::request(HOST, None));
        assert_eq!(peer.response_head(&Method::GET).unwrap().status, 101);
        assert_eq!(peer.bytes(24).unwrap(), super::http2_frames::PREFACE);
        Tunnel(peer)
    }

    /// A tunnel that the gateway has registered.
    pub(crate) fn tunnel(&self, demo: &Demo) -> Tunnel {
        self.tunnel_with(demo, &[])
    }

    /// Like [`Self::tunnel`], with this payload of the SETTINGS frame.
    pub(crate) fn tunnel_with(&self, demo: &Demo, settings: &[u8]) -> Tunnel {
        let mut tunnel = self.upgraded(demo);
        tunnel.0.send(frame(SETTINGS, 0, 0, settings));
        while tunnel.next().unwrap().stream != CONTROL {}
        tunnel.0.send(head(CONTROL, &[(":status", "200")]));
        let is_ours = |report: &gw_gateway::telemetry::counters::TunnelReport| report.agent_id == self.agent.as_str();
        super::eventually("the tunnel is registered", || super::tunnels(demo).iter().any(is_ours).then_some(()));
        tunnel
    }

    /// A caller of the service.
    pub(crate) fn caller(&self, demo: &Demo) -> Caller {
        connect_to(&demo.about, HOST, &[b"http/1.1"], None)
    }

    /// The head of a caller's request; `rest` is further fields and the body.
    pub(crate) fn request(&self, line: &str, rest: &str) -> String {
        format!("{line} HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {}\r\n{rest}", self.service_key)
    }

    pub(crate) fn get(&self) -> String {
        self.request("GET /", "\r\n")
    }

    /// Sends a GET on a new connection; returns the caller and the stream id of the request on `tunnel`.
    pub(crate) fn send_get(&self, demo: &Demo, tunnel: &mut Tunnel) -> (Caller, u32) {
        let mut caller = self.caller(demo);
        caller.send(self.get());
        (caller, tunnel.request())
    }

    /// The connection of a caller that speaks HTTP/2, before its preface.
    pub(crate) fn http2_caller(&self, demo: &Demo) -> Tls {
        Tls::new(caller::session(&demo.about, HOST, &[b"h2"], None), caller::socket(&demo.about))
    }

    pub(crate) fn key(&self) -> &str {
        &self.service_key
    }
}

impl Tunnel {
    /// The next frame; SETTINGS and PING are not acknowledged.
    pub(crate) fn unanswered(&mut self) -> io::Result<Frame> {
        let header = self.0.bytes(9)?;
        let [_, a, b, c] = [0, header[0], header[1], header[2]];
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        let stream = u32::from_be_bytes([header[5], header[6], header[7], header[8]]);
        let payload = self.0.bytes(length)?;
        Ok(Frame { kind: header[3], flags: header[4], stream, payload })
    }

    /// The next frame; SETTINGS and PING are acknowledged.
    pub(crate) fn next(&mut self) -> io::Result<Frame> {
        let next = self.unanswered()?;
        if matches!(next.kind, SETTINGS | PING) && next.flags & ACK == 0 {
            let payload = if next.kind == PING { next.payload.as_slice() } else { &[] };
            self.try_send(&frame(next.kind, ACK, 0, payload))?;
        }
        Ok(next)
    }

    /// The next frame of this kind.
    pub(crate) fn next_of(&mut self, kind: u8) -> io::Result<Frame> {
        loop {
            let next = self.next()?;
            if next.kind == kind {
                return Ok(next);
            }
        }
    }

    /// The stream of the next request.
    pub(crate) fn request(&mut self) -> u32 {
        self.next_of(HEADERS).unwrap().stream
    }

    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.stream.write_all(bytes)?;
        self.0.stream.flush()
    }

    /// Sends `more` until the gateway ends the tunnel, at most `most` times. Returns how often it was sent.
    pub(crate) fn sent_until_cut(&mut self, more: &[u8], most: usize) -> usize {
        const AT_ONCE: usize = 100;
        let many = more.repeat(AT_ONCE);
        (0..most.div_ceil(AT_ONCE)).take_while(|_| self.try_send(&many).is_ok()).count() * AT_ONCE
    }

    /// Whether the gateway ends the tunnel before the read timeout.
    pub(crate) fn is_cut(&mut self) -> bool {
        loop {
            match self.next() {
                Ok(_) => {}
                Err(error) => return !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
            }
        }
    }

    /// Reads and discards the gateway's frames on another thread. Its result says whether the gateway ended the tunnel.
    pub(crate) fn read_on(&self) -> thread::JoinHandle<bool> {
        let mut socket = self.0.stream.sock.try_clone().unwrap();
        thread::spawn(move || {
            let mut chunk = vec![0; 64 * 1024];
            loop {
                match socket.read(&mut chunk) {
                    Ok(0) => return true,
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
                }
            }
        })
    }

    /// Ends the connection.
    pub(crate) fn close(&self) {
        self.0.stream.sock.shutdown(Shutdown::Both).unwrap();
    }
}

/// Whether the gateway ends a connection before its read timeout.
pub(crate) fn is_ended(peer: &mut Peer<Tls>) -> bool {
    let mut rest = [0; 1024];
    loop {
        match peer.stream.read(&mut rest) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
        }
    }
}

/// A HEADERS frame without END_STREAM.
pub(crate) fn head(stream: u32, fields: &[(&str, &str)]) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, &block(fields))
}

/// A HEADERS frame with END_STREAM.
pub(crate) fn last_head(stream: u32, fields: &[(&str, &str)]) -> Vec<u8> {
    frame(HEADERS, END_HEADERS | END_STREAM, stream, &block(fields))
}

/// A DATA frame with END_STREAM.
pub(crate) fn last_data(stream: u32, data: &[u8]) -> Vec<u8> {
    frame(DATA, END_STREAM, stream, data)
}
