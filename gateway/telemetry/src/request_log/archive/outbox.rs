//! Which rows of a day's file are not archived yet. It is kept in the file itself, so that it is as
//! durable as the rows.
//!
//! - `archiving`: one row with the node's slot, the number of uploads, and the last row of the
//!   upload in progress.
//! - `unarchived`: keys of `arrival` in the order of commits, filled by a trigger.
//!
//! An upload claims a range of rows, writes them to the store and then removes them from the
//! outbox. After a crash the same range is uploaded once more, under the same names.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use gw_region::NodeSlot;
use rusqlite::{Connection, OptionalExtension, TransactionBehavior};

use super::super::LogError;
use super::super::block::{DecodedBlock, Unpacker};
use super::name::HOUR;
use super::segment::{Block, Draft};
use crate::request_log::captures::capture::{StoredCapture, StoredMessage};
use crate::request_log::days::day::Day;
use crate::request_log::days::day_file::{open_to_change, second_of_key};
use crate::request_log::days::readers::read_arrived;
use crate::request_log::search::lookup::References;

const TABLES: &str = "
    CREATE TABLE archiving (
        slot INTEGER NOT NULL, uploads INTEGER NOT NULL, claimed INTEGER
    ) STRICT;
    CREATE TABLE unarchived (
        number INTEGER PRIMARY KEY, arrival INTEGER NOT NULL, slot INTEGER NOT NULL
    ) STRICT;
    CREATE TRIGGER note_unarchived AFTER INSERT ON arrival BEGIN
        INSERT INTO unarchived (arrival, slot) SELECT new.key, slot FROM archiving;
    END;
";

/// Outbox of one day.
pub(super) struct Outbox {
    connection: Connection,
    unpacker: Unpacker,
}

/// Rows to upload.
pub(super) struct Claim {
    /// Node that recorded them.
    pub(super) slot: NodeSlot,
    /// Content of the objects by the hour of the day.
    pub(super) drafts: BTreeMap<u32, Draft>,
    /// Blocks that cannot be decoded and are left out.
    pub(super) damaged: u64,
    last: i64,
    upload: i64,
}

impl Outbox {
    /// Opens the outbox of `day`; `None` if the day has no file. Creates the tables, with all rows
    /// that the file has already. Rows written from now on are noted as of `slot`.
    pub(super) fn open(folder: &Path, day: Day, slot: NodeSlot) -> Result<Option<Self>, LogError> {
        let Some(mut connection) = open_to_change(folder, day)? else {
            return Ok(None);
        };
        // As the writer: no commit waits for the disk, and checkpoints are left to the writer. A
        // power cut may undo the end of an upload, which is then repeated.
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        connection.pragma_update(None, "wal_autocheckpoint", 0)?;
        let exists = "SELECT 1 FROM sqlite_schema WHERE name = 'archiving'";
        let known: Option<i64> = if connection
            .query_row(exists, [], |_| Ok(()))
            .optional()?
            .is_some()
        {
            connection
                .query_row("SELECT slot FROM archiving", [], |row| row.get(0))
                .optional()?
        } else {
            None
        };
        if known != Some(slot.get().into()) {
            let transaction =
                connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            // Another process may have made them since.
            if transaction
                .query_row(exists, [], |_| Ok(()))
                .optional()?
                .is_none()
            {
                transaction.execute_batch(TABLES)?;
                transaction.execute("INSERT INTO archiving VALUES (?1, 0, NULL)", [slot.get()])?;
                let fill = "INSERT INTO unarchived (arrival, slot) SELECT key, ?1 FROM arrival \
                            ORDER BY key";
                transaction.execute(fill, [slot.get()])?;
            } else {
                transaction.execute("UPDATE archiving SET slot = ?1", [slot.get()])?;
            }
            transaction.commit()?;
        }
        Ok(Some(Self {
            connection,
            unpacker: Unpacker::new()?,
        }))
    }

