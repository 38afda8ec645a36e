//! Writes the records that a node knows back into a database that was changed by something other than a gateway.

use tokio_postgres::types::ToSql;

use super::super::{AuditEntry, History, Position, Records, Revision, Snapshot, Store, StoreError};
use super::PostgresStore;
use super::authenticity::RecordSet;
use super::engine::Session;
use super::fill::{NamedSecret, TRANSFER, insert_secrets};
use super::steps::RecordColumns;

const REPLACE: &str = "
    WITH emptied AS (DELETE FROM gw.records), forgotten AS (DELETE FROM gw.changes), dropped AS (DELETE FROM gw.secrets)
    UPDATE gw.region SET revision = $1, last_change = $2::text::uuid, tag = $3";

impl PostgresStore {
    /// Replaces all records with those of `snapshot` and the authentic changes after it, and the shared secrets with `secrets`,
    /// as a change of its own. Returns
    /// the position of the records that were written, and the one after the change. [`StoreError::Unavailable`] means
    /// that the outcome is unknown; a repetition is harmless.
    pub(crate) fn repair(
        &mut self,
        snapshot: Snapshot,
        secrets: &[NamedSecret],
        entry: &AuditEntry,
    ) -> Result<(Position, Position), StoreError> {
        let region = self.check()?;
        if region.id != snapshot.position.origin {
            let problem = "the copy of the records is of another region; nothing was changed";
            return Err(StoreError::Region(problem.to_owned()));
        }
        let (known, records) = self.with_later_changes(snapshot)?;
        // Later than every entry of the audit log: the change has a number there, too.
        let newest = "SELECT greatest((SELECT revision FROM gw.region), (SELECT max(number) FROM gw.audit))";
        let newest: i64 = self
            .checked()?
            .call(TRANSFER, async |session: &mut Session| session.client.query_one(newest, &[]).await)?
            .get(0);
        let change = self.ids.next_id().to_string();
        let revision = Revision(newest.max(known.revision.0).saturating_add(1));
        let repaired = Position { origin: region.id, revision, change };
        let mut set = RecordSet::at(repaired.clone());
        let columns = RecordColumns::chunks(&records.into_vec(), self.codec(&repaired.origin), &mut set)?;
        let sealed = self.codec(&repaired.origin).seal_all(secrets, &mut set)?;
        let tag = self.authenticator.region(&repaired, set.sum());
        let detail = entry.detail.to_string();
        self.engine.call(TRANSFER, async |session: &mut Session| {
            let transaction = session.client.transaction().await?;
            transaction.batch_execute("SET LOCAL statement_timeout = 0").await?;
            transaction.execute(REPLACE, &[&revision.0, &repaired.change, &&tag[..]]).await?;
            for chunk in &columns {
                chunk.insert(&transaction, revision.0).await?;
            }
            insert_secrets(&transaction, &sealed).await?;
            let audit =
                "INSERT INTO gw.audit (number, at, actor, action, target, detail) VALUES ($1, $2, $3, $4, $5, $6)";
            let values: [&(dyn ToSql + Sync); 6] =
                [&revision.0, &entry.at.0, &entry.actor, &entry.action.as_ref(), &entry.target, &detail];
            transaction.execute(audit, &values).await?;
            transaction.execute("SELECT pg_notify('gw', $1::bigint::text)", &[&revision.0]).await?;
            transaction.commit().await
        })?;
        Ok((known, repaired))
    }

    /// The records after the authentic changes that follow `snapshot` in the database.
    fn with_later_changes(&mut self, snapshot: Snapshot) -> Result<(Position, Records), StoreError> {
        let Snapshot { mut position, mut records } = snapshot;
        // Changes are read from a known position on. Its digest is not needed here.
        self.source.known.load(RecordSet::at(position.clone()));
        loop {
            let changes = match self.changes_after(&position) {
                Ok(History::Changes(changes)) if !changes.is_empty() => changes,
                Ok(_) | Err(StoreError::Forged { .. }) => break,
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
