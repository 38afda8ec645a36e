//! The store on PostgreSQL, shared by the nodes of a region.
//!
//! A change is one statement that succeeds only if the region is still at the revision that the
//! change was planned on. No lock is held between statements, so a stopped node blocks no other.

mod authenticity;
mod connection;
mod fill;
mod inspect;
mod keys;
mod load;
mod nodes;
mod rekey;
mod repair;
mod schema;
mod secrets;
mod steps;
mod usage;

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use gw_region::{Roster, Statement};
use gw_shared::id::{AccountId, RequestIds};
use tokio::sync::Notify;
use tokio_postgres::types::{FromSql, ToSql};
use tokio_postgres::{IsolationLevel, Row};

pub use self::authenticity::{Authenticator, KnownRecords};
use self::authenticity::{forged_change, is_tag};
use self::connection::engine::{CALL, Engine, SqlSession};
pub use self::connection::primaries::Primary;
pub use self::connection::settings::{PostgresSettings, PostgresUrlError};
pub use self::fill::NamedSecret;
pub use self::inspect::{
    EngineState, LastChange, PostgresInspector, RecordsOfKind, RegionState, Replication,
};
pub use self::keys::ProvenKeys;
use self::keys::{StoreKey, StoreKeys};
use self::load::{read_all, read_position};
pub use self::rekey::Rekeyed;
pub use self::schema::RegionIdentity;
use self::steps::FinalSteps;
use super::audit_chain::StoredColumns;
use super::{
    AuditEntry, AuditQuery, History, NumberedEntry, Position, PostgresSource, Revision, Snapshot,
    Step, Store, StoreError, UsageQuery, UsageRow,
};

/// Longest commit with all of its attempts.
const COMMIT: Duration = Duration::from_millis(1800);
/// Pause between attempts of a commit, while a failover may be under way.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Longest load of all records.
const LOAD: Duration = Duration::from_secs(60);
/// Changes that are read at once.
const CHANGES: i64 = 10_000;

const COMMIT_CHANGE: &str = "
    WITH bumped AS (
        UPDATE gw.region SET revision = revision + 1, last_change = $8::text::uuid, tag = $20
        WHERE revision = $1 AND id = $2::text::uuid AND coalesce(last_change::text, '') = $17
            AND key_check = $23
        RETURNING revision
    ), put AS (
        INSERT INTO gw.records (kind, id, document, revision, tag)
        SELECT new.kind, new.id, new.document, bumped.revision, new.tag
        FROM bumped, unnest($3::text[], $4::text[], $5::text[], $18::bytea[])
            AS new (kind, id, document, tag)
        ON CONFLICT (kind, id) DO UPDATE
        SET document = excluded.document, revision = excluded.revision, tag = excluded.tag
    ), deleted AS (
        DELETE FROM gw.records USING bumped, unnest($6::text[], $7::text[]) AS old (kind, id)
        WHERE records.kind = old.kind AND records.id = old.id
    ), changed AS (
        INSERT INTO gw.changes (revision, change_id, node, steps, tag)
        SELECT revision, $8::text::uuid, $9, $10, $19 FROM bumped
    ), audited AS (
        INSERT INTO gw.audit (number, at, actor, action, account, target, detail)
        SELECT revision, $11, $12, $13, $14, $15, $16 FROM bumped
    ), kept AS (
        INSERT INTO gw.secrets (name, sealed)
        SELECT $21::text, $22::text FROM bumped WHERE $22::text IS NOT NULL
    ), forgotten AS (
        DELETE FROM gw.secrets USING bumped WHERE secrets.name = $21::text AND $22::text IS NULL
    )
    SELECT revision, pg_notify('gw', revision::text)::text FROM bumped";

/// The store of one node.
pub struct PostgresStore {
    engine: Engine,
    source: PostgresSource,
    keys: StoreKeys,
    ids: RequestIds,
    /// Locked until it is closed.
    lock: Option<File>,
}

