//! An agent that the test controls: a real certificate and a real tunnel, with arbitrary frames.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant};

use gw_shared::tunnel::frame::{FrameHeader, HEADER, Kind, StreamId};
use gw_shared::tunnel::{self, handshake};
use http::Method;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};

use super::in_process;
use super::tunnel_frames::{frame, hello, message, ping, reset};
use crate::support::peers::caller;
use crate::support::peers::caller::{Caller, Tls, connect_to};
use crate::support::peers::http1_peer::Peer;
use crate::support::scene::{About, Scene};
use crate::support::{SOON, admin_api};

/// Account of the agent. Another one than that of the scene's service.
pub(crate) const ACCOUNT: &str = "mallory";

/// Host name of the service that only this agent serves.
pub(crate) const HOST: &str = "mallory--evil.eu1.gw.localhost";

/// Number of streams in the agent's HELLO.
pub(crate) const STREAMS: u32 = 256;

/// An enrolled agent, and a key for callers of its service.
pub(crate) struct Enrolled {
    pub(crate) agent: String,
    certificate: CertificateDer<'static>,
    pub(crate) key: PrivateKeyDer<'static>,
    service_key: String,
}

/// A TLS connection that has presented this certificate for the service at `host` and sent no
/// request.
pub(crate) fn connection(
    about: &About,
    host: &str,
    identity: (CertificateDer<'static>, PrivateKeyDer<'static>),
) -> Peer<Tls> {
    let mut peer = connect_to(about, host, &[tunnel::ALPN], Some(identity));
    while peer.stream.conn.is_handshaking() {
        peer.stream.conn.complete_io(&mut peer.stream.sock).unwrap();
    }
    peer.stream
        .sock
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    peer
}

/// A frame from the gateway.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) end: bool,
    pub(crate) stream: StreamId,
    pub(crate) payload: Vec<u8>,
}

/// The agent's end of a tunnel.
pub(crate) struct Tunnel(pub(crate) Peer<Tls>);

/// Creates the service and enrolls its agent through `/enroll` and `/csr`.
pub(crate) fn enroll(scene: &Scene) -> Enrolled {
    let api = scene.api();
    api.create_service(ACCOUNT, "evil");
    let state = tempfile::tempdir().unwrap();
    let agent = scene.enroll(ACCOUNT, &["evil"], state.path());
    let (certificate, key) = in_process::identity(state.path());
    let (_, service_key) = api.create_service_key(ACCOUNT, &["evil"]);
    Enrolled {
        agent,
        certificate,
        key,
        service_key,
    }
}

/// A scene with its agent, and a tunnel of an agent that the test controls.
pub(crate) fn scene_with_tunnel() -> (Scene, Enrolled, Tunnel) {
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    let tunnel = enrolled.tunnel(&scene);
    (scene, enrolled, tunnel)
}

impl Enrolled {
    /// A TLS connection that has presented the certificate and sent no request.
    pub(crate) fn connection(&self, scene: &Scene) -> Peer<Tls> {
        connection(
            &scene.about,
            HOST,
            (self.certificate.clone(), self.key.clone_key()),
        )
    }

    /// An upgraded connection on which the agent has sent no frame.
    pub(crate) fn upgraded(&self, scene: &Scene) -> Tunnel {
        Tunnel::upgrade(self.connection(scene), HOST)
    }

    /// A tunnel that the gateway has registered.
    pub(crate) fn tunnel(&self, scene: &Scene) -> Tunnel {
        self.tunnel_with(scene, STREAMS)
    }

    /// As [`Self::tunnel`], with this number of streams in the HELLO.
    pub(crate) fn tunnel_with(&self, scene: &Scene, streams: u32) -> Tunnel {
        let mut tunnel = self.upgraded(scene);
        tunnel.0.send(hello(streams));
        crate::support::eventually("the tunnel is registered", || self.report(scene));
        tunnel
    }

    /// The gateway's report of the agent's tunnel, if there is one.
    pub(crate) fn report(&self, scene: &Scene) -> Option<admin_api::Tunnel> {
        scene
            .tunnels()
            .into_iter()
            .find(|tunnel| tunnel.agent_id == self.agent)
    }

    /// A caller of the service.
    pub(crate) fn caller(&self, scene: &Scene) -> Caller {
        connect_to(&scene.about, HOST, &[b"http/1.1"], None)
    }

    /// The head of a caller's request; `rest` is further fields and the body.
    pub(crate) fn request(&self, line: &str, rest: &str) -> String {
        format!(
            "{line} HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {}\r\n{rest}",
            self.service_key
        )
    }

    pub(crate) fn get(&self) -> String {
        self.request("GET /", "\r\n")
    }

    /// Sends a GET on a new connection; returns the caller and the stream of the request on
    /// `tunnel`.
    pub(crate) fn send_get(&self, scene: &Scene, tunnel: &mut Tunnel) -> (Caller, StreamId) {
        let mut caller = self.caller(scene);
        caller.send(self.get());
        (caller, tunnel.request())
    }

