//! The successor's handle of the process that it replaces.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crossbeam_channel::Receiver;
use gw_base::process::background::Tasks;
use gw_control_plane::control::Control;
use gw_control_plane::members::CarriedNode;
use gw_data_plane::worker::{WorkerHandles, WorkerMessage};
use gw_region::owners::ownership::WorkerId;
use gw_shared::net::inherited_sockets;
use gw_store::{Position, Revision};

use super::channel::Channel;
use super::message::TakeoverMessage;
use super::{CHANNEL, LINK, PREDECESSOR, SOCKETS, TakeoverError, lead};
use crate::process::sockets::listeners::{Inherited, ListenError};

/// Process that this one replaces.
pub struct Predecessor {
    /// Listening sockets with their names, until they are used.
    sockets: Vec<(OwnedFd, String)>,
    /// Ends of the links: the first one of each of its workers, then the next ones.
    links: Vec<OwnedFd>,
    /// Number of its workers, once it has given the store.
    linked_workers: usize,
    /// `None` once this process serves.
    channel: Option<Channel>,
    /// Position of its records, once it has closed the store.
    position: Position,
    /// Whether it says which changes it uses.
    acknowledges: bool,
}

impl Predecessor {
    pub(super) fn new(channel: Channel, sockets: Vec<(OwnedFd, String)>) -> Self {
        Self {
            sockets,
            links: Vec::new(),
            linked_workers: 0,
            channel: Some(channel),
            position: Position::default(),
            acknowledges: false,
        }
    }

    /// The parent process, if it started this process as its successor.
    pub fn find() -> Result<Option<Self>, TakeoverError> {
        let named = std::env::var(PREDECESSOR)
            .ok()
            .and_then(|id| id.parse().ok());
        if named.is_none()
            || named != rustix::process::getppid().map(|id| id.as_raw_nonzero().get())
        {
            return Ok(None);
        }
        let list = std::env::var(SOCKETS).map_err(|_| TakeoverError::OtherBuild)?;
        let mut sockets = inherited_sockets(&list)?;
        let channel = sockets
            .extract_if(.., |(_, name)| name == CHANNEL)
            .next()
            .ok_or(TakeoverError::OtherBuild)?;
        let channel = Channel::new(UnixStream::from(channel.0))?;
        let links = sockets.extract_if(.., |(_, name)| name == LINK);
        let links = links.map(|(link, _)| link).collect();
        Ok(Some(Self {
            links,
            ..Self::new(channel, sockets)
        }))
    }

    /// The listening sockets of the predecessor.
    pub(crate) fn listeners(&mut self) -> Result<Inherited, ListenError> {
        Inherited::by_name(std::mem::take(&mut self.sockets))
    }

    /// Reports that this process is ready, and waits for the store. Returns the number of live
    /// tunnels by service, and the membership in a region of several nodes.
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
                acknowledges,
                linked_workers,
            } => {
                self.position = position;
                self.linked_workers = linked_workers.unwrap_or(self.links.len());
                self.acknowledges = acknowledges;
                clock_ahead_us
                    .into_iter()
                    .for_each(gw_shared::clock::follow);
                Ok((tunnels, membership))
            }
            other => Err(other.unexpected()),
        }
    }

    /// Revision of the records that it uses, once it has given the store. `None` if it will not say
    /// which later ones it uses.
    pub(crate) fn used_revision(&self) -> Option<Revision> {
        self.acknowledges.then_some(self.position.revision)
    }

    /// Reports that this process serves. From then on sends changes, and admits and serves the
    /// predecessor's requests. The returned channel disconnects when the predecessor has ended.
    pub(crate) fn serving(
        &mut self,
        control: &Arc<Control>,
        handles: &Arc<WorkerHandles>,
        tasks: &Tasks,
    ) -> Result<Receiver<Infallible>, TakeoverError> {
        let mut links = std::mem::take(&mut self.links);
        let next = links.split_off(self.linked_workers.min(links.len()));
        let workers = (0..links.len()).cycle();
        handles.keep_links(workers.zip(next).collect());
        for (number, link) in links.into_iter().enumerate() {
            let worker = WorkerId(number % handles.mailboxes.len());
            handles.tell(worker, WorkerMessage::LinkOfPredecessor(link));
        }
        let acknowledge = self.acknowledges;
        self.channel()?
            .send(&TakeoverMessage::Serving { acknowledge })?;
        let channel = self.channel.take().ok_or(TakeoverError::Ended)?;
        let position = std::mem::take(&mut self.position);
        lead::start(
            tasks,
            channel,
            position,
            Arc::clone(control),
            Arc::clone(handles),
        )
    }

    pub(super) fn channel(&mut self) -> Result<&mut Channel, TakeoverError> {
        self.channel.as_mut().ok_or(TakeoverError::Ended)
    }

    /// Sends the reason why this process cannot take over.
    pub fn failed(&mut self, reason: &str) {
        // If this fails, the predecessor still sees that this process ends.
        let _ = self.channel().and_then(|channel| {
            channel.send(&TakeoverMessage::End {
                reason: reason.to_owned(),
            })
        });
    }
}
