//! One end of the socket pair, on which the processes exchange messages as lines of JSON.

use std::io::{self, BufRead, BufReader, Cursor, Read, Write};
use std::mem::discriminant;
use std::os::unix::net::UnixStream;

use crate::limits;
use bytes::BytesMut;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, Chain};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::message::TakeoverMessage;
use super::{LINE_MAX, TakeoverError};

/// Bytes of messages from which on a [`MessageWriter`] has no room for changes.
const ROOM: usize = 64 * 1024;

/// The end of a process until its successor serves. Each operation waits for
/// [`limits::TAKEOVER_STEP`] at most.
pub(super) struct Channel {
    reader: BufReader<UnixStream>,
    /// Part of a line received so far.
    partial: Vec<u8>,
}

/// Receives the messages of the other process while the predecessor drains.
pub(super) struct MessageReader {
    reader: tokio::io::BufReader<Chain<Cursor<Vec<u8>>, OwnedReadHalf>>,
    /// Part of a line received so far.
    partial: Vec<u8>,
}

/// Sends messages to the other process while the predecessor drains.
pub(super) struct MessageWriter {
    socket: OwnedWriteHalf,
    /// Bytes that are not sent yet.
    unsent: BytesMut,
}

impl Channel {
    pub(super) fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_read_timeout(Some(limits::TAKEOVER_STEP))?;
        socket.set_write_timeout(Some(limits::TAKEOVER_STEP))?;
        Ok(Self {
            reader: BufReader::new(socket),
            partial: Vec::new(),
        })
    }

    #[cfg(test)]
    pub(super) fn socket(&mut self) -> &mut UnixStream {
        self.reader.get_mut()
    }

    pub(super) fn send(&mut self, message: &TakeoverMessage) -> Result<(), TakeoverError> {
        let sent = self.reader.get_mut().write_all(&message.line()?);
        sent.map_err(|error| match error.into() {
            // The other process may have sent the reason before it ended.
            TakeoverError::Ended => self.receive().err().unwrap_or(TakeoverError::Ended),
            error => error,
        })
    }

    pub(super) fn receive(&mut self) -> Result<TakeoverMessage, TakeoverError> {
        let Self { reader, partial } = self;
        // On an error, such as a time limit, `partial` keeps the received bytes.
        reader
            .by_ref()
            .take(LINE_MAX - partial.len() as u64)
            .read_until(b'\n', partial)?;
        TakeoverMessage::of_line(&std::mem::take(partial))
    }

    /// Receives a message of the kind of `expected`.
    pub(super) fn expect(&mut self, expected: &TakeoverMessage) -> Result<(), TakeoverError> {
        match self.receive()? {
            message if discriminant(&message) == discriminant(expected) => Ok(()),
            other => Err(other.unexpected()),
        }
    }

    /// The halves of the channel, for the runtime that this is called in.
    pub(super) fn split(self) -> io::Result<(MessageReader, MessageWriter)> {
        let mut received = self.partial;
        received.extend_from_slice(self.reader.buffer());
        let socket = self.reader.into_inner();
        socket.set_nonblocking(true)?;
        let (reading, writing) = tokio::net::UnixStream::from_std(socket)?.into_split();
        let reader = MessageReader {
            reader: tokio::io::BufReader::new(AsyncReadExt::chain(Cursor::new(received), reading)),
            partial: Vec::new(),
        };
        let writer = MessageWriter {
            socket: writing,
            unsent: BytesMut::new(),
        };
        Ok((reader, writer))
    }
}

impl MessageReader {
    /// Receives a message. A call that is dropped loses nothing.
    pub(super) async fn next(&mut self) -> Result<TakeoverMessage, TakeoverError> {
        let Self { reader, partial } = self;
        let most = LINE_MAX - partial.len() as u64;
        reader.take(most).read_until(b'\n', partial).await?;
        TakeoverMessage::of_line(&std::mem::take(partial))
    }
}

impl MessageWriter {
    /// Adds a message to those that are to be sent.
    pub(super) fn push(&mut self, message: &TakeoverMessage) -> Result<(), TakeoverError> {
        self.unsent.extend_from_slice(&message.line()?);
        Ok(())
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    pub(super) fn has_room(&self) -> bool {
        self.unsent.len() < ROOM
    }

    /// Sends some of the messages. A call that is dropped has sent nothing.
    pub(super) async fn send(&mut self) -> Result<(), TakeoverError> {
        self.socket.write_buf(&mut self.unsent).await?;
        Ok(())
    }
}
