//! The predecessor's handle of the process that replaces it.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use crossbeam_channel::Receiver;

use super::channel::Channel;
use super::message::TakeoverMessage;
use super::program::Program;
use super::{TakeoverError, VARIABLE, follow, sockets};
use crate::control::Control;
use crate::members::CarriedNode;
use crate::process::listeners::Listeners;
use crate::rate_limit::{Level, SuccessorCharge, levels};
use crate::store::Position;
use crate::worker::Peers;

/// Process that replaces this one. It is killed when this is dropped before it serves.
pub(crate) struct Successor {
    child: KilledOnDrop,
    pub(super) channel: Channel,
}

/// A child process that is killed on drop; `None` once it serves.
struct KilledOnDrop(Option<Child>);

impl Successor {
    /// Starts `program` and sends it the listening sockets.
    pub(crate) fn start(program: &Program, listeners: &Listeners) -> Result<Self, TakeoverError> {
        let (ours, theirs) = UnixStream::pair()?;
        let spawned = Command::new(&program.name)
            .args(&program.arguments)
            .env(VARIABLE, std::process::id().to_string())
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn();
        let child = spawned.map_err(|error| {
            let program = program.name.to_string_lossy().into_owned();
            TakeoverError::Spawn { program, error }
        })?;
        let mut successor = Self {
            child: KilledOnDrop(Some(child)),
            channel: Channel::new(ours)?,
        };
        let sent = sockets::send(successor.channel.socket(), listeners);
        sent.map_err(|error| successor.channel.reason_of(error.into()))?;
        Ok(successor)
    }

    #[cfg(test)]
    pub(super) fn without_process(channel: Channel) -> Self {
        Self {
            child: KilledOnDrop(None),
            channel,
        }
    }

    pub(crate) fn id(&self) -> Option<u32> {
        self.child.0.as_ref().map(Child::id)
    }

    /// Waits until the successor needs only the store.
    pub(crate) fn wait_until_ready(&mut self) -> Result<(), TakeoverError> {
        self.channel.expect(&TakeoverMessage::Ready)
    }

    /// Reports that the store is closed, with `position` as that of the records here, and waits until the successor
    /// serves. After that, a drop does not kill it.
    pub(crate) fn give_store(
        &mut self,
        tunnels: BTreeMap<String, usize>,
        membership: Option<CarriedNode>,
        position: Position,
    ) -> Result<(), TakeoverError> {
        let position = Some(position);
        let clock_ahead_us = gw_shared::clock::followed();
        self.channel.send(&TakeoverMessage::Store {
            tunnels,
            membership,
            position,
            clock_ahead_us,
        })?;
        self.channel.expect(&TakeoverMessage::Serving)?;
        self.child.0 = None;
        Ok(())
    }

    /// Sends the levels of the buckets and follows the successor's messages from then on. The workers end when the
    /// successor has ended.
    pub(crate) fn follow(
        mut self,
        levels: Vec<Level>,
        charges: Receiver<SuccessorCharge>,
        control: &Arc<Control>,
        peers: &Arc<Peers>,
    ) -> Result<(), TakeoverError> {
        self.channel.send(&TakeoverMessage::Levels {
            levels: levels::bounded(levels),
        })?;
        follow::follow(
            self.channel,
            charges,
            Arc::clone(control),
            Arc::clone(peers),
        )
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // Fails if the process has already ended.
            let _ = child.kill();
            // The process releases the store and the sockets only when it has ended.
            let _ = child.wait();
        }
    }
}