    /// The connection of a caller that speaks HTTP/2, before its preface.
    pub(crate) fn http2_caller(&self, scene: &Scene) -> Tls {
        Tls::new(
            caller::session(&scene.about, HOST, &[b"h2"], None),
            caller::socket(&scene.about),
        )
    }

    pub(crate) fn key(&self) -> &str {
        &self.service_key
    }
}

impl Tunnel {
    /// Upgrades a connection for the service at `host`.
    pub(crate) fn upgrade(mut peer: Peer<Tls>, host: &str) -> Self {
        peer.send(handshake::request(host, None));
        assert_eq!(peer.response_head(&Method::GET).unwrap().status, 101);
        Self(peer)
    }

    /// The next frame. A PING is answered, a RESET is not.
    pub(crate) fn next(&mut self) -> io::Result<Frame> {
        let header = self.0.bytes(HEADER)?;
        let FrameHeader {
            kind,
            end,
            length,
            stream,
        } = FrameHeader::decode(header.try_into().unwrap()).unwrap();
        let payload = self.0.bytes(length)?;
        if kind == Kind::Ping {
            self.try_send(&frame(Kind::Pong, false, stream, &payload))?;
        }
        Ok(Frame {
            kind,
            end,
            stream,
            payload,
        })
    }

    /// The next frame of this type. Fails with the frames that came instead if it does not come:
    /// others come all the time.
    pub(crate) fn next_of(&mut self, kind: Kind) -> io::Result<Frame> {
        let began = Instant::now();
        let mut others = Vec::new();
        while began.elapsed() < SOON {
            let next = self.next()?;
            if next.kind == kind {
                return Ok(next);
            }
            others.push((next.kind, next.stream));
        }
        let message = format!("no frame of the type {kind:?}, but {others:?}");
        Err(io::Error::new(ErrorKind::TimedOut, message))
    }

    /// Asks for a certificate for the key of a PEM certificate request. Returns the answer.
    pub(crate) fn renew(&mut self, csr: &str) -> Value {
        let request = json!({ "type": "renew", "csr": csr });
        self.0.send(message(request.to_string()));
        loop {
            let answer = self.next_of(Kind::Message).unwrap();
            let answer: Value = serde_json::from_slice(&answer.payload).unwrap();
            if answer["type"] == "certificate" || answer["type"] == "renewal_refused" {
                return answer;
            }
        }
    }

    /// The stream of the next request.
    pub(crate) fn request(&mut self) -> StreamId {
        self.next_of(Kind::Request).unwrap().stream
    }

    /// Waits for a RESET of `stream`, and answers it.
    pub(crate) fn answer_reset(&mut self, stream: StreamId) {
        while self.next_of(Kind::Reset).unwrap().stream != stream {}
        self.0.send(reset(stream, b""));
    }

    /// Waits until the gateway has handled all frames that were sent before.
    pub(crate) fn until_handled(&mut self) {
        self.0.send(ping());
        self.next_of(Kind::Pong).unwrap();
    }

    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.stream.write_all(bytes)?;
        self.0.stream.flush()
    }

    /// Sends `more` until the gateway ends the tunnel, at most `most` times. Returns how often it
    /// was sent.
    pub(crate) fn sent_until_cut(&mut self, more: &[u8], most: usize) -> usize {
        const AT_ONCE: usize = 100;
        let many = more.repeat(AT_ONCE);
        (0..most.div_ceil(AT_ONCE))
            .take_while(|_| self.try_send(&many).is_ok())
            .count()
            * AT_ONCE
    }

    /// Whether the gateway ends the tunnel before the read timeout.
    pub(crate) fn is_cut(&mut self) -> bool {
        loop {
            match self.next() {
                Ok(_) => {}
                Err(error) => {
                    return !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
                }
            }
        }
    }

    /// Reads and discards the gateway's frames on another thread. Its result says whether the
    /// gateway ended the tunnel.
    pub(crate) fn read_on(&self) -> thread::JoinHandle<bool> {
        let mut socket = self.0.stream.sock.try_clone().unwrap();
        thread::spawn(move || {
            let mut chunk = vec![0; 64 * 1024];
            loop {
                match socket.read(&mut chunk) {
                    Ok(0) => return true,
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => {
                        return !matches!(
                            error.kind(),
                            ErrorKind::WouldBlock | ErrorKind::TimedOut
                        );
                    }
                }
            }
        })
    }

    /// Reads until the gateway ends the tunnel with `close_notify`; returns the reason that it
    /// gave.
    pub(crate) fn reason_for_the_end(&mut self) -> String {
        let reason = loop {
            let message = self.next_of(Kind::Message).unwrap();
            let message: Value = serde_json::from_slice(&message.payload).unwrap();
            if message["type"] == "ended" {
                break message["reason"].as_str().unwrap().to_owned();
            }
        };
        assert_eq!(self.0.stream.read(&mut [0]).unwrap(), 0);
        reason
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
            Err(error) => {
                return !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
            }
        }
    }
}
