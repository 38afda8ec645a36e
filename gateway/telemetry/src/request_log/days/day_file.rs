//! One day of the log: a SQLite file in WAL mode, written by one process or, during an upgrade, by
//! two.
//!
//! Committed records survive a crash of the process. A crash of the machine loses records since the
//! last checkpoint (see [`DayFile::checkpoint`]).

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use gw_base::sqlite_file::{FileKind, SqliteOpenError};
use gw_shared::telemetry::mask::Masker;
use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};
use serde::{Deserialize, Serialize};
use zstd::bulk::Compressor;

use super::day::Day;
use super::shares::Shares;
use crate::request_log::LogError;
use crate::request_log::block::{Encoder, SLOT_MS};
use crate::request_log::captures::capture;
use crate::request_log::captures::capture::StoredMessage;
use crate::request_log::record::{Capture, MessageCapture, RequestRecord, account_and_service};
use crate::request_log::zone_map::ZoneMap;

/// Bits of the block's number in a key. A key is service · second of the day · number.
const NUMBER_BITS: u32 = 26;
const LAST_NUMBER: i64 = (1 << NUMBER_BITS) - 1;
const SECOND_BITS: u32 = 17;
/// Number that stands for all services without blocks of their own. It is above the numbers of
/// services: appending at the end of the table leaves full pages behind.
pub(crate) const MIXED: i64 = SERVICES_MAX - 1;
/// Records of one second and commit from which a service has a block of its own.
const OWN_BLOCK_FROM: usize = 64;
const MINUTE_BITS: u32 = 11;
/// Most keys in [`DayFile::present`]. Then the set is cleared, and its rows are inserted once more.
const PRESENT_MAX: usize = 100_000;
/// Exclusive limit of service numbers, given by the bits of the key.
const SERVICES_MAX: i64 = 1 << (63 - NUMBER_BITS - SECOND_BITS);

/// Tables of a day's file.
/// - `arrival`: one row for the records of one second in one commit, with the list of blocks and
///   the last four bytes of each record's id in the order of the blocks.
/// - `block`: encoded records. A service with many records of the second in the commit has a block
///   of its own, all others share one: with a thousand services, a row for each costs ten times as
///   much as its records.
/// - `present`: minutes in which a service has records.
/// - `capture`: captured messages.
const DAY_FILE: FileKind = FileKind {
    migrations: &["
    CREATE TABLE service (number INTEGER PRIMARY KEY, label TEXT NOT NULL UNIQUE) STRICT;
    CREATE TABLE block (
        key INTEGER PRIMARY KEY, zone INTEGER NOT NULL, longest_us INTEGER NOT NULL,
        data BLOB NOT NULL
    ) STRICT;
    CREATE TABLE arrival (
        key INTEGER PRIMARY KEY, zone INTEGER NOT NULL, longest_us INTEGER NOT NULL,
        blocks BLOB NOT NULL, fingerprints BLOB NOT NULL
    ) STRICT;
    CREATE TABLE present (key INTEGER PRIMARY KEY) STRICT;
    CREATE TABLE capture (
        key INTEGER PRIMARY KEY, request BLOB, response BLOB, request_body BLOB, response_body BLOB
    ) STRICT;
"],
    set_up: |connection| {
        connection.busy_timeout(BUSY)?;
        connection.pragma_update(None, "page_size", PAGE_BYTES)?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        connection.pragma_update(None, "cache_size", -CACHE_KIB)
    },
};
/// A day's file for all but its writer.
const READ_DAY_FILE: FileKind = FileKind {
    set_up: |connection| {
        connection.busy_timeout(BUSY)?;
        connection.pragma_update(None, "cache_size", -READER_CACHE_KIB)
    },
    ..DAY_FILE
};

/// Page size. A page holds several blocks of a gateway with little traffic.
const PAGE_BYTES: u32 = 8192;
/// Size at which the WAL is copied into the file. It is large, so that a page written by many
/// commits is copied once.
const WAL_BYTES: u64 = 64 * 1024 * 1024;
/// Part of the bound of the log at which it is copied before, if the bound is small.
const WAL_PART: u64 = 64;
/// Page cache of the writer and of each reader in KiB.
const CACHE_KIB: i32 = 8 * 1024;
const READER_CACHE_KIB: i32 = 4 * 1024;
/// Longest wait for another process's commit.
const BUSY: Duration = Duration::from_secs(2);

/// File of a day, open for writing.
pub(crate) struct DayFile {
    path: PathBuf,
    connection: Connection,
    day: Day,
    services: HashMap<Arc<str>, i64>,
    /// Keys known to be in the table `present`; not all of them.
    present: HashSet<i64>,
    pub(crate) shares: Shares,
    /// There may be records since the last checkpoint, of this process or of one that was killed.
    pub(crate) dirty: bool,
}

/// Record to write. A flush sorts its records by second and service.
#[derive(Clone, Copy)]
pub(crate) struct OrderedRecord<'a> {
    /// Second (Unix time) · index of the service in the flush.
    pub(crate) order: u64,
    pub(crate) label: &'a Arc<str>,
    pub(crate) record: &'a RequestRecord,
}