/// Sets a deadline for all calls of a store. The drop removes the deadline, also after a panic.
struct WithDeadline<'a>(&'a mut PostgresStore);

impl<'a> WithDeadline<'a> {
    fn until(deadline: Instant, store: &'a mut PostgresStore) -> Self {
        store.engine.end_by(Some(deadline));
        Self(store)
    }
}

impl Drop for WithDeadline<'_> {
    fn drop(&mut self) {
        self.0.engine.end_by(None);
    }
}

impl PostgresStore {
    /// Creates the tables of a region in an empty database.
    pub fn create(source: &PostgresSource) -> Result<(), StoreError> {
        let engine = &mut Engine::new(source.settings.clone(), &source.node)?;
        schema::create(
            engine,
            &source.apex,
            &StoreKeys::new(source)?.in_use().region_key,
        )
    }

    /// Does not connect: the first call does, and checks that the database belongs to the region.
    pub fn new(source: &PostgresSource) -> Result<Self, StoreError> {
        Ok(Self {
            engine: Engine::new(source.settings.clone(), &source.node)?,
            source: source.clone(),
            keys: StoreKeys::new(source)?,
            ids: RequestIds::new(),
            lock: None,
        })
    }

    /// Locks the data folder. Fails with [`StoreError::InUse`] if another process has locked it.
    pub(super) fn locked(mut self) -> Result<Self, StoreError> {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&self.source.lock)?;
        match file.try_lock() {
            Ok(()) => self.lock = Some(file),
            Err(TryLockError::WouldBlock) => return Err(StoreError::InUse),
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
        Ok(self)
    }

    /// Connects if there is no connection. Checks that the database belongs to the region, and
    /// migrates its schema.
    pub fn check(&mut self) -> Result<RegionIdentity, StoreError> {
        let checked = {
            let PostgresSource { apex, known, .. } = &self.source;
            schema::check(&mut self.engine, apex, &self.keys, known.had_tags())
        };
        if checked.is_err() {
            // The next call checks again.
            self.engine.disconnect();
        }
        checked
    }

    /// As [`Self::check`], and fails with [`StoreError::OlderSchema`] instead of a migration.
    pub fn check_unmigrated(&mut self) -> Result<RegionIdentity, StoreError> {
        schema::refuse_older(&mut self.engine)?;
        // From now on, also after the connection was lost.
        self.source.known.expect_tags();
        self.check()
    }

    /// Whether there is a connection, as far as this node knows.
    pub fn is_connected(&self) -> bool {
        self.engine.is_connected()
    }

    /// The engine, connected to a checked database.
    fn checked(&mut self) -> Result<&mut Engine, StoreError> {
        if !self.engine.is_connected() {
            self.check()?;
        }
        Ok(&mut self.engine)
    }

    /// Waits until another node may have committed a change, or `wake` is notified, at most
    /// `within`.
    pub fn wait_for_changes(&mut self, within: Duration, wake: &Notify) -> Result<(), StoreError> {
        let engine = self.checked()?;
        engine.listen()?;
        engine.wait_for_notification(within, wake);
        Ok(())
    }

    /// Deletes changes that are older than a day. A node that is further behind loads all records.
    pub fn forget_changes(&mut self) -> Result<(), StoreError> {
        let delete = "DELETE FROM gw.changes WHERE committed_at < now() - interval '24 hours'";
        let engine = self.checked()?;
        engine
            .call(CALL * 5, async |session: &mut SqlSession| {
                session.client.execute(delete, &[]).await
            })
            .map(drop)
    }

