//! Loads all records in one snapshot, and verifies them.

use crate::limits;
use futures_util::TryStreamExt;
use tokio_postgres::{Row, Transaction};

use super::super::{Position, Records, Revision, Sealer, Snapshot, StoreError, StoredRecord};
use super::authenticity::{Authenticator, RecordSet, RefusedRows, SetMember, forged_set, is_tag};
use super::column;

/// Reads all records with their position, and verifies them. The inner error is about what was
/// read.
pub(super) async fn read_all(
    transaction: &Transaction<'_>,
    sealer: &Sealer,
    authenticator: &Authenticator,
) -> Result<Result<(Snapshot, RecordSet), StoreError>, tokio_postgres::Error> {
    const RECENT: &str = "
        SELECT revision, change_id::text, steps, tag FROM gw.changes
        WHERE revision <= $1 ORDER BY revision DESC LIMIT $2";
    const REGION: &str =
        "SELECT id::text, revision, coalesce(last_change::text, ''), tag FROM gw.region";
    let region = transaction.query_one(REGION, &[]).await?;
    let mut read = match AuthenticRecords::at(&region, sealer, authenticator) {
        Ok(read) => read,
        Err(error) => return Ok(Err(error)),
    };
    let rows = transaction
        .query_raw("SELECT kind, id, document, tag FROM gw.records", [0i64; 0])
        .await?;
    let mut rows = std::pin::pin!(rows);
    while let Some(row) = rows.try_next().await? {
        if let Err(error) = read.add(&row) {
            return Ok(Err(error));
        }
    }
    for row in transaction
        .query("SELECT name, sealed FROM gw.secrets", &[])
        .await?
    {
        if let Err(error) = read.add_secret(&row) {
            return Ok(Err(error));
        }
    }
    let newest = read.position.revision.0;
    let most = limits::RECENT_CHANGES as i64;
    let recent = transaction.query(RECENT, &[&newest, &most]).await?;
    Ok(read.finish(&region, &recent))
}

/// Records that are read and verified, one row after the other.
struct AuthenticRecords<'a> {
    sealer: &'a Sealer,
    authenticator: &'a Authenticator,
    position: Position,
    records: Records,
    set: RecordSet,
    refused: RefusedRows,
}

impl<'a> AuthenticRecords<'a> {
    /// Begins with the row of the region.
    fn at(
        region: &Row,
        sealer: &'a Sealer,
        authenticator: &'a Authenticator,
    ) -> Result<Self, StoreError> {
        let position = read_position(region)?;
        let set = RecordSet::at(position.clone());
        Ok(Self {
            sealer,
            authenticator,
            position,
            records: Records::default(),
            set,
            refused: RefusedRows::default(),
        })
    }

    fn add(&mut self, row: &Row) -> Result<(), StoreError> {
        let kind: &str = column(row, 0)?;
        let id: &str = column(row, 1)?;
        let document: &str = column(row, 2)?;
        let (tag, element) = self
            .authenticator
            .record(&self.position.origin, kind, id, document);
        if !is_tag(&tag, column(row, 3)?) {
            self.refused.add(kind, id);
            return Ok(());
        }
        let record = self
            .sealer
            .open_record(StoredRecord::read(kind, document)?)?;
        self.set.add(SetMember::Record(record.id()), element);
        self.records.put(record);
        Ok(())
    }

    fn add_secret(&mut self, row: &Row) -> Result<(), StoreError> {
        let name: &str = column(row, 0)?;
        let sealed: &str = column(row, 1)?;
        let element = self
            .authenticator
            .secret(&self.position.origin, name, sealed);
        self.set.add(SetMember::Secret(name.to_owned()), element);
        Ok(())
    }

    /// Verifies that no record is missing. `recent` are the last changes, the newest first.
    fn finish(self, region: &Row, recent: &[Row]) -> Result<(Snapshot, RecordSet), StoreError> {
        let Self {
            position,
            mut records,
            set,
            refused,
            authenticator,
            ..
        } = self;
        refused.check()?;
        if !is_tag(
            &self.authenticator.region(&position, set.sum()),
            column(region, 3)?,
        ) {
            return Err(forged_set(position.revision));
        }
        let recent = history(authenticator, &position, recent)?;
        records.compact();
        Ok((
            Snapshot {
                position,
                records,
                recent,
            },
            set,
        ))
    }
}

/// The positions before `newest`, and itself, the oldest first. Each change names the one before it
/// by its tag, so rows that no gateway wrote end the history.
fn history(
    authenticator: &Authenticator,
    newest: &Position,
    changes: &[Row],
) -> Result<Vec<Position>, StoreError> {
    let mut history = vec![newest.clone()];
    let mut at = newest.clone();
    for (row, earlier) in changes.iter().zip(changes.iter().skip(1)) {
        let revision: i64 = column(row, 0)?;
        let change: &str = column(row, 1)?;
        let before = Position {
            origin: at.origin.clone(),
            revision: Revision(column(earlier, 0)?),
            change: column(earlier, 1)?,
        };
        let tag = authenticator.change(&before, &at, column(row, 2)?);
        let is_genuine =
            (revision, change) == (at.revision.0, &at.change) && is_tag(&tag, column(row, 3)?);
        if !is_genuine || before.revision.0 + 1 != revision {
            break;
        }
        history.push(before.clone());
        at = before;
    }
    history.reverse();
    Ok(history)
}

/// Reads a row that begins with id, revision and last change of the region.
pub(super) fn read_position(row: &Row) -> Result<Position, StoreError> {
    Ok(Position {
        origin: column(row, 0)?,
        revision: Revision(column(row, 1)?),
        change: column(row, 2)?,
    })
}