/// Block listed in a row of `arrival`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Arrived {
    /// Number of the service, or [`MIXED`].
    pub(crate) service: i64,
    number: u32,
    pub(crate) rows: u32,
}

/// Buffers and contexts reused by all flushes.
pub(crate) struct Tools {
    pub(crate) encoder: Encoder,
    pub(crate) compressor: Compressor<'static>,
    pub(crate) masker: Masker,
}

impl OrderedRecord<'_> {
    pub(crate) fn second(&self) -> u64 {
        self.order >> ORDER_SERVICE_BITS
    }

    /// The account whose share is used. Anyone can send requests that do not authenticate: they
    /// have a share of their own, under the empty name of the apex, and authenticated ones to the
    /// apex have another.
    pub(crate) fn account(&self) -> &str {
        match &self.record.by {
            Some(_) => account_and_service(self.label).0,
            None if self.record.at_apex => "@apex",
            None => "",
        }
    }
}

/// Bits of the service's index in [`OrderedRecord::order`].
pub(crate) const ORDER_SERVICE_BITS: u32 = 24;

impl Arrived {
    pub(crate) fn key(&self, second_of_day: i64) -> i64 {
        block_keys(self.service, second_of_day) + i64::from(self.number)
    }
}

/// First key of the blocks of a service in a second.
pub(crate) fn block_keys(service: i64, second_of_day: i64) -> i64 {
    (service << (SECOND_BITS + NUMBER_BITS)) + arrival_keys(second_of_day)
}

/// First key of the rows of `arrival` of a second.
pub(crate) fn arrival_keys(second_of_day: i64) -> i64 {
    second_of_day << NUMBER_BITS
}

/// Key in `present` of a service and a minute of the day.
pub(crate) fn present_key(service: i64, minute: i64) -> i64 {
    (service << MINUTE_BITS) + minute
}

pub(crate) fn minute_of_key(key: i64) -> i64 {
    key & ((1 << MINUTE_BITS) - 1)
}

pub(crate) fn second_of_key(key: i64) -> i64 {
    (key >> NUMBER_BITS) & ((1 << SECOND_BITS) - 1)
}

impl DayFile {
    /// Opens or creates the file of `day` (mode 0600), of a log that may take `most` bytes.
    pub(crate) fn open(folder: &Path, day: Day, most: u64) -> Result<Self, LogError> {
        let path = folder.join(day.file_name());
        let connection = DAY_FILE.open(&path)?;
        let wal = WAL_BYTES.min(most / WAL_PART);
        let pages = (wal / u64::from(PAGE_BYTES)).max(1);
        connection.pragma_update(None, "wal_autocheckpoint", pages.cast_signed())?;
        // The size to which it is truncated after a checkpoint, if readers let it grow beyond.
        connection.pragma_update(None, "journal_size_limit", (2 * wal).cast_signed())?;
        Ok(Self {
            shares: Shares::load(&connection)?,
            path,
            connection,
            day,
            services: HashMap::new(),
            present: HashSet::new(),
            dirty: true,
        })
    }

