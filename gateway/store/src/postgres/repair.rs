//! Writes the records that a node knows back into a database that was changed by something other
//! than a gateway.

use tokio_postgres::types::ToSql;

use super::super::{AuditEntry, History, Position, Records, Revision, Snapshot, Store, StoreError};
use super::authenticity::RecordSet;
use super::connection::engine::SqlSession;
use super::fill::{NamedSecret, TRANSFER, insert_secrets};
use super::steps::RecordColumns;
use super::{PostgresStore, column};

const REPLACE: &str = "
    WITH repaired AS (
        UPDATE gw.region SET revision = $1, last_change = $2::text::uuid, tag = $3
        WHERE revision = $4 AND key_check = $6
        RETURNING revision
    ), emptied AS (DELETE FROM gw.records USING repaired),
    forgotten AS (DELETE FROM gw.changes USING repaired),
    dropped AS (DELETE FROM gw.secrets USING repaired),
    false_entries AS (DELETE FROM gw.audit USING repaired WHERE number > $5)
    SELECT revision FROM repaired";

/// Revisions that a region can have reached since a copy of its records: numbers of changes are one
/// apart.
const NUMBERS: i64 = 1 << 40;

impl PostgresStore {
    /// Replaces all records with those of `snapshot` and the authentic changes after it, and the
    /// shared secrets with `secrets`, as a change of its own. Refuses if the database is authentic,
    /// or if changes after `snapshot` are not in it any more, unless they may be discarded. Returns
    /// the position of the records that were written, and the one after the change.
    /// [`StoreError::Unavailable`] means that the outcome is unknown; a repetition is harmless.
    pub fn repair(
        &mut self,
        snapshot: Snapshot,
        secrets: &[NamedSecret],
        entry: &AuditEntry,
        may_discard: bool,
    ) -> Result<(Position, Position), StoreError> {
        let refused = |problem: &str| StoreError::Region(format!("{problem}; nothing was changed"));
        let region = self.check()?;
        let key = self.keys.in_use();
        if region.id != snapshot.position.origin {
            return Err(refused("the copy of the records is of another region"));
        }
        match self.load() {
            Ok(_) => {
                return Err(refused(
                    "the database is authentic: there is nothing to repair",
                ));
            }
            Err(StoreError::Forged { .. }) => {}
            Err(error) => return Err(error),
        }
        let (known, records) = self.with_later_changes(snapshot, may_discard)?;
        // Numbers beyond this are of no gateway.
        let bound = known.revision.0.saturating_add(NUMBERS);
        let (found, audited) = self.newest_numbers(bound)?;
        let newest = known.revision.0.max(found.min(bound)).max(audited);
        let revision = Revision(newest + 1);
        let repaired = Position {
            origin: region.id,
            revision,
            change: self.ids.next_id().to_string(),
        };
        let mut set = RecordSet::at(repaired.clone());
        let columns =
            RecordColumns::chunks(&records.into_vec(), key.codec(&repaired.origin), &mut set)?;
        let sealed = key.codec(&repaired.origin).seal_all(secrets, &mut set)?;
        let tag = key.authenticator.region(&repaired, set.sum());
        let detail = entry.detail.to_string();
        let is_repaired = self.engine.call(TRANSFER, async |session: &mut SqlSession| {
            let transaction = session.client.transaction().await?;
            transaction.batch_execute("SET LOCAL statement_timeout = 0").await?;
            let replace: [&(dyn ToSql + Sync); 6] =
                [&revision.0, &repaired.change, &&tag[..], &found, &bound, &key.check];
            if transaction.execute(REPLACE, &replace).await? == 0 {
                return Ok(false);
            }
            for chunk in &columns {
                chunk.insert(&transaction, revision.0).await?;
            }
            insert_secrets(&transaction, &sealed).await?;
            let audit =
                "INSERT INTO gw.audit (number, at, actor, action, target, detail) VALUES ($1, $2, \
                 $3, $4, $5, $6)";
            let values: [&(dyn ToSql + Sync); 6] = [
                &revision.0,
                &entry.at.0,
                &entry.actor,
                &entry.action.as_ref(),
                &entry.target,
                &detail,
            ];
            transaction.execute(audit, &values).await?;
            transaction.execute("SELECT pg_notify('gw', $1::bigint::text)", &[&revision.0]).await?;
            transaction.commit().await.map(|()| true)
        })?;
        is_repaired
            .then_some((known, repaired))
            .ok_or_else(|| refused("a node has made a change meanwhile; try again"))
    }

    /// The revision of the region, and the highest number in the audit log up to `bound`.
    fn newest_numbers(&mut self, bound: i64) -> Result<(i64, i64), StoreError> {
        let numbers =
            "SELECT revision, (SELECT max(number) FROM gw.audit WHERE number <= $1) FROM gw.region";
        let numbers = self
            .checked()?
            .call(TRANSFER, async |session: &mut SqlSession| {
                session.client.query_one(numbers, &[&bound]).await
            })?;
        let audited: Option<i64> = column(&numbers, 1)?;
        Ok((column(&numbers, 0)?, audited.unwrap_or(0)))
    }

    /// The records after the authentic changes that follow `snapshot` in the database.
    fn with_later_changes(
        &mut self,
        snapshot: Snapshot,
        may_discard: bool,
    ) -> Result<(Position, Records), StoreError> {
        let Snapshot {
            mut position,
            mut records,
            ..
        } = snapshot;
        // Changes are read from a known position on. Its digest is not needed here.
        self.source.known.forget();
        self.source
            .known
            .load(RecordSet::at(position.clone()), self.keys.in_use().index);
        loop {
            let changes = match self.changes_after(&position) {
                Ok(History::Changes(changes)) if changes.is_empty() => break,
                Ok(History::Changes(changes)) => changes,
                Err(StoreError::Forged { .. }) => break,
                Ok(History::Forgotten | History::Replaced) if may_discard => break,
                Ok(History::Forgotten | History::Replaced) => {
                    return Err(StoreError::Region(format!(
                        "the database does not have all changes after revision {}, which is the \
                         newest in this data folder: use the node with the highest \
                         gw_store_revision; if it is this one, add --discard-later-changes",
                        position.revision.0
                    )));
                }
                Err(error) => return Err(error),
            };
            for (after, steps) in changes {
                steps.into_iter().for_each(|step| records.apply(step));
                position = after;
            }
        }
        self.source.known.forget();
        Ok((position, records))
    }
}
