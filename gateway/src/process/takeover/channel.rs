//! One end of the socket pair: sends and receives messages.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::mem::discriminant;
use std::os::unix::net::UnixStream;

use super::message::TakeoverMessage;
use super::{LINE_MAX, TakeoverError};
use crate::limits;

pub(super) struct Channel {
    reader: BufReader<UnixStream>,
    /// Part of a line received so far.
    partial: Vec<u8>,
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

    pub(super) fn socket(&self) -> &UnixStream {
        self.reader.get_ref()
    }

    #[cfg(test)]
    pub(super) fn socket_mut(&mut self) -> &mut UnixStream {
        self.reader.get_mut()
    }

    pub(super) fn send(&mut self, message: &TakeoverMessage) -> Result<(), TakeoverError> {
        let mut line = Vec::new();
        message.write_to(&mut line)?;
        self.reader
            .get_mut()
            .write_all(&line)
            .map_err(|error| self.reason_of(error.into()))
    }

    /// Replaces [`TakeoverError::Ended`] by the reason that the other process has sent before it ended, if any.
    pub(super) fn reason_of(&mut self, error: TakeoverError) -> TakeoverError {
        match error {
            TakeoverError::Ended => self.receive().err().unwrap_or(TakeoverError::Ended),
            error => error,
        }
    }

    pub(super) fn receive(&mut self) -> Result<TakeoverMessage, TakeoverError> {
        let Self { reader, partial } = self;
        // On an error, such as a time limit, `partial` keeps the received bytes.
        reader
            .by_ref()
            .take(LINE_MAX - partial.len() as u64)
            .read_until(b'\n', partial)?;
        if !partial.ends_with(b"\n") {
            let is_full = partial.len() as u64 >= LINE_MAX;
            return Err(if is_full {
                TakeoverError::TooLong
            } else {
                TakeoverError::Ended
            });
        }
        match serde_json::from_slice(&std::mem::take(partial)) {
            Ok(TakeoverMessage::Failed { reason }) => Err(TakeoverError::Failed(reason)),
            Ok(message) => Ok(message),
            Err(error) => Err(TakeoverError::Unexpected(error.to_string())),
        }
    }

    /// Receives a message of the kind of `expected`.
    pub(super) fn expect(&mut self, expected: &TakeoverMessage) -> Result<(), TakeoverError> {
        match self.receive()? {
            message if discriminant(&message) == discriminant(expected) => Ok(()),
            other => Err(TakeoverError::Unexpected(format!("{other:?}"))),
        }
    }
}