    /// Commits a change; tries again until `deadline` while the outcome is unknown. `steps` are
    /// written with `key`.
    fn commit_by(
        &mut self,
        deadline: Instant,
        after: &Position,
        steps: FinalSteps,
        key: &StoreKey,
        entry: &AuditEntry,
    ) -> Result<Position, StoreError> {
        let change_id = self.ids.next_id().to_string();
        let made = Position {
            origin: after.origin.clone(),
            revision: Revision(after.revision.0 + 1),
            change: change_id.clone(),
        };
        let changed = steps.to_json()?;
        let detail = entry.detail.to_string();
        // The records are of another position, or were not loaded: the caller catches up.
        let sum = self
            .source
            .known
            .sum_after(after, &steps.effects)
            .ok_or(StoreError::Stale)?;
        let change_tag = key.authenticator.change(after, &made, &changed);
        let region_tag = key.authenticator.region(&made, sum);
        let account = entry.account.as_ref().map(AccountId::as_str);
        let node = self.source.node.clone();
        let (secret_name, sealed) = steps
            .secret
            .clone()
            .map_or((None, None), |(name, sealed)| (Some(name), sealed));
        let parameters: [&(dyn ToSql + Sync); 23] = [
            &after.revision.0,
            &after.origin,
            &steps.put.kinds,
            &steps.put.ids,
            &steps.put.documents,
            &steps.deleted_kinds,
            &steps.deleted_ids,
            &change_id,
            &node,
            &changed,
            &entry.at.0,
            &entry.actor,
            &entry.action.as_ref(),
            &account,
            &entry.target,
            &detail,
            &after.change,
            &steps.put.tags,
            &&change_tag[..],
            &&region_tag[..],
            &secret_name,
            &sealed,
            &key.check,
        ];
        self.send_until(deadline, &change_id, &parameters)?;
        self.source.known.apply(after, &made, steps.effects);
        Ok(made)
    }

