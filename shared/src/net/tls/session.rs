//! A TLS session without I/O: ciphertext in, plaintext out, and the reverse.
//!
//! rustls' unbuffered connections keep no ciphertext. A session keeps an incomplete record and
//! unsent records, each only while there are any, so an idle session has no buffer.

use std::cell::RefCell;
use std::io::{self, IoSlice};

use rustls::CommonState;
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, EncryptError, ReadTraffic, UnbufferedStatus,
    WriteTraffic,
};

use self::incomplete::Incomplete;
use self::outgoing::OutgoingRecords;
use super::failure::TlsFailure;

mod incomplete;
mod outgoing;

/// Most encrypted, unsent bytes of a session before writers wait.
pub const SEND_BUFFER: usize = 128 * 1024;
/// Most plaintext of one record (RFC 8446 §5.1).
const FRAGMENT_MAX: usize = 16 * 1024;
/// Most bytes that encryption adds to a record: header, nonce of TLS 1.2, content type of TLS 1.3,
/// authentication tag.
const RECORD_OVERHEAD: usize = 5 + 8 + 1 + 16;

thread_local! {
    /// Plaintext of one record that is in several pieces.
    static FRAGMENT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// State of a TLS connection, client or server, from the ClientHello on.
pub struct TlsSession {
    connection: Connection,
    incomplete: Incomplete,
    outgoing: OutgoingRecords,
    /// The peer's `close_notify` (RFC 8446 §6.1) was read: the end of the stream is authentic.
    closed_by_peer: bool,
    /// `close_notify` is among the outgoing bytes, or was sent.
    closed: bool,
    /// Error that ended the connection. rustls must not process records after it.
    failed: Option<rustls::Error>,
}

enum Connection {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

impl From<UnbufferedClientConnection> for TlsSession {
    /// Creates a client's session; its ClientHello is ready to be sent.
    fn from(connection: UnbufferedClientConnection) -> Self {
        Self::new(Connection::Client(connection))
    }
}

impl From<UnbufferedServerConnection> for TlsSession {
    fn from(connection: UnbufferedServerConnection) -> Self {
        Self::new(Connection::Server(connection))
    }
}

impl TlsSession {
    fn new(connection: Connection) -> Self {
        let mut session = Self {
            connection,
            incomplete: Incomplete::default(),
            outgoing: OutgoingRecords::default(),
            closed_by_peer: false,
            closed: false,
            failed: None,
        };
        // Takes the ClientHello of a client. A failure is kept for the first use.
        session.process(&mut [], &mut |_| {});
        session
    }

    /// Decrypts `ciphertext` in place and passes the plaintext to `sink`, record by record. Keeps
    /// an incomplete record. Queues records that answer: those of the handshake, and alerts.
    ///
    /// An error ends the session: all later calls return it again.
    pub(super) fn receive(
        &mut self,
        ciphertext: &mut [u8],
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), rustls::Error> {
        let mut at = 0;
        // Data after `close_notify` is ignored (RFC 8446 §6.1).
        while at < ciphertext.len() && !self.closed_by_peer && self.failed.is_none() {
            let input = &mut ciphertext[at..];
            let mut incomplete = std::mem::take(&mut self.incomplete);
            if incomplete.is_empty() {
                at += input.len();
                let complete = incomplete::complete_records(input);
                let discard = self.process(input, sink);
                incomplete = Incomplete::new(&input[discard..], complete.saturating_sub(discard));
            } else {
                // Completes only the one record, so that no more than its bytes are copied.
                at += incomplete.complete(input);
                let discard = self.process(incomplete.bytes(), sink);
                incomplete.discard(discard);
            }
            self.keep(incomplete);
        }
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Encrypts as much of `pieces` as there is room for, and returns the number of bytes; 0 if
    /// there is none.
    pub(super) fn write(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        if let Some(error) = &self.failed {
            return Err(invalid(error.clone()));
        }
        if self.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let room = SEND_BUFFER.saturating_sub(self.outgoing.len());
        if room == 0 {
            return Ok(0);
        }
        let incomplete = self.incomplete.bytes();
        let outgoing = &mut self.outgoing;
        let written = match &mut self.connection {
            Connection::Client(client) => encrypt(client, incomplete, outgoing, pieces, room),
            Connection::Server(server) => encrypt(server, incomplete, outgoing, pieces, room),
        };
        written.map_err(|error| self.fail(error))
    }

    /// Queues `close_notify` once, unless the handshake is incomplete or the session has failed.
    pub(super) fn close(&mut self) {
        if self.closed || self.failed.is_some() {
            return;
        }
        let incomplete = self.incomplete.bytes();
        let outgoing = &mut self.outgoing;
        let closed = match &mut self.connection {
            Connection::Client(client) => close(client, incomplete, outgoing),
            Connection::Server(server) => close(server, incomplete, outgoing),
        };
        match closed {
            Ok(()) => self.closed = true,
            Err(error) => drop(self.fail(error)),
        }
    }

    /// Keeps an error of a write. A session whose handshake is incomplete has not failed.
    fn fail(&mut self, error: rustls::Error) -> io::Error {
        if error != rustls::Error::HandshakeNotComplete {
            self.failed = Some(error.clone());
        }
        invalid(error)
    }

    /// Whether there are unsent records.
    pub(super) fn has_unsent(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Bytes of unsent records.
    pub(super) fn unsent(&self) -> usize {
        self.outgoing.len()
    }

    /// Passes unsent bytes to `send`, and removes as many as it returns.
    pub(super) fn send_with(
        &mut self,
        send: impl FnOnce(&[IoSlice<'_>]) -> io::Result<usize>,
    ) -> io::Result<()> {
        self.outgoing.send_with(send)
    }

    pub(super) fn is_handshaking(&self) -> bool {
        self.common().is_handshaking()
    }

    pub(super) fn is_closed_by_peer(&self) -> bool {
        self.closed_by_peer
    }

    /// Certificates, the selected protocol and other results of the handshake.
    pub(super) fn common(&self) -> &CommonState {
        match &self.connection {
            Connection::Client(client) => client,
            Connection::Server(server) => server,
        }
    }

    /// Processes the complete records of `input`. Returns the number of bytes at its start that are
    /// no longer needed; the next input has to start with the others.
    fn process(&mut self, input: &mut [u8], sink: &mut dyn FnMut(&[u8])) -> usize {
        let outgoing = &mut self.outgoing;
        let (discard, processed) = match &mut self.connection {
            Connection::Client(client) => process(client, input, outgoing, sink),
            Connection::Server(server) => process(server, input, outgoing, sink),
        };
        match processed {
            Ok(closed_by_peer) => self.closed_by_peer |= closed_by_peer,
            Err(error) => self.failed = Some(error),
        }
        discard
    }

    /// Keeps `incomplete` for the next input, unless there is none.
    fn keep(&mut self, incomplete: Incomplete) {
        if self.closed_by_peer || self.failed.is_some() {
            return;
        }
        if incomplete.is_too_long() {
            self.failed = Some(rustls::InvalidMessage::HandshakePayloadTooLarge.into());
            return;
        }
        self.incomplete = incomplete;
    }
}

pub(super) fn invalid(error: rustls::Error) -> io::Error {
    TlsFailure(error).into()
}

/// What client and server connections have in common; rustls has no trait for it.
trait Unbuffered {
    type Side;

    fn process<'c, 'i>(&'c mut self, input: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Side>;

    fn common(&self) -> &CommonState;
}

impl Unbuffered for UnbufferedClientConnection {
    type Side = rustls::client::ClientConnectionData;

    fn process<'c, 'i>(&'c mut self, input: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Side> {
        self.process_tls_records(input)
    }

    fn common(&self) -> &CommonState {
        self
    }
}

impl Unbuffered for UnbufferedServerConnection {
    type Side = rustls::server::ServerConnectionData;

    fn process<'c, 'i>(&'c mut self, input: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Side> {
        self.process_tls_records(input)
    }

    fn common(&self) -> &CommonState {
        self
    }
}

/// Processes the complete records of `input`. Returns the bytes to discard, and whether
/// `close_notify` was among them.
fn process<C: Unbuffered>(
    connection: &mut C,
    input: &mut [u8],
    outgoing: &mut OutgoingRecords,
    sink: &mut dyn FnMut(&[u8]),
) -> (usize, Result<bool, rustls::Error>) {
    let mut done = 0;
    let mut closed_by_peer = false;
    let error = loop {
        let status = connection.process(&mut input[done..]);
        done += status.discard;
        let handled = match status.state {
            Ok(ConnectionState::ReadTraffic(traffic)) => {
                read(traffic, sink).map(|discard| done += discard)
            }
            Ok(ConnectionState::EncodeTlsData(record)) => encode(record, outgoing),
            Ok(ConnectionState::TransmitTlsData(transmit)) => {
                // The outgoing bytes keep the order of the records, so they can be sent later.
                transmit.done();
                Ok(())
            }
            Ok(ConnectionState::PeerClosed) => {
                closed_by_peer = true;
                Ok(())
            }
            Ok(
                ConnectionState::BlockedHandshake
                | ConnectionState::WriteTraffic(_)
                | ConnectionState::Closed,
            ) => {
                return (done, Ok(closed_by_peer));
            }
            Ok(state) => Err(rustls::Error::General(format!(
                "unexpected state of a TLS session: {state:?}"
            ))),
            Err(error) => Err(error),
        };
        if let Err(error) = handled {
            break error;
        }
    };
    // The alert about the error. rustls returns queued records before it looks at the input.
    while connection.common().wants_write() {
        let Ok(ConnectionState::EncodeTlsData(record)) = connection.process(&mut []).state else {
            break;
        };
        if encode(record, outgoing).is_err() {
            break;
        }
    }
    (done, Err(error))
}

/// Passes decrypted records to `sink`. Returns the bytes to discard.
fn read<S>(
    mut traffic: ReadTraffic<'_, '_, S>,
    sink: &mut dyn FnMut(&[u8]),
) -> Result<usize, rustls::Error> {
    let mut discard = 0;
    while let Some(record) = traffic.next_record() {
        let record = record?;
        sink(record.payload);
        discard += record.discard;
    }
    Ok(discard)
}

/// Appends a record of the handshake, an alert or a key update to `outgoing`.
fn encode<S>(
    mut record: EncodeTlsData<'_, S>,
    outgoing: &mut OutgoingRecords,
) -> Result<(), rustls::Error> {
    outgoing.append(0, |room| match record.encode(room) {
        Ok(written) => Ok(written),
        Err(EncodeError::InsufficientSize(error)) => Err(EncryptError::InsufficientSize(error)),
        Err(EncodeError::AlreadyEncoded) => Ok(0),
    })
}

/// Encrypts at most `room` bytes of `pieces`, in records as large as possible. Returns the number
/// of bytes.
fn encrypt<C: Unbuffered>(
    connection: &mut C,
    incomplete: &mut [u8],
    outgoing: &mut OutgoingRecords,
    pieces: &[IoSlice<'_>],
    room: usize,
) -> Result<usize, rustls::Error> {
    let mut traffic = traffic(connection, incomplete)?;
    let total = pieces
        .iter()
        .map(|piece| piece.len())
        .sum::<usize>()
        .min(room);
    let mut pieces = Pieces { pieces, taken: 0 };
    let mut encrypted = 0;
    FRAGMENT.with_borrow_mut(|scratch| {
        while encrypted < total {
            let fragment = pieces.take((total - encrypted).min(FRAGMENT_MAX), scratch);
            outgoing.append(fragment.len() + RECORD_OVERHEAD, |room| {
                traffic.encrypt(fragment, room)
            })?;
            encrypted += fragment.len();
        }
        Ok(encrypted)
    })
}

/// Appends `close_notify` to `outgoing`.
fn close<C: Unbuffered>(
    connection: &mut C,
    incomplete: &mut [u8],
    outgoing: &mut OutgoingRecords,
) -> Result<(), rustls::Error> {
    let mut traffic = traffic(connection, incomplete)?;
    outgoing.append(2 + RECORD_OVERHEAD, |room| traffic.queue_close_notify(room))
}

/// Returns the state that encrypts. `incomplete` has to be the session's, since rustls may refer to
/// a part of a handshake message in it.
fn traffic<'a, C: Unbuffered>(
    connection: &'a mut C,
    incomplete: &'a mut [u8],
) -> Result<WriteTraffic<'a, C::Side>, rustls::Error> {
    match connection.process(incomplete).state? {
        ConnectionState::WriteTraffic(traffic) => Ok(traffic),
        _ => Err(rustls::Error::HandshakeNotComplete),
    }
}

/// Rest of the pieces of a write.
struct Pieces<'a> {
    pieces: &'a [IoSlice<'a>],
    /// Bytes taken of the first piece.
    taken: usize,
}

impl<'a> Pieces<'a> {
    /// Takes the next `size` bytes, or all that are left; gathers them in `scratch` if they are in
    /// several pieces.
    fn take<'s>(&mut self, size: usize, scratch: &'s mut Vec<u8>) -> &'s [u8]
    where
        'a: 's,
    {
        scratch.clear();
        while let Some((piece, later)) = self.pieces.split_first() {
            let rest = &piece[self.taken..];
            let part = &rest[..rest.len().min(size - scratch.len())];
            self.taken += part.len();
            if self.taken == piece.len() {
                *self = Self {
                    pieces: later,
                    taken: 0,
                };
            }
            if part.len() == size {
                return part;
            }
            scratch.extend_from_slice(part);
            if scratch.len() == size {
                break;
            }
        }
        scratch
    }
}

#[cfg(test)]
mod tests;
