//! Finds one request by its id: the file of its day, the arrivals of its second, then its block.

use std::path::Path;

use gw_shared::id::RequestId;
use http::{Method, header};
use rusqlite::{Connection, OptionalExtension};

use super::block::{DecodedBlock, SLOT_MS, Unpacker};
use super::capture::Head;
use super::day::Day;
use super::day_file::{Arrived, arrival_keys, fingerprint, open_for_reading};
use super::record::{BodyCapture, MessageCapture};
use super::view::{BodyView, CapturedView, RequestView, Side};
use super::{CapturedRequest, LogError};

/// File of a day, open for reading.
pub(super) struct Reader {
    pub(super) connection: Connection,
    pub(super) unpacker: Unpacker,
}

/// Record found by its id.
pub(super) struct Found {
    pub(super) view: RequestView,
    /// Request target: path and query.
    pub(super) target: String,
    /// Key of the captured messages.
    pub(super) capture: Option<i64>,
}

impl Reader {
    /// Opens the file of `day`; `None` if it does not exist or has no tables yet.
    pub(super) fn open(folder: &Path, day: Day) -> Result<Option<Self>, LogError> {
        let Some(connection) = open_for_reading(folder, day)? else {
            return Ok(None);
        };
        Ok(Some(Self {
            connection,
            unpacker: Unpacker::new()?,
        }))
    }

    pub(super) fn find(&mut self, id: RequestId) -> Result<Option<Found>, LogError> {
        let second = ((id.unix_ms() - Day::of_ms(id.unix_ms()).start_ms()) / SLOT_MS) as i64;
        let wanted = fingerprint(id.as_bytes());
        let Self {
            connection,
            unpacker,
        } = self;
        let mut arrivals = connection.prepare_cached(
            "SELECT blocks, fingerprints FROM arrival WHERE key >= ?1 AND key < ?2 ORDER BY key",
        )?;
        let mut rows = arrivals.query([arrival_keys(second), arrival_keys(second + 1)])?;
        while let Some(row) = rows.next()? {
            let fingerprints = row.get_ref(1)?.as_blob().map_err(rusqlite::Error::from)?;
            let positions = fingerprints.chunks_exact(4).enumerate();
            for (position, _) in
                positions.filter(|(_, fingerprint)| *fingerprint == wanted.as_slice())
            {
                let blocks = row.get_ref(0)?.as_blob().map_err(rusqlite::Error::from)?;
                let Some((arrived, index)) = locate(&read_arrived(blocks)?, position) else {
                    return Err(LogError::Damaged("the list of a second's blocks"));
                };
                if let Some(found) = read_row(connection, unpacker, id, (arrived, second), index)? {
                    return Ok(Some(found));
                }
            }
        }
        Ok(None)
    }

    pub(super) fn body(&self, key: i64, side: Side) -> Result<Option<BodyView>, LogError> {
        let Some(Columns { head, body }) = self.message(key, side)? else {
            return Ok(None);
        };
        let head = Head::read(&head)?;
        Ok(Some(BodyView {
            content_type: head.header(&header::CONTENT_TYPE),
            content_encoding: head.header(&header::CONTENT_ENCODING),
            truncated: head.truncated,
            truncated_by: head.truncated_by,
            bytes: head.body(body)?,
        }))
    }

    /// Reads the captured request of `found`.
    pub(super) fn captured_request(&self, found: Found) -> Result<CapturedRequest, LogError> {
        let columns = found
            .capture
            .map(|key| self.message(key, Side::Request))
            .transpose()?
            .flatten();
        let request = columns.map(|Columns { head, body }| {
            let head = Head::read(&head)?;
            let truncated = head.truncated;
            let truncated_by = head.truncated_by;
            let body = BodyCapture {
                bytes: head.body(body)?.into(),
                truncated,
                truncated_by,
            };
            Ok::<_, LogError>(MessageCapture {
                headers: head.header_map()?,
                body,
            })
        });
        let method = Method::from_bytes(found.view.method.as_bytes())
            .map_err(|_| LogError::Damaged("a method"))?;
        Ok(CapturedRequest {
            view: found.view,
            method,
            target: found.target,
            request: request.transpose()?,
        })
    }

    /// Reads the stored columns of one message.
    fn message(&self, key: i64, side: Side) -> Result<Option<Columns>, LogError> {
        let select = match side {
            Side::Request => {
                "SELECT request, request_body FROM capture WHERE key = ?1 AND request IS NOT NULL"
            }
            Side::Response => {
                "SELECT response, response_body FROM capture WHERE key = ?1 AND response IS NOT NULL"
            }
        };
        let mut select = self.connection.prepare_cached(select)?;
        Ok(select
            .query_row([key], |row| {
                Ok(Columns {
                    head: row.get(0)?,
                    body: row.get(1)?,
                })
            })
            .optional()?)
    }
}

/// Captured message as encoded by [`super::capture::pack`].
struct Columns {
    head: Vec<u8>,
    body: Vec<u8>,
}

/// Reads the heads of the captured request and response.
pub(super) fn captured(
    connection: &Connection,
    key: i64,
) -> Result<(Option<CapturedView>, Option<CapturedView>), LogError> {
    let mut select =
        connection.prepare_cached("SELECT request, response FROM capture WHERE key = ?1")?;
    let view = |head: Option<Vec<u8>>| {
        head.map(|head| Ok::<_, LogError>(Head::read(&head)?.view()))
            .transpose()
    };
    match select
        .query_row([key], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?
    {
        Some((request, response)) => Ok((view(request)?, view(response)?)),
        None => Ok((None, None)),
    }
}

pub(super) fn read_arrived(column: &[u8]) -> Result<Vec<Arrived>, LogError> {
    postcard::from_bytes(column).map_err(|_| LogError::Damaged("the list of a second's blocks"))
}

/// Returns the block and the row within it of the record at `position` in all `blocks`.
fn locate(blocks: &[Arrived], position: usize) -> Option<(Arrived, usize)> {
    let mut rest = position;
    for block in blocks {
        match rest.checked_sub(block.rows as usize) {
            Some(behind) => rest = behind,
            None => return Some((*block, rest)),
        }
    }
    None
}

/// Reads the record at `index` of a block; `None` if it has another id than `id`.
fn read_row(
    connection: &Connection,
    unpacker: &mut Unpacker,
    id: RequestId,
    (arrived, second): (Arrived, i64),
    index: usize,
) -> Result<Option<Found>, LogError> {
    let mut select = connection.prepare_cached("SELECT data FROM block WHERE key = ?1")?;
    let data = select.query_row([arrived.key(second)], |row| {
        Ok(unpacker.unpack(row.get_ref(0)?.as_blob()?))
    });
    let raw = data
        .optional()?
        .ok_or(LogError::Damaged("a block is missing"))??;
    let block = DecodedBlock::read(&raw, |_| true)?;
    let (service, row) = block
        .rows
        .get(index)
        .ok_or(LogError::Damaged("a row is missing"))?;
    if block.id(row) != *id.as_bytes() {
        return Ok(None);
    }
    let mut select = connection.prepare_cached("SELECT label FROM service WHERE number = ?1")?;
    let label: Option<String> = select.query_row([service], |row| row.get(0)).optional()?;
    let label = label.ok_or(LogError::Damaged("a service is missing"))?;
    let mut view = block.view(row, &label);
    if let Some(key) = row.capture {
        (view.captured_request, view.captured_response) = captured(connection, key)?;
    }
    Ok(Some(Found {
        view,
        target: row.target.as_ref().to_owned(),
        capture: row.capture,
    }))
}