    /// Sends the commit of a change until its outcome is known.
    fn send_until(
        &mut self,
        deadline: Instant,
        change_id: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<(), StoreError> {
        let mut is_unknown = false;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            // After an unknown outcome the change may be committed: look for it before another
            // attempt and after it.
            let attempt = match is_unknown
                .then(|| self.is_committed(change_id, left))
                .transpose()
            {
                Ok(Some(true)) => return Ok(()),
                Ok(_) => self.commit_once(parameters, left),
                Err(error) => Err(error),
            };
            match attempt {
                Ok(true) => return Ok(()),
                Ok(false) if is_unknown => {
                    return self
                        .is_committed(change_id, left)?
                        .then_some(())
                        .ok_or(StoreError::Stale);
                }
                Ok(false) => return Err(StoreError::Stale),
                Err(StoreError::Unavailable(_)) if Instant::now() + CALL / 4 < deadline => {
                    is_unknown = true;
                    std::thread::sleep(RETRY_PAUSE);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends the commit once. Returns whether it was made: it is not if the region is at another
    /// revision.
    fn commit_once(
        &mut self,
        parameters: &[&(dyn ToSql + Sync)],
        within: Duration,
    ) -> Result<bool, StoreError> {
        self.checked()?;
        // After the connection, which may be the first to another server.
        self.source.settings.refuse_equal_primaries()?;
        let (is_made, is_unreplicated) =
            self.engine
                .call(within.min(CALL), async |session: &mut SqlSession| {
                    session.take_unreplicated();
                    let statement = session.prepare(COMMIT_CHANGE).await?;
                    let row = session.client.query_opt(&statement, parameters).await?;
                    Ok((row.is_some(), session.take_unreplicated()))
                })?;
        if is_unreplicated {
            self.confirm(within)?;
        }
        Ok(is_made)
    }

    /// Waits until the synchronous standby, if any, has all commits so far: it confirms them with a
    /// later one.
    fn confirm(&mut self, within: Duration) -> Result<(), StoreError> {
        let is_confirmed =
            self.checked()?
                .call(within.min(CALL), async |session: &mut SqlSession| {
                    session.take_unreplicated();
                    session
                        .client
                        .execute("UPDATE gw.region SET tick = tick + 1", &[])
                        .await?;
                    Ok(!session.take_unreplicated())
                })?;
        let problem = "the synchronous standby does not confirm the change";
        is_confirmed
            .then_some(())
            .ok_or_else(|| StoreError::Unavailable(problem.to_owned()))
    }

    /// Whether a change that this node sent is committed. Confirms it if it is: one whose wait for
    /// the synchronous standby was cancelled can be seen, too.
    fn is_committed(&mut self, change_id: &str, within: Duration) -> Result<bool, StoreError> {
        let is_committed =
            self.checked()?
                .call(within.min(CALL), async |session: &mut SqlSession| {
                    let find = "SELECT FROM gw.changes WHERE change_id = $1::text::uuid";
                    Ok(session
                        .client
                        .query_opt(find, &[&change_id])
                        .await?
                        .is_some())
                })?;
        if is_committed {
            self.confirm(within)?;
        }
        Ok(is_committed)
    }

    fn entries(&mut self, query: &AuditQuery) -> Result<Vec<Row>, StoreError> {
        const SELECT: &str = "
            SELECT number, at, actor, action, account, target, detail, hash FROM gw.audit
            WHERE ($1::text IS NULL OR account = $1) AND number < $2 ORDER BY number DESC LIMIT $3";
        let limit = i64::try_from(query.limit).unwrap_or(i64::MAX);
        let before = query.before.unwrap_or(i64::MAX);
        self.checked()?
            .call(CALL * 2, async |session: &mut SqlSession| {
                let statement = session.prepare(SELECT).await?;
                session
                    .client
                    .query(&statement, &[&query.account, &before, &limit])
                    .await
            })
    }
}

/// The position of the region, and the changes after a revision.
const CHANGES_AFTER: &str = "
    SELECT region.id::text, region.revision, coalesce(region.last_change::text, ''),
        (SELECT change_id::text FROM gw.changes WHERE revision = $1),
        changes.revision, changes.change_id::text, changes.steps, changes.tag, region.key_check
    FROM gw.region
    LEFT JOIN gw.changes ON changes.revision > $1 AND changes.revision <= region.revision
    ORDER BY changes.revision LIMIT $2";

impl Store for PostgresStore {
    fn load(&mut self) -> Result<Snapshot, StoreError> {
        self.checked()?;
        let keys = &self.keys;
        let (snapshot, set, key) =
            self.engine.call(LOAD, async |session: &mut SqlSession| {
                let begin = session
                    .client
                    .build_transaction()
                    .isolation_level(IsolationLevel::RepeatableRead);
                let transaction = begin.read_only(true).start().await?;
                transaction
                    .batch_execute("SET LOCAL statement_timeout = 0")
                    .await?;
                let region = transaction
                    .query_one("SELECT key_check FROM gw.region", &[])
                    .await?;
                let key = match column(&region, 0).and_then(|check| keys.named(check)) {
                    Ok(key) => key,
                    Err(error) => return Ok(Err(error)),
                };
                let loaded = read_all(&transaction, &key.sealer, &key.authenticator).await?;
                // A dropped transaction would end with the next call, and keep its locks until
                // then.
                transaction.commit().await?;
                Ok(loaded.map(|(snapshot, set)| (snapshot, set, key.index)))
            })??;
        self.source.known.load(set, key);
        Ok(snapshot)
    }

    fn commit(
        &mut self,
        after: &Position,
        steps: &[Step],
        entry: &AuditEntry,
    ) -> Result<Position, StoreError> {
        self.refuse_newer()?;
        let key = self.keys.in_use();
        let steps = FinalSteps::of(steps, key.codec(&after.origin))?;
        let deadline = Instant::now() + COMMIT;
        let committed = WithDeadline::until(deadline, self)
            .0
            .commit_by(deadline, after, steps, &key, entry);
        if matches!(committed, Err(StoreError::Postgres(_))) {
            // A newer program may just have changed the tables.
            self.read_clock()?;
            self.refuse_newer()?;
        }
        committed
    }

    fn changes_after(&mut self, position: &Position) -> Result<History, StoreError> {
        let rows = self
            .checked()?
            .call(CALL * 2, async |session: &mut SqlSession| {
                let statement = session.prepare(CHANGES_AFTER).await?;
                session
                    .client
                    .query(&statement, &[&position.revision.0, &CHANGES])
                    .await
            })?;
        let Some(first) = rows.first() else {
            return Ok(History::Replaced);
        };
        let newest = read_position(first)?;
        let key = self.keys.named(column(first, 8)?)?;
        let ours: Option<&str> = column(first, 3)?;
        if newest != *position
            && (newest.origin != position.origin
                || newest.revision <= position.revision
                || ours.is_some_and(|change| change != position.change))
        {
            self.source.known.forget();
            return Ok(History::Replaced);
        }
        if !self.source.known.covers(position, &newest, key.index) {
            return Ok(History::Forgotten);
        }
        if newest == *position {
            return Ok(History::Changes(Vec::new()));
        }
        if ours.is_none() && !position.change.is_empty() {
            return Ok(History::Forgotten);
        }
        let mut changes = Vec::new();
        let mut before = position.clone();
        for row in &rows {
            let Some(revision) = column::<Option<i64>>(row, 4)? else {
                break;
            };
            if revision != before.revision.0 + 1 {
                return Ok(History::Forgotten);
            }
            let after = Position {
                origin: newest.origin.clone(),
                revision: Revision(revision),
                change: column(row, 5)?,
            };
            let text: &str = column(row, 6)?;
            let tag: &[u8] = column(row, 7)?;
            if !is_tag(&key.authenticator.change(&before, &after, text), tag) {
                // The next call fails; the changes before it are genuine.
                let genuine = (!changes.is_empty()).then_some(History::Changes(changes));
                return genuine.ok_or_else(|| forged_change(after.revision));
            }
            let (steps, effects) = steps::from_json(text, key.codec(&newest.origin))?;
            self.source.known.apply(&before, &after, effects);
            changes.push((after.clone(), steps));
            before = after;
        }
        let is_complete = rows.len() as i64 == CHANGES || newest.revision == before.revision;
        Ok(if is_complete {
            History::Changes(changes)
        } else {
            History::Forgotten
        })
    }

    fn audit_log(&mut self, query: &AuditQuery) -> Result<Vec<NumberedEntry>, StoreError> {
        self.entries(query)?.iter().map(read_entry).collect()
    }

    fn put_usage(
        &mut self,
        source: &str,
        rows: &[UsageRow],
        oldest: &str,
    ) -> Result<bool, StoreError> {
        self.write_usage(source, rows, oldest).map(|()| true)
    }

    fn usage(&mut self, query: &UsageQuery) -> Result<Option<Vec<UsageRow>>, StoreError> {
        self.read_usage(query).map(Some)
    }

    fn nodes(&mut self) -> Result<Option<Roster>, StoreError> {
        // A change waits for the answer.
        let read = WithDeadline::until(Instant::now() + CALL / 2, self)
            .0
            .run(&Statement::Read);
        read.map(|(_, roster)| Some(roster))
    }
}

/// A column of a row. An error, where the tables were changed to have another type or no value.
fn column<'a, T: FromSql<'a>>(row: &'a Row, at: usize) -> Result<T, StoreError> {
    let forged = |error: tokio_postgres::Error| StoreError::Forged {
        what: format!(
            "a row has a value that no gateway writes ({})",
            connection::settings::with_cause(&error)
        ),
        count: 1,
    };
    row.try_get(at).map_err(forged)
}

/// Reads a row of number, at, actor, action, account, target, detail and hash.
fn read_entry(row: &Row) -> Result<NumberedEntry, StoreError> {
    let columns = StoredColumns {
        number: column(row, 0)?,
        at: column(row, 1)?,
        actor: column(row, 2)?,
        action: column(row, 3)?,
        account: column(row, 4)?,
        target: column(row, 5)?,
        detail: column(row, 6)?,
    };
    NumberedEntry::read(&columns, column(row, 7)?)
}
