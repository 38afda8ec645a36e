//! Fills a region with the contents of another store.

use std::time::Duration;

use tokio_postgres::types::ToSql;
use tokio_postgres::{Error, Transaction};

use super::super::{
    Contents, ContentsSummary, NumberedEntry, Position, Revision, Sealer, StoreError, StoredRecord,
};
use super::authenticity::{Authenticator, RecordSet, RowCodec, SetMember, Tag};
use super::connection::engine::SqlSession;
use super::load::read_all;
use super::secrets::FIND_SECRET;
use super::steps::RecordColumns;
use super::{PostgresStore, read_entry};

/// Longest transfer.
pub(super) const TRANSFER: Duration = Duration::from_mins(10);
/// Rows of one statement.
const ROWS: usize = 2_000;

/// A secret that all nodes share, by its name.
pub type NamedSecret = (&'static str, Vec<u8>);

impl PostgresStore {
    /// Writes `contents` and the shared `secrets` into a region that has none, in one transaction.
    /// Before it commits, it reads everything back and compares it: on an error the region stays
    /// empty. [`StoreError::Unavailable`] means that the outcome is unknown. Returns the summary of
    /// what was read back.
    pub fn fill(
        &mut self,
        contents: &Contents,
        secrets: &[NamedSecret],
    ) -> Result<ContentsSummary, StoreError> {
        let expected = contents.summary()?;
        // Never 0, which is the revision of an empty region.
        let revision = contents.revision.0.max(1);
        let origin = self.check()?.id;
        let key = self.keys.in_use();
        let position = Position {
            origin,
            revision: Revision(revision),
            change: String::new(),
        };
        let mut set = RecordSet::at(position.clone());
        let records =
            RecordColumns::chunks(&contents.records, key.codec(&position.origin), &mut set)?;
        let sealed = key.codec(&position.origin).seal_all(secrets, &mut set)?;
        let tag = key.authenticator.region(&position, set.sum());
        let sealer = &key.sealer;
        let authenticator = &key.authenticator;
        self.engine
            .call(TRANSFER, async |session: &mut SqlSession| {
                session.take_unreplicated();
                let transaction = session.client.transaction().await?;
                transaction
                    .batch_execute("SET LOCAL statement_timeout = 0")
                    .await?;
                if !claim(&transaction, revision, tag).await? {
                    return Ok(Err(StoreError::Region(
                        "the region is not empty; nothing was changed".to_owned(),
                    )));
                }
                for columns in &records {
                    columns.insert(&transaction, revision).await?;
                }
                for entries in contents.audit.chunks(ROWS) {
                    insert_entries(&transaction, entries).await?;
                }
                insert_secrets(&transaction, &sealed).await?;
                let stored = match read_back(&transaction, sealer, authenticator, secrets).await? {
                    Ok(stored) => stored,
                    Err(error) => return Ok(Err(error)),
                };
                if stored != expected {
                    // Dropping the transaction rolls it back.
                    return Ok(Err(StoreError::Corrupt(expected.difference(&stored))));
                }
                transaction
                    .execute("SELECT pg_notify('gw', $1::bigint::text)", &[&revision])
                    .await?;
                transaction.commit().await?;
                if session.take_unreplicated() {
                    // A later commit that is confirmed confirms this one.
                    session
                        .client
                        .execute("UPDATE gw.region SET tick = tick + 1", &[])
                        .await?;
                }
                Ok(Ok(stored))
            })?
    }
}

/// Moves an empty region to `revision`. Returns whether it was empty. Other changes then wait until
/// the transaction ends.
async fn claim(transaction: &Transaction<'_>, revision: i64, tag: Tag) -> Result<bool, Error> {
    const CLAIM: &str = "
        UPDATE gw.region SET revision = $1, tag = $2 WHERE revision = 0
        AND NOT EXISTS (SELECT FROM gw.records) AND NOT EXISTS (SELECT FROM gw.audit)
        AND NOT EXISTS (SELECT FROM gw.secrets)";
    Ok(transaction.execute(CLAIM, &[&revision, &&tag[..]]).await? == 1)
}

impl RecordColumns {
    /// The rows of all records, for statements of [`ROWS`] rows each. Adds them to `set`.
    pub(super) fn chunks(
        records: &[StoredRecord],
        codec: RowCodec<'_>,
        set: &mut RecordSet,
    ) -> Result<Vec<Self>, StoreError> {
        let mut chunks = Vec::new();
        for records in records.chunks(ROWS) {
            let mut columns = Self::default();
            for record in records {
                let row = codec.write(record)?;
                set.add(SetMember::Record(record.id()), row.element);
                columns.push(row);
            }
            chunks.push(columns);
        }
        Ok(chunks)
    }

    pub(super) async fn insert(
        &self,
        transaction: &Transaction<'_>,
        revision: i64,
    ) -> Result<(), Error> {
        const INSERT: &str = "
            INSERT INTO gw.records (kind, id, document, revision, tag)
            SELECT kind, id, document, $4, tag
            FROM unnest($1::text[], $2::text[], $3::text[], $5::bytea[])
                AS new (kind, id, document, tag)";
        let parameters: [&(dyn ToSql + Sync); 5] = [
            &self.kinds,
            &self.ids,
            &self.documents,
            &revision,
            &self.tags,
        ];
        transaction.execute(INSERT, &parameters).await.map(drop)
    }
}

impl RowCodec<'_> {
    /// Seals shared secrets, with their names. Adds them to `set`.
    pub(super) fn seal_all(
        &self,
        secrets: &[NamedSecret],
        set: &mut RecordSet,
    ) -> Result<Vec<(&'static str, String)>, StoreError> {
        let mut all = Vec::new();
        for (name, secret) in secrets {
            let sealed = self.sealer.seal(name, secret)?;
            let element = self.authenticator.secret(self.origin, name, &sealed);
            set.add(SetMember::Secret((*name).to_owned()), element);
            all.push((*name, sealed));
        }
        Ok(all)
    }
}

