//! The successor's handle of the process that it replaces.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crossbeam_channel::Receiver;

use super::channel::Channel;
use super::message::TakeoverMessage;
use super::{TakeoverError, VARIABLE, lead, sockets};
use crate::control::Control;
use crate::members::CarriedNode;
use crate::process::listeners::Inherited;
use crate::store::Position;
use crate::worker::Peers;

/// Process that this one replaces; without a channel once this process serves.
pub struct Predecessor {
    channel: Option<Channel>,
    /// Position of its records; `None` if it reads no changes.
    position: Option<Position>,
}

impl Predecessor {
    pub(super) fn new(channel: Channel) -> Self {
        Self {
            channel: Some(channel),
            position: None,
        }
    }

    /// The parent process, if it started this process as its successor.
    pub fn find() -> io::Result<Option<Self>> {
        let named = std::env::var(VARIABLE).ok().and_then(|id| id.parse().ok());
        if named.is_none()
            || named != rustix::process::getppid().map(|id| id.as_raw_nonzero().get())
        {
            return Ok(None);
        }
        let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        // No other descriptor may refer to the socket, or the predecessor would not see that this process ends.
        rustix::stdio::dup2_stdin(std::fs::File::open("/dev/null")?)?;
        Channel::new(socket).map(|channel| Some(Self::new(channel)))
    }

    /// Receives the listening sockets, which the predecessor sends first.
    pub(crate) fn listeners(&mut self) -> Result<Inherited, TakeoverError> {
        sockets::receive(self.channel()?.socket())
    }

    /// Reports that this process is ready, and waits for the store. Returns the number of live tunnels by service, and
    /// the membership in a region of several nodes.
    pub(crate) fn take_store(
        &mut self,
    ) -> Result<(BTreeMap<String, usize>, Option<CarriedNode>), TakeoverError> {
        self.channel()?.send(&TakeoverMessage::Ready)?;
        match self.channel()?.receive()? {
            TakeoverMessage::Store {
                tunnels,
                membership,
                position,
                clock_ahead_us,
            } => {
                self.position = position;
                clock_ahead_us
                    .into_iter()
                    .for_each(gw_shared::clock::follow);
                Ok((tunnels, membership))
            }
            other => Err(TakeoverError::Unexpected(format!("{other:?}"))),
        }
    }

    /// Reports that this process serves. From then on sends changes and admits the predecessor's requests. The returned
    /// channel disconnects when the predecessor has ended.
    pub(crate) fn serving(
        &mut self,
        control: &Arc<Control>,
        peers: &Arc<Peers>,
    ) -> Result<Receiver<Infallible>, TakeoverError> {
        self.channel()?.send(&TakeoverMessage::Serving)?;
        let channel = self.channel.take().ok_or(TakeoverError::Ended)?;
        lead::lead(channel, self.position.take(), control, peers)
    }

    pub(super) fn channel(&mut self) -> Result<&mut Channel, TakeoverError> {
        self.channel.as_mut().ok_or(TakeoverError::Ended)
    }

    /// Sends the reason why this process cannot take over.
    pub fn failed(&mut self, reason: &str) {
        // If this fails, the predecessor still sees that this process ends.
        let _ = self.channel().and_then(|channel| {
            channel.send(&TakeoverMessage::Failed {
                reason: reason.to_owned(),
            })
        });
    }
}