    /// Writes all `entries` or none. They are of this day and sorted.
    pub(crate) fn write(
        &mut self,
        entries: &[OrderedRecord<'_>],
        tools: &mut Tools,
    ) -> Result<(), LogError> {
        let Self {
            connection,
            day,
            services,
            present,
            shares,
            ..
        } = self;
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let before = size_of_file(&transaction)?;
        let mut new_services = Vec::new();
        let mut new_present = Vec::new();
        for arrival in entries.chunk_by(|a, b| a.second() == b.second()) {
            let second_ms = arrival[0].second() * SLOT_MS;
            let second = ((second_ms - day.start_ms()) / SLOT_MS) as i64;
            let mut own = Vec::new();
            let mut mixed = Vec::new();
            for entries in arrival.chunk_by(|a, b| a.order == b.order) {
                let label = entries[0].label;
                let service = match services.get(label) {
                    Some(service) => *service,
                    None => {
                        let service = service_number(&transaction, label)?;
                        new_services.push((Arc::clone(label), service));
                        service
                    }
                };
                let key = present_key(service, second / 60);
                if !present.contains(&key) {
                    transaction
                        .prepare_cached("INSERT OR IGNORE INTO present VALUES (?1)")?
                        .execute([key])?;
                    new_present.push(key);
                }
                if entries.len() >= OWN_BLOCK_FROM {
                    &mut own
                } else {
                    &mut mixed
                }
                .push((service, entries));
            }
            let mut arrived = Arrival {
                second,
                second_ms,
                ..Arrival::default()
            };
            for (service, entries) in own {
                let records = [(service, entries)];
                arrived.write_blocks(&transaction, service, &records, tools, shares)?;
            }
            arrived.write_blocks(&transaction, MIXED, &mixed, tools, shares)?;
            arrived.write(&transaction)?;
        }
        let grown = size_of_file(&transaction)?.saturating_sub(before);
        shares.save(&transaction, grown)?;
        transaction.commit()?;
        self.services.extend(new_services);
        if self.present.len() > PRESENT_MAX {
            self.present.clear();
        }
        self.present.extend(new_present);
        self.dirty = true;
        Ok(())
    }

    /// Copies the WAL into the file and syncs it. Records written before now survive a crash of the
    /// machine.
    pub(crate) fn checkpoint(&mut self) -> Result<(), LogError> {
        self.connection
            .query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()))?;
        self.dirty = false;
        Ok(())
    }

    /// Whether the file still exists: it may have been removed from outside.
    pub(crate) fn is_there(&self) -> bool {
        self.path.exists()
    }
}

/// Records of one second in one commit.
#[derive(Default)]
struct Arrival {
    /// Second of the day.
    second: i64,
    /// Unix time.
    second_ms: u64,
    zone_map: ZoneMap,
    blocks: Vec<Arrived>,
    fingerprints: Vec<u8>,
}

impl Arrival {
    /// Writes `records`, which are grouped by the number of their service, into as many blocks as
    /// needed, with keys of `service`.
    fn write_blocks(
        &mut self,
        connection: &Connection,
        service: i64,
        records: &[(i64, &[OrderedRecord<'_>])],
        tools: &mut Tools,
        shares: &mut Shares,
    ) -> Result<(), LogError> {
        let records = records
            .iter()
            .flat_map(|(service, entries)| entries.iter().map(|entry| (*service, entry)));
        let mut records = records.peekable();
        while records.peek().is_some() {
            let mut builder = tools.encoder.begin(self.second_ms);
            let mut rows = 0;
            while !builder.is_full()
                && let Some((service, entry)) = records.next()
            {
                let record = entry.record;
                let capture = record.capture.as_deref();
                let capture = capture.map(|capture| {
                    let admit = |bytes| shares.admit_capture(entry.account(), bytes);
                    let compressor = &mut tools.compressor;
                    write_capture(connection, capture, &tools.masker, compressor, admit)
                });
                builder.add(service, record, capture.transpose()?, &tools.masker)?;
                self.fingerprints
                    .extend_from_slice(&fingerprint(record.id.as_bytes()));
                rows += 1;
            }
            let (data, zone_map) = builder.finish()?;
            self.zone_map.merge(zone_map);
            let first = block_keys(service, self.second);
            let mut insert = connection.prepare_cached(
                "INSERT INTO block VALUES ((SELECT coalesce(max(key) + 1, ?1) FROM block
                 WHERE key BETWEEN ?1 AND ?2), ?3, ?4, ?5)",
            )?;
            let last = first + LAST_NUMBER;
            let [bits, longest_us] = zone_map.columns();
            let key = insert.insert(params![first, last, bits, longest_us, data])?;
            self.blocks.push(Arrived {
                service,
                number: (key - first) as u32,
                rows,
            });
        }
        Ok(())
    }

    fn write(self, connection: &Connection) -> Result<(), LogError> {
        let blocks = postcard::to_allocvec(&self.blocks)
            .map_err(|_| LogError::Encode("the list of blocks"))?;
        let first = arrival_keys(self.second);
        let [bits, longest_us] = self.zone_map.columns();
        let mut insert = connection.prepare_cached(
            "INSERT INTO arrival VALUES ((SELECT coalesce(max(key) + 1, ?1) FROM arrival
             WHERE key BETWEEN ?1 AND ?2), ?3, ?4, ?5, ?6)",
        )?;
        insert.execute(params![
            first,
            first + LAST_NUMBER,
            bits,
            longest_us,
            blocks,
            self.fingerprints
        ])?;
        Ok(())
    }
}

