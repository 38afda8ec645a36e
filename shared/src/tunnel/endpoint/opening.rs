//! Streams that the gateway opens.

use std::rc::Rc;

use super::stream::{Stream, UploadReport};
use super::{Endpoint, HEADS_AHEAD, Role, Slot, StreamKey};
use crate::tunnel::frame::{Kind, StreamId};
use crate::tunnel::ledger::Share;
use crate::tunnel::window;

/// Why no stream can be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    #[error("the agent serves no further stream")]
    StreamLimit,
    #[error("the agent does not read its tunnel")]
    Congested,
    #[error("the request head is too large for the tunnel")]
    HeadTooLarge,
    #[error("there is no memory for another stream")]
    Memory,
    #[error("the tunnel has ended")]
    Lost,
}

impl Endpoint {
    /// As [`Self::open_for`], for the share of this end.
    pub fn open(
        &mut self,
        credit: usize,
        end: bool,
        write_head: impl FnOnce(&mut Vec<u8>),
    ) -> Result<StreamKey, OpenError> {
        self.open_for(Rc::clone(&self.share), credit, end, write_head)
    }

    /// Opens a stream, charged to `share`: grants up to `credit` bytes for its response, as budget
    /// and share allow, and writes its request head with `write_head`. With `end`, the request has
    /// no body.
    pub fn open_for(
        &mut self,
        share: Rc<Share>,
        credit: usize,
        end: bool,
        write_head: impl FnOnce(&mut Vec<u8>),
    ) -> Result<StreamKey, OpenError> {
        debug_assert_eq!(self.role, Role::Gateway);
        if self.is_lost {
            return Err(OpenError::Lost);
        }
        if self.open >= self.streams_max {
            return Err(OpenError::StreamLimit);
        }
        if self.urgent.len() > HEADS_AHEAD {
            return Err(OpenError::Congested);
        }
        let least = Stream::least_memory(end);
        let credit = self
            .credit
            .first(credit, share.left_beyond_least().saturating_sub(least));
        let slot = match self.free.pop_front() {
            Some(slot) => slot,
            None => {
                // `open` is below STREAMS_MAX, and every slot is either open or free.
                self.slots.push(Slot::default());
                (self.slots.len() - 1) as u16
            }
        };
        let place = &mut self.slots[usize::from(slot)];
        place.generation = place.generation.checked_add(1).unwrap_or(1);
        let id = StreamId::new(slot, place.generation);
        let before = self.urgent.len();
        let is_written = self.urgent.frame_with(Kind::Request, end, id, |out| {
            out.extend_from_slice(&(credit as u32).to_be_bytes());
            write_head(out);
        });
        if !is_written {
            self.free.push_front(slot);
            return Err(OpenError::HeadTooLarge);
        }
        let mut stream = Stream::new(id, window::LEAST as usize, share);
        stream.sent_end = end;
        if !end && self.reports_uploads {
            stream.upload = UploadReport::Due;
        }
        stream.sent_head_bytes = (self.urgent.len() - before) as u32;
        stream.receive_credit = credit;
        if !stream.settle_within_share() {
            self.urgent.truncate(before);
            self.free.push_front(slot);
            return Err(OpenError::Memory);
        }
        self.credit.opened(&stream);
        let key = self.streams.insert(stream);
        self.slots[usize::from(slot)].stream = Some(key);
        self.open += 1;
        self.wake_driver();
        Ok(StreamKey(key))
    }
}
