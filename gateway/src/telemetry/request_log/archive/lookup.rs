//! Finds one request by its id: the folder of its node and hour, objects of its second, then the blocks of that second.

use bytes::Bytes;
use gw_shared::id::RequestId;
use http::{Method, header};

use super::super::block::{DecodedBlock, SLOT_MS, Unpacker};
use super::super::capture::Head;
use super::super::day::Day;
use super::super::record::{BodyCapture, MessageCapture};
use super::super::view::{BodyView, CapturedView, RequestView, Side};
use super::super::{CapturedRequest, LogError};
use super::name::{HOUR, ObjectName, hour_folder};
use super::segment::{Message, Segment};
use super::{Archive, ArchiveError};
use crate::region::NodeSlot;

/// Most objects of one hour: as many as a busy node writes, and those of requests that lasted for hours.
pub(super) const OBJECTS_OF_HOUR: usize = 10_000;

/// Record found by its id.
pub(super) struct Found {
    pub(super) view: RequestView,
    /// Request target: path and query.
    target: String,
    object: ObjectName,
    request: Option<StoredMessage>,
    response: Option<StoredMessage>,
}

/// Captured message in an object.
struct StoredMessage {
    head: Vec<u8>,
    offset: u64,
    length: u32,
}

impl Archive {
    pub(super) fn find(
        &self,
        node: NodeSlot,
        id: RequestId,
    ) -> Result<Option<Found>, ArchiveError> {
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
                // The record may be in another object.
                Err(error) if error.is_refusal() => refused = Some(error),
                result => return result,
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
        objects.sort_unstable_by_key(|object| std::cmp::Reverse((object.last, object.first)));
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
        let found = Segment::read(&content).and_then(|segment| {
            let mut unpacker = Unpacker::new()?;
            segment.find(id, second, &mut unpacker, |segment, block, index| {
                read_row(object, segment, block, index)
            })
        });
        found.map_err(|error| self.damaged(object, error))
    }

    pub(super) fn body_of(
        &self,
        found: &Found,
        side: Side,
    ) -> Result<Option<BodyView>, ArchiveError> {
        let message = match side {
            Side::Request => &found.request,
            Side::Response => &found.response,
        };
        let Some(message) = message else {
            return Ok(None);
        };
        let head = Head::read(&message.head).map_err(|error| self.damaged(&found.object, error))?;
        let Some(bytes) = self.bytes_of(&found.object, message, &head)? else {
            return Ok(None);
        };
        Ok(Some(BodyView {
            content_type: head.header(&header::CONTENT_TYPE),
            content_encoding: head.header(&header::CONTENT_ENCODING),
            truncated: head.truncated,
            truncated_by: head.truncated_by,
            bytes,
        }))
    }

    pub(super) fn captured_of(&self, found: Found) -> Result<CapturedRequest, ArchiveError> {
        let damaged = |error| self.damaged(&found.object, error);
        let mut request = None;
        if let Some(message) = &found.request {
            let head = Head::read(&message.head).map_err(damaged)?;
            let headers = head.header_map().map_err(damaged)?;
            let truncated = head.truncated;
            let truncated_by = head.truncated_by;
            if let Some(bytes) = self.bytes_of(&found.object, message, &head)? {
                let body = BodyCapture {
                    bytes: Bytes::from(bytes),
                    truncated,
                    truncated_by,
                };
                request = Some(MessageCapture { headers, body });
            }
        }
        let method = Method::from_bytes(found.view.method.as_bytes());
        let method = method.map_err(|_| damaged(LogError::Damaged("a method")))?;
        Ok(CapturedRequest {
            view: found.view,
            method,
            target: found.target,
            request,
        })
    }

    /// Reads the body of a message. `None` if it has expired.
    fn bytes_of(
        &self,
        object: &ObjectName,
        message: &StoredMessage,
        head: &Head<'_>,
    ) -> Result<Option<Vec<u8>>, ArchiveError> {
        let stored = if message.length == 0 {
            Some(Vec::new())
        } else {
            let end = message.offset.saturating_add(message.length.into());
            self.stored_body(object, message.offset..end)?
        };
        stored
            .map(|stored| {
                head.body(stored)
                    .map_err(|error| self.damaged(object, error))
            })
            .transpose()
    }
}

fn read_row(
    object: &ObjectName,
    segment: &Segment<'_>,
    block: &DecodedBlock<'_>,
    index: usize,
) -> Result<Found, LogError> {
    let (service, row) = block
        .rows
        .get(index)
        .ok_or(LogError::Damaged("a row is missing"))?;
    let mut view = block.view(row, segment.label(*service)?);
    let message = |side| row.capture.and_then(|key| segment.message(key, side));
    let request = message(Side::Request);
    let response = message(Side::Response);
    (view.captured_request, view.captured_response) =
        (captured_view(request)?, captured_view(response)?);
    let stored = |message: Message<'_>| StoredMessage {
        head: message.head.to_vec(),
        offset: message.offset,
        length: message.length,
    };
    Ok(Found {
        view,
        target: row.target.as_ref().to_owned(),
        object: object.clone(),
        request: request.map(stored),
        response: response.map(stored),
    })
}

pub(super) fn captured_view(
    message: Option<Message<'_>>,
) -> Result<Option<CapturedView>, LogError> {
    message
        .map(|message| Ok(Head::read(message.head)?.view()))
        .transpose()
}