/// Size of the file with the changes of this transaction.
fn size_of_file(connection: &Connection) -> Result<u64, LogError> {
    let pages = connection.pragma_query_value(None, "page_count", |row| row.get::<_, u32>(0))?;
    Ok(u64::from(pages) * u64::from(PAGE_BYTES))
}

/// Writes captured messages, or marks if `admit` refuses their bytes. Returns their key.
fn write_capture(
    connection: &Connection,
    capture: &Capture,
    masker: &Masker,
    compressor: &mut Compressor<'static>,
    admit: impl FnOnce(u64) -> bool,
) -> Result<i64, LogError> {
    let mut pack = |message: &MessageCapture| capture::pack(message, masker, compressor);
    let mut request = capture.request.as_ref().map(&mut pack).transpose()?;
    let mut response = capture.response.as_ref().map(&mut pack).transpose()?;
    let messages = || [&request, &response].into_iter().flatten();
    let bytes: usize = messages()
        .map(|message| message.head.len() + message.body.len())
        .sum();
    if !admit(bytes as u64) {
        for message in [&mut request, &mut response].into_iter().flatten() {
            *message = pack(&MessageCapture::without_room())?;
        }
    }
    let columns = |message: Option<StoredMessage>| {
        message
            .map(|StoredMessage { head, body }| (head, body))
            .unzip()
    };
    let (request, request_body): (Option<Vec<u8>>, Option<Vec<u8>>) = columns(request);
    let (response, response_body): (Option<Vec<u8>>, Option<Vec<u8>>) = columns(response);
    let mut insert =
        connection.prepare_cached("INSERT INTO capture VALUES (NULL, ?1, ?2, ?3, ?4)")?;
    Ok(insert.insert(params![request, response, request_body, response_body])?)
}

/// Returns the number of a service in this file. Assigns one if it has none.
fn service_number(connection: &Connection, label: &str) -> Result<i64, LogError> {
    if let Some(number) = find_service(connection, label)? {
        return Ok(number);
    }
    connection
        .prepare_cached("INSERT INTO service (label) VALUES (?1)")?
        .execute([label])?;
    let number = connection.last_insert_rowid();
    if number < MIXED {
        Ok(number)
    } else {
        Err(LogError::Encode("too many services in one day"))
    }
}

pub(crate) fn find_service(connection: &Connection, label: &str) -> Result<Option<i64>, LogError> {
    let mut select = connection.prepare_cached("SELECT number FROM service WHERE label = ?1")?;
    Ok(select.query_row([label], |row| row.get(0)).optional()?)
}

/// Returns the bytes of an id that `arrival` keeps to find it: 22 random bits and the slot of the
/// node.
pub(crate) fn fingerprint(id: &[u8; 16]) -> [u8; 4] {
    [id[12], id[13], id[14], id[15]]
}

/// Opens the file of `day` for reading; `None` if it does not exist or has no tables yet.
pub(crate) fn open_for_reading(folder: &Path, day: Day) -> Result<Option<Connection>, LogError> {
    let Some(connection) = open_to_change(folder, day)? else {
        return Ok(None);
    };
    connection.pragma_update(None, "query_only", true)?;
    Ok(Some(connection))
}

/// As [`open_for_reading`], and allows changes.
pub(crate) fn open_to_change(folder: &Path, day: Day) -> Result<Option<Connection>, LogError> {
    let path = folder.join(day.file_name());
    if !path.try_exists()? {
        return Ok(None);
    }
    match READ_DAY_FILE.open_unmigrated(&path) {
        Err(SqliteOpenError::OlderSchema { found: 0, .. }) => Ok(None),
        opened => Ok(Some(opened?)),
    }
}

/// Renames a damaged file together with its WAL and shared-memory files. Returns the new name.
pub(crate) fn set_aside(folder: &Path, day: Day) -> Result<String, LogError> {
    let name = day.file_name();
    let mut names = (0u32..).map(|n| {
        if n == 0 {
            format!("{name}.corrupt")
        } else {
            format!("{name}.corrupt{n}")
        }
    });
    let new_name = names
        .find(|name| !folder.join(name).exists())
        .unwrap_or_default();
    for suffix in ["", "-wal", "-shm"] {
        match fs::rename(
            folder.join(format!("{name}{suffix}")),
            folder.join(format!("{new_name}{suffix}")),
        ) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    Ok(new_name)
}
