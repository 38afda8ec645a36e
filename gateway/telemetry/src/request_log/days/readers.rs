//! Files of days open for reading, and their pool. Opening a file takes a hundred times as long as
//! finding a record in it.

use std::borrow::Cow;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{fs, io};

use gw_shared::id::RequestId;
use rusqlite::{Connection, OptionalExtension};

use super::day::Day;
use super::day_file::{Arrived, arrival_keys, fingerprint, open_for_reading};
use crate::request_log::LogError;
use crate::request_log::block::{SLOT_MS, Unpacker};
use crate::request_log::captures::capture;
use crate::request_log::captures::capture::StoredMessage;
use crate::request_log::names::NamesNow;
use crate::request_log::search::lookup::{Found, References};
use crate::request_log::view::{CapturedView, Side};

/// Most idle open files, each with a cache of 4 MiB: one for each day kept.
const IDLE_MAX: usize = 9;

pub(crate) struct Readers {
    folder: PathBuf,
    idle: Mutex<Vec<OpenDay>>,
}

/// Open file of a day. Returned to the pool unless reading failed.
struct OpenDay {
    reader: Reader,
    day: Day,
    /// Device and inode, which detect that the file was replaced.
    file: (u64, u64),
}

/// File of a day, open for reading.
pub(crate) struct Reader {
    pub(crate) connection: Connection,
    pub(crate) unpacker: Unpacker,
}

impl Readers {
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            idle: Mutex::default(),
        }
    }

    /// Reads the file of `day` with `read`; `None` if there is no file, or if it expires meanwhile.
    /// Closes idle files of days that are not in `kept`.
    pub(crate) fn read<T>(
        &self,
        day: Day,
        kept: &RangeInclusive<Day>,
        read: impl FnOnce(&mut Reader) -> Result<T, LogError>,
    ) -> Result<Option<T>, LogError> {
        let value = self.take(day).and_then(|open| {
            let Some(mut open) = open else {
                return Ok(None);
            };
            let value = read(&mut open.reader)?;
            self.put(open, kept);
            Ok(Some(value))
        });
        match value {
            Err(_) if !self.folder.join(day.file_name()).exists() => Ok(None),
            value => value,
        }
    }

    /// Takes or opens the file of `day`; `None` if it does not exist or has no tables yet.
    fn take(&self, day: Day) -> Result<Option<OpenDay>, LogError> {
        let file = match fs::metadata(self.folder.join(day.file_name())) {
            Ok(metadata) => (metadata.dev(), metadata.ino()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = idle
            .iter()
            .position(|open| open.day == day && open.file == file)
        {
            return Ok(Some(idle.swap_remove(found)));
        }
        drop(idle);
        Ok(Reader::open(&self.folder, day)?.map(|reader| OpenDay { reader, day, file }))
    }

    fn put(&self, open: OpenDay, kept: &RangeInclusive<Day>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|open| kept.contains(&open.day));
        if idle.len() < IDLE_MAX {
            idle.push(open);
        }
    }
}

impl Reader {
    /// Opens the file of `day`; `None` if it does not exist or has no tables yet.
    fn open(folder: &Path, day: Day) -> Result<Option<Self>, LogError> {
        let Some(connection) = open_for_reading(folder, day)? else {
            return Ok(None);
        };
        Ok(Some(Self {
            connection,
            unpacker: Unpacker::new()?,
        }))
    }

    /// Finds a record: the arrivals of its second by their fingerprints, then its block.
    pub(crate) fn find(
        &mut self,
        id: RequestId,
        names: &NamesNow,
    ) -> Result<Option<Found>, LogError> {
        let second = ((id.unix_ms() - Day::of_ms(id.unix_ms()).start_ms()) / SLOT_MS) as i64;
        let wanted = fingerprint(id.as_bytes());
        let Self {
            connection,
            unpacker,
        } = self;
        let mut arrivals = connection.prepare_cached(
            "SELECT blocks, fingerprints FROM arrival WHERE key >= ?1 AND key < ?2 ORDER BY key",
        )?;
        let mut select_block =
            connection.prepare_cached("SELECT data FROM block WHERE key = ?1")?;
        let mut rows = arrivals.query([arrival_keys(second), arrival_keys(second + 1)])?;
        while let Some(row) = rows.next()? {
            let fingerprints = row.get_ref(1)?.as_blob().map_err(rusqlite::Error::from)?;
            let positions = fingerprints.chunks_exact(4).enumerate();
            for (position, _) in
                positions.filter(|(_, fingerprint)| *fingerprint == wanted.as_slice())
            {
                let blocks = row.get_ref(0)?.as_blob().map_err(rusqlite::Error::from)?;
                let arrived = block_at(&read_arrived(blocks)?, position)
                    .ok_or(LogError::Damaged("the list of a second's blocks"))?;
                let data = select_block.query_row([arrived.key(second)], |row| {
                    Ok(unpacker.unpack(row.get_ref(0)?.as_blob()?))
                });
                let block = data
                    .optional()?
                    .ok_or(LogError::Damaged("a block is missing"))??;
                let found = Found::in_block(&block, id, connection, names)?;
                if found.is_some() {
                    return Ok(found);
                }
            }
        }
        Ok(None)
    }

    /// Reads a captured message.
    pub(crate) fn message(&self, key: i64, side: Side) -> Result<Option<StoredMessage>, LogError> {
        let select = match side {
            Side::Request => {
                "SELECT request, request_body FROM capture WHERE key = ?1 AND request IS NOT NULL"
            }
            Side::Response => {
                "SELECT response, response_body FROM capture WHERE key = ?1 AND response IS NOT \
                 NULL"
            }
        };
        let mut select = self.connection.prepare_cached(select)?;
        Ok(select
            .query_row([key], |row| {
                Ok(StoredMessage {
                    head: row.get(0)?,
                    body: row.get(1)?,
                })
            })
            .optional()?)
    }
}

impl References for Connection {
    fn label(&self, service: i64) -> Result<Cow<'_, str>, LogError> {
        let mut select = self.prepare_cached("SELECT label FROM service WHERE number = ?1")?;
        let label: Option<String> = select.query_row([service], |row| row.get(0)).optional()?;
        label
            .map(Cow::Owned)
            .ok_or(LogError::Damaged("a service is missing"))
    }

    fn captured(&self, key: i64) -> Result<(Option<CapturedView>, Option<CapturedView>), LogError> {
        let mut select =
            self.prepare_cached("SELECT request, response FROM capture WHERE key = ?1")?;
        let heads: Option<[Option<Vec<u8>>; 2]> = select
            .query_row([key], |row| Ok([row.get(0)?, row.get(1)?]))
            .optional()?;
        let view = |head: Option<Vec<u8>>| head.map(|head| capture::view(&head)).transpose();
        let [request, response] = heads.unwrap_or_default();
        Ok((view(request)?, view(response)?))
    }
}

pub(crate) fn read_arrived(column: &[u8]) -> Result<Vec<Arrived>, LogError> {
    postcard::from_bytes(column).map_err(|_| LogError::Damaged("the list of a second's blocks"))
}

/// Returns the block with the record at `position` in all `blocks`.
fn block_at(blocks: &[Arrived], position: usize) -> Option<Arrived> {
    let mut rest = position;
    for block in blocks {
        match rest.checked_sub(block.rows as usize) {
            Some(behind) => rest = behind,
            None => return Some(*block),
        }
    }
    None
}
