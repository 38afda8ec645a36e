//! Finds one request by its id: the folder of its node and hour, objects of its second, then the
//! blocks of that second.

use std::cmp::Reverse;

use gw_region::NodeSlot;
use gw_shared::id::RequestId;

use super::super::LogError;
use super::super::block::{SLOT_MS, Unpacker};
use super::super::view::Side;
use super::name::{HOUR, ObjectName, hour_folder};
use super::segment::Segment;
use super::{Archive, ArchiveError};
use crate::request_log::captures::capture::StoredMessage;
use crate::request_log::days::day::Day;
use crate::request_log::search::lookup::Found;

/// Most objects of one hour: as many as a busy node writes, and those of requests that lasted for
/// hours.
pub(super) const OBJECTS_OF_HOUR: usize = 10_000;

impl Archive {
    /// Finds a record, and the object that it is in.
    pub(super) fn find(
        &self,
        node: NodeSlot,
        id: RequestId,
    ) -> Result<Option<(ObjectName, Found)>, ArchiveError> {
        let day = Day::of_ms(id.unix_ms());
        if !self.now.days().contains(&day) {
            return Ok(None);
        }
        // A day has fewer seconds than `u32` holds.
        let second = ((id.unix_ms() - day.start_ms()) / SLOT_MS) as u32;
        let mut refused = None;
        for object in self.objects_of_hour(node, day, second / HOUR)? {
            if !(object.first..=object.last).contains(&second) {
                continue;
            }
            match self.find_in(&object, id, second) {
                Ok(None) => {}
                Ok(Some(found)) => return Ok(Some((object, found))),
                // The record may be in another object.
                Err(error) if error.is_refusal() => refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        refused.map_or(Ok(None), Err)
    }

    /// Objects with records that began in an hour, the newest first.
    pub(super) fn objects_of_hour(
        &self,
        node: NodeSlot,
        day: Day,
        hour: u32,
    ) -> Result<Vec<ObjectName>, ArchiveError> {
        let folder = hour_folder(&self.region, day, node, hour);
        // Twice as many, because of the objects of bodies.
        let names = self.bucket.objects(&folder, 2 * OBJECTS_OF_HOUR)?;
        let files = names.iter().filter_map(|name| name.rsplit('/').next());
        let mut objects: Vec<ObjectName> = files
            .filter_map(|file| ObjectName::parse(day, node, file))
            .collect();
        objects.sort_unstable_by_key(|object| Reverse((object.last, object.first)));
        Ok(objects)
    }

    fn find_in(
        &self,
        object: &ObjectName,
        id: RequestId,
        second: u32,
    ) -> Result<Option<Found>, ArchiveError> {
        let Some(content) = self.records(object)? else {
            return Ok(None);
        };
        let find = || {
            let segment = Segment::read(&content)?;
            let mut unpacker = Unpacker::new()?;
            let blocks = segment.blocks.iter().filter(|block| block.second == second);
            for block in blocks {
                let data = unpacker.unpack(&block.data)?;
                let found = Found::in_block(&data, id, &segment, &self.names.now())?;
                if found.is_some() {
                    return Ok(found);
                }
            }
            Ok(None)
        };
        find().map_err(|error: LogError| self.damaged(object, error))
    }

    /// Reads a captured message of a record. `None` if it was not captured, or has expired.
    pub(super) fn message(
        &self,
        object: &ObjectName,
        found: &Found,
        side: Side,
    ) -> Result<Option<StoredMessage>, ArchiveError> {
        let Some(key) = found.capture else {
            return Ok(None);
        };
        let Some(content) = self.records(object)? else {
            return Ok(None);
        };
        let segment = Segment::read(&content).map_err(|error| self.damaged(object, error))?;
        let Some(message) = segment.message(key, side) else {
            return Ok(None);
        };
        let head = message.head.to_vec();
        if message.length == 0 {
            let body = Vec::new();
            return Ok(Some(StoredMessage { head, body }));
        }
        let end = message.offset.saturating_add(message.length.into());
        let body = self.stored_body(object, &(message.offset..end))?;
        Ok(body.map(|body| StoredMessage { head, body }))
    }
}