pub(super) async fn insert_secrets(
    transaction: &Transaction<'_>,
    sealed: &[(&str, String)],
) -> Result<(), Error> {
    for (name, secret) in sealed {
        let insert = "INSERT INTO gw.secrets (name, sealed) VALUES ($1, $2)";
        transaction.execute(insert, &[name, secret]).await?;
    }
    Ok(())
}

async fn insert_entries(
    transaction: &Transaction<'_>,
    entries: &[NumberedEntry],
) -> Result<(), Error> {
    const INSERT: &str = "
        INSERT INTO gw.audit (number, at, actor, action, account, target, detail, hash)
        SELECT * FROM unnest(
            $1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[],
            $8::bytea[])";
    let numbers: Vec<i64> = entries.iter().map(|numbered| numbered.number).collect();
    // As they are, so that a mistake in the chain of a copied log shows in the copy, too.
    let hashes: Vec<&[u8]> = entries
        .iter()
        .map(|numbered| numbered.hash.as_bytes())
        .collect();
    let entries = || entries.iter().map(|numbered| &numbered.entry);
    let times: Vec<i64> = entries().map(|entry| entry.at.0).collect();
    let actors: Vec<&str> = entries().map(|entry| entry.actor.as_str()).collect();
    let actions: Vec<&str> = entries().map(|entry| entry.action.as_ref()).collect();
    let accounts: Vec<Option<&str>> = entries()
        .map(|entry| entry.account.as_ref().map(|id| id.as_str()))
        .collect();
    let targets: Vec<&str> = entries().map(|entry| entry.target.as_str()).collect();
    let details: Vec<String> = entries().map(|entry| entry.detail.to_string()).collect();
    transaction
        .execute(
            INSERT,
            &[
                &numbers, &times, &actors, &actions, &accounts, &targets, &details, &hashes,
            ],
        )
        .await
        .map(drop)
}

/// Reads the records and the audit log, and compares the secrets. The inner error is about what was
/// read.
async fn read_back(
    transaction: &Transaction<'_>,
    sealer: &Sealer,
    authenticator: &Authenticator,
    secrets: &[NamedSecret],
) -> Result<Result<ContentsSummary, StoreError>, Error> {
    const PAGE: &str = "
        SELECT number, at, actor, action, account, target, detail, hash FROM gw.audit
        WHERE number > $1 ORDER BY number LIMIT $2";
    let records = match read_all(transaction, sealer, authenticator).await? {
        Ok((snapshot, _)) => snapshot.records.into_vec(),
        Err(error) => return Ok(Err(error)),
    };
    let mut audit: Vec<NumberedEntry> = Vec::new();
    loop {
        let after = audit.last().map_or(i64::MIN, |last| last.number);
        let rows = transaction.query(PAGE, &[&after, &(ROWS as i64)]).await?;
        if rows.is_empty() {
            break;
        }
        match rows.iter().map(read_entry).collect::<Result<Vec<_>, _>>() {
            Ok(entries) => audit.extend(entries),
            Err(error) => return Ok(Err(error)),
        }
    }
    for (name, secret) in secrets {
        let sealed = transaction.query_one(FIND_SECRET, &[name]).await?;
        match sealer.open(name, sealed.get(0)) {
            Ok(stored) if stored == *secret => {}
            Ok(_) => {
                return Ok(Err(StoreError::Corrupt(format!(
                    "{name} differs after it was written"
                ))));
            }
            Err(error) => return Ok(Err(error)),
        }
    }
    Ok(Contents {
        revision: Revision::default(),
        records,
        audit,
    }
    .summary())
}
