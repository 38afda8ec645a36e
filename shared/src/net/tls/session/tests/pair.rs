//! A session and its peer, in memory.

use std::io::Read;
use std::sync::Arc;

use rustls::crypto::aws_lc_rs;
use rustls::{ClientConnection, ServerConnection, SupportedProtocolVersion};
use rustls_pki_types::PrivateKeyDer;

use super::*;

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Side {
    Client,
    Server,
}

pub(super) struct Pair {
    pub(super) session: TlsSession,
    /// The other side.
    pub(super) peer: rustls::Connection,
}

/// A session that is the `side` of a connection, and its peer, whose records have at most
/// `fragment` bytes. Nothing is sent yet.
pub(super) fn unconnected(
    side: Side,
    version: &'static SupportedProtocolVersion,
    fragment: Option<usize>,
) -> Pair {
    let certified = rcgen::generate_simple_self_signed(["h".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der()).unwrap();
    let certificate = certified.cert.der().clone();
    let mut server = gw_bed::tls::server((certificate.clone(), key), &[b"p"]);
    let provider = aws_lc_rs::default_provider();
    let mut client = gw_bed::tls::client_with(provider, &[version], [certificate], None, &[b"p"]);
    let name = "h".try_into().unwrap();
    let (session, mut peer): (TlsSession, rustls::Connection) = match side {
        Side::Client => {
            server.max_fragment_size = fragment;
            server.enable_secret_extraction = true;
            let session = UnbufferedClientConnection::new(Arc::new(client), name).unwrap();
            let peer = ServerConnection::new(Arc::new(server)).unwrap();
            (session.into(), peer.into())
        }
        Side::Server => {
            client.max_fragment_size = fragment;
            client.enable_secret_extraction = true;
            let session = UnbufferedServerConnection::new(Arc::new(server)).unwrap();
            let peer = ClientConnection::new(Arc::new(client), name).unwrap();
            (session.into(), peer.into())
        }
    };
    peer.set_buffer_limit(None);
    Pair { session, peer }
}

pub(super) fn connected(side: Side, version: &'static SupportedProtocolVersion) -> Pair {
    let mut pair = unconnected(side, version, None);
    pair.shake_hands(usize::MAX);
    pair
}

pub(super) fn on_each_side_and_version(test: impl Fn(Side, &'static SupportedProtocolVersion)) {
    for side in [Side::Client, Side::Server] {
        for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
            test(side, version);
        }
    }
}

impl Pair {
    /// Completes the handshake, with inputs of at most `size` bytes for the session.
    pub(super) fn shake_hands(&mut self, size: usize) {
        loop {
            let sent = self.sent();
            self.peer_receives(&sent).unwrap();
            let received = self.peer_sent();
            for input in received.chunks(size) {
                assert!(self.receive(input).unwrap().is_empty());
            }
            if sent.is_empty() && received.is_empty() {
                break;
            }
        }
        assert!(!self.session.is_handshaking() && !self.peer.is_handshaking());
        assert_eq!(self.session.common().alpn_protocol(), Some(&b"p"[..]));
        self.assert_no_memory();
    }

    pub(super) fn receive(&mut self, ciphertext: &[u8]) -> Result<Vec<u8>, Error> {
        let mut plaintext = Vec::new();
        let mut take = |chunk: &[u8]| plaintext.extend_from_slice(chunk);
        self.session.receive(&mut ciphertext.to_vec(), &mut take)?;
        Ok(plaintext)
    }

    /// All that the session sends.
    pub(super) fn sent(&mut self) -> Vec<u8> {
        let mut sent = Vec::new();
        while self.session.has_unsent() {
            let send = |pieces: &[IoSlice<'_>]| {
                let before = sent.len();
                for piece in pieces {
                    sent.extend_from_slice(piece);
                }
                Ok(sent.len() - before)
            };
            self.session.send_with(send).unwrap();
        }
        sent
    }

    pub(super) fn write(&mut self, pieces: &[&[u8]]) -> io::Result<usize> {
        let slices = pieces.iter().map(|piece| IoSlice::new(piece));
        self.session.write(&slices.collect::<Vec<_>>())
    }

    pub(super) fn peer_receives(&mut self, mut ciphertext: &[u8]) -> Result<Vec<u8>, Error> {
        let mut plaintext = Vec::new();
        while !ciphertext.is_empty() && self.peer.read_tls(&mut ciphertext).unwrap() > 0 {
            self.peer.process_new_packets()?;
            // An error is no more than the end of what has arrived.
            let _ = self.peer.reader().read_to_end(&mut plaintext);
        }
        Ok(plaintext)
    }

    /// Checks that the peer receives these bytes of all that the session sends. Returns the lengths
    /// of the records.
    pub(super) fn assert_sends(&mut self, expected: &[u8]) -> Vec<usize> {
        let sent = self.sent();
        assert!(self.peer_receives(&sent).unwrap() == expected);
        records(&sent)
    }

    /// All that the peer sends, in response to writes of `length` bytes of `plaintext`.
    pub(super) fn peer_writes_in(&mut self, plaintext: &[u8], length: usize) -> Vec<u8> {
        let parts = plaintext.chunks(length);
        parts.flat_map(|part| self.peer_writes(part)).collect()
    }

    /// All that the peer sends.
    pub(super) fn peer_sent(&mut self) -> Vec<u8> {
        let mut sent = Vec::new();
        while self.peer.wants_write() {
            self.peer.write_tls(&mut sent).unwrap();
        }
        sent
    }

    pub(super) fn peer_writes(&mut self, plaintext: &[u8]) -> Vec<u8> {
        io::Write::write_all(&mut self.peer.writer(), plaintext).unwrap();
        self.peer_sent()
    }

    /// Checks that both directions carry bytes, in one input each.
    pub(super) fn assert_alive(&mut self) {
        let ciphertext = self.peer_writes(b"to the session");
        assert_eq!(self.receive(&ciphertext).unwrap(), b"to the session");
        assert_eq!(self.write(&[b"to ", b"the ", b"", b"peer"]).unwrap(), 11);
        let sent = self.sent();
        assert_eq!(self.peer_receives(&sent).unwrap(), b"to the peer");
        self.assert_no_memory();
    }

    pub(super) fn assert_no_memory(&self) {
        assert_eq!(self.session.incomplete.capacity(), 0);
        assert_eq!(self.session.outgoing.capacity(), 0);
    }
}