    /// Claims the next rows, with about `bytes` of content or one commit more. `None` if all are
    /// archived.
    pub(super) fn claim(&mut self, bytes: usize) -> Result<Option<Claim>, LogError> {
        let state = "SELECT uploads, claimed FROM archiving";
        let (upload, claimed): (i64, Option<i64>) =
            self.connection
                .query_row(state, [], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let Some(mut claim) = self.read(upload, claimed, bytes)? else {
            if let Some(claimed) = claimed {
                // Nothing is left of a claim.
                self.end_upload(upload, claimed)?;
            }
            return Ok(None);
        };
        if claimed.is_none() {
            let update = "UPDATE archiving SET claimed = ?1 WHERE uploads = ?2 AND claimed IS NULL";
            if self.connection.execute(update, [claim.last, upload])? == 0 {
                // Another process has claimed since.
                return self.claim(bytes);
            }
        }
        for draft in claim.drafts.values_mut() {
            self.add_captures(draft)?;
        }
        Ok(Some(claim))
    }

    /// Notes that `claim` was uploaded.
    pub(super) fn uploaded(&mut self, claim: &Claim) -> Result<(), LogError> {
        self.end_upload(claim.upload, claim.last)
    }

    fn end_upload(&mut self, upload: i64, last: i64) -> Result<(), LogError> {
        let transaction = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        let update =
            "UPDATE archiving SET uploads = uploads + 1, claimed = NULL WHERE uploads = ?1";
        // Another process may have uploaded the same rows.
        if transaction.execute(update, [upload])? > 0 {
            transaction.execute("DELETE FROM unarchived WHERE number <= ?1", [last])?;
        }
        Ok(transaction.commit()?)
    }

    /// Reads the rows up to `claimed`, or up to about `bytes` of content.
    fn read(
        &mut self,
        upload: i64,
        claimed: Option<i64>,
        bytes: usize,
    ) -> Result<Option<Claim>, LogError> {
        let mut select = self.connection.prepare_cached(
            "SELECT u.number, u.slot, a.key, a.blocks
             FROM unarchived u JOIN arrival a ON a.key = u.arrival
             WHERE u.number <= ?1 ORDER BY u.number",
        )?;
        let mut rows = select.query([claimed.unwrap_or(i64::MAX)])?;
        let mut claim: Option<Claim> = None;
        let mut size = 0;
        while let Some(row) = rows.next()? {
            let slot = u16::try_from(row.get::<_, i64>(1)?)
                .ok()
                .and_then(NodeSlot::new);
            let slot = slot.ok_or(LogError::Damaged("the slot of a row in the outbox"))?;
            let claim = claim.get_or_insert_with(|| Claim {
                slot,
                drafts: BTreeMap::new(),
                damaged: 0,
                last: 0,
                upload,
            });
            if claim.slot != slot || (claimed.is_none() && size >= bytes) {
                break;
            }
            claim.last = row.get(0)?;
            let key: i64 = row.get(2)?;
            let arrived = read_arrived(row.get_ref(3)?.as_blob().map_err(rusqlite::Error::from)?)?;
            let second = second_of_key(key);
            for block in arrived {
                size += add_block(
                    &self.connection,
                    &mut self.unpacker,
                    claim,
                    second,
                    block.key(second),
                )?;
            }
        }
        Ok(claim)
    }

    /// Reads the captured messages whose keys are in the draft.
    fn add_captures(&self, draft: &mut Draft) -> Result<(), LogError> {
        let mut select = self.connection.prepare_cached(
            "SELECT request, request_body, response, response_body FROM capture WHERE key = ?1",
        )?;
        for (key, capture) in &mut draft.captures {
            let message = |head: Option<Vec<u8>>, body: Option<Vec<u8>>| {
                head.map(|head| StoredMessage {
                    head,
                    body: body.unwrap_or_default(),
                })
            };
            let found = select
                .query_row([key], |row| {
                    Ok((
                        message(row.get(0)?, row.get(1)?),
                        message(row.get(2)?, row.get(3)?),
                    ))
                })
                .optional()?;
            if let Some((request, response)) = found {
                *capture = StoredCapture { request, response };
            }
        }
        Ok(())
    }
}

/// Adds a block to the draft of its hour, with the labels of its services and the keys of its
/// captures. Returns its size with that of the captured messages.
fn add_block(
    connection: &Connection,
    unpacker: &mut Unpacker,
    claim: &mut Claim,
    second: i64,
    key: i64,
) -> Result<usize, LogError> {
    let mut select =
        connection.prepare_cached("SELECT zone, longest_us, data FROM block WHERE key = ?1")?;
    let found = select
        .query_row([key], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get::<_, Vec<u8>>(2)?))
        })
        .optional()?;
    let (zone, longest_us, data) = found.ok_or(LogError::Damaged("a block is missing"))?;
    let second = second as u32;
    let raw = unpacker.unpack(&data);
    let decoded = raw
        .as_ref()
        .map_err(|_| ())
        .and_then(|raw| DecodedBlock::read(raw, |_| true).map_err(drop));
    let Ok(decoded) = decoded else {
        // Readers cannot decode it either.
        claim.damaged += 1;
        return Ok(0);
    };
    let draft = claim.drafts.entry(second / HOUR).or_default();
    let mut size = data.len();
    let mut length = connection.prepare_cached(
        "SELECT coalesce(length(request) + length(request_body), 0)
            + coalesce(length(response) + length(response_body), 0)
         FROM capture WHERE key = ?1",
    )?;
    let services: BTreeSet<i64> = decoded.rows.iter().map(|(service, _)| *service).collect();
    for service in services {
        if let Entry::Vacant(vacant) = draft.services.entry(service) {
            vacant.insert(connection.label(service)?.into_owned());
        }
    }
    for capture in decoded.rows.iter().filter_map(|(_, row)| row.capture) {
        size += length
            .query_row([capture], |row| row.get::<_, i64>(0))
            .optional()?
            .unwrap_or(0) as usize;
        draft.captures.insert(capture, StoredCapture::default());
    }
    draft.blocks.push(Block {
        second,
        zone,
        longest_us,
        data: data.into(),
    });
    Ok(size)
}
