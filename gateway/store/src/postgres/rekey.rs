//! Replaces the region key of the database: writes every tag and every sealed secret again, with
//! `region_key_next`.
//!
//! One transaction, which holds the row of the region from its beginning: no change is committed
//! meanwhile, and a change that was planned before it is refused afterwards, because the revision
//! and the check of the key are others. Nodes that follow find the check of the key and load all
//! records. A node that joins meanwhile waits for the row, and then finds another key.

use std::cmp::Ordering;

use gw_region::NodeSlot;
use tokio_postgres::{Error, Row, Transaction};

use super::super::{AuditEntry, Position, Revision, StoreError, StoredRecord};
use super::authenticity::{Element, RefusedRows, forged_node, forged_secret, forged_set, is_tag};
use super::connection::engine::SqlSession;
use super::fill::TRANSFER;
use super::keys::{ProvenKeys, StoreKey, other_key};
use super::load::{read_all, read_position};
use super::schema::MIGRATIONS;
use super::{PostgresStore, column, nodes};

/// Rows of one statement.
const ROWS: i64 = 2_000;

/// What became of a replacement.
#[derive(Debug)]
pub enum Rekeyed {
    /// The revision of the region from now on, and the number of records that were written again.
    Done(Revision, usize),
    /// These nodes do not have the next key. Nothing was changed.
    Unready(Vec<NodeSlot>),
    /// The connection broke after the transaction began. A repetition is harmless.
    Unknown(String),
}

impl PostgresStore {
    /// Replaces the region key by `region_key_next`, as a change of its own. Refuses if the
    /// database is not authentic, and, unless `may_leave_behind`, if a node that runs does not have
    /// the next key. An error means that nothing was changed.
    pub fn rekey(
        &mut self,
        may_leave_behind: bool,
        entry: &AuditEntry,
    ) -> Result<Rekeyed, StoreError> {
        let refused = |problem: &str| StoreError::Region(format!("{problem}; nothing was changed"));
        self.check()?;
        let earlier = self.keys.in_use();
        let Some(next) = self.keys.next() else {
            return Err(refused(
                "region_key_next: missing; set it to the file of the next key, on all nodes",
            ));
        };
        if next.check == earlier.check {
            return Err(refused(
                "region_key_next is the key of the region already: set region_key to its file",
            ));
        }
        let change = self.ids.next_id().to_string();
        let replacement = Replacement {
            earlier: &earlier,
            next,
            change: &change,
            entry,
            node: &self.source.node,
        };
        let mut has_begun = false;
        let rekeyed = self
            .engine
            .call(TRANSFER, async |session: &mut SqlSession| {
                session.take_unreplicated();
                let transaction = session.client.transaction().await?;
                has_begun = true;
                transaction
                    .batch_execute("SET LOCAL statement_timeout = 0")
                    .await?;
                let rekeyed = replacement.run(&transaction, may_leave_behind).await?;
                if !matches!(rekeyed, Ok(Rekeyed::Done(..))) {
                    // Dropping the transaction rolls it back.
                    return Ok(rekeyed);
                }
                transaction.commit().await?;
                if session.take_unreplicated() {
                    // A later commit that is confirmed confirms this one.
                    session
                        .client
                        .execute("UPDATE gw.region SET tick = tick + 1", &[])
                        .await?;
                }
                Ok(rekeyed)
            });
        let rekeyed = match rekeyed {
            Err(StoreError::Unavailable(reason)) if has_begun => {
                return Ok(Rekeyed::Unknown(reason));
            }
            rekeyed => rekeyed??,
        };
        if matches!(rekeyed, Rekeyed::Done(..)) {
            self.source.known.forget();
            self.keys.use_key(next.index);
        }
        Ok(rekeyed)
    }
}

/// A replacement of one key by the other.
struct Replacement<'a> {
    earlier: &'a StoreKey,
    next: &'a StoreKey,
    /// UUID of the change.
    change: &'a str,
    entry: &'a AuditEntry,
    /// Name of this machine.
    node: &'a str,
}

/// Digests of the set of records and secrets, with each key.
#[derive(Default)]
struct Sums {
    earlier: Element,
    next: Element,
}

impl Replacement<'_> {
    /// Writes everything, and does not commit. The inner error is about what was read.
    async fn run(
        &self,
        transaction: &Transaction<'_>,
        may_leave_behind: bool,
    ) -> Result<Result<Rekeyed, StoreError>, Error> {
        const REGION: &str =
            "SELECT id::text, revision, coalesce(last_change::text, ''), tag, key_check, schema
            FROM gw.region FOR UPDATE";
        let region = transaction.query_one(REGION, &[]).await?;
        let before = match self.position(&region) {
            Ok(before) => before,
            Err(error) => return Ok(Err(error)),
        };
        let unready = match self.unready(transaction).await? {
            Ok(unready) => unready,
            Err(error) => return Ok(Err(error)),
        };
        if !may_leave_behind && !unready.is_empty() {
            return Ok(Ok(Rekeyed::Unready(unready)));
        }
        let mut sums = Sums::default();
        let records = match self
            .rewrite_records(transaction, &before, &mut sums)
            .await?
        {
            Ok(records) => records,
            Err(error) => return Ok(Err(error)),
        };
        if let Err(error) = self
            .rewrite_secrets(transaction, &before, &mut sums)
            .await?
        {
            return Ok(Err(error));
        }
        let is_complete = column(&region, 3)
            .map(|tag| {
                is_tag(
                    &self.earlier.authenticator.region(&before, sums.earlier),
                    tag,
                )
            })
            .and_then(|is_complete| {
                is_complete
                    .then_some(())
                    .ok_or_else(|| forged_set(before.revision))
            });
        if let Err(error) = is_complete {
            return Ok(Err(error));
        }
        let after = self.record_change(transaction, &before, sums.next).await?;
        // As the nodes will load it. This also finds what a trigger of the database has changed.
        if let Err(error) =
            read_all(transaction, &self.next.sealer, &self.next.authenticator).await?
        {
            return Ok(Err(StoreError::Region(format!(
                "the records cannot be read with region_key_next after they were written \
                 ({error}); nothing was changed"
            ))));
        }
        // Last, because nodes write their rows every second.
        Ok(self
            .rewrite_nodes(transaction)
            .await?
            .map(|()| Rekeyed::Done(after.revision, records)))
    }

    fn position(&self, region: &Row) -> Result<Position, StoreError> {
        let check: &str = column(region, 4)?;
        if check != self.earlier.check {
            return Err(other_key());
        }
        // A node of another version may have migrated the tables since the check of this
        // connection.
        let found = usize::try_from(column::<i32>(region, 5)?).unwrap_or(0);
        let known = MIGRATIONS.len();
        match found.cmp(&known) {
            Ordering::Less => Err(StoreError::OlderSchema { found, known }),
            Ordering::Equal => read_position(region),
            Ordering::Greater => Err(StoreError::NewerSchema { found, known }),
        }
    }

    /// The nodes that run and do not have the next key.
    async fn unready(
        &self,
        transaction: &Transaction<'_>,
    ) -> Result<Result<Vec<NodeSlot>, StoreError>, Error> {
        let rows = transaction.query(ProvenKeys::SELECT, &[]).await?;
        let read = |row: &Row| ProvenKeys::read(row, &[&self.next.authenticator]);
        let nodes = rows.iter().map(read).collect::<Result<Vec<_>, _>>();
        let is_unready = |node: &ProvenKeys| !node.state.is_over() && !node.has[0];
        Ok(nodes.map(|nodes| {
            nodes
                .into_iter()
                .filter(is_unready)
                .map(|node| node.slot)
                .collect()
        }))
    }

    /// Writes the tags of all records again, and the documents of those with secrets. Returns their
    /// number.
    async fn rewrite_records(
        &self,
        transaction: &Transaction<'_>,
        before: &Position,
        sums: &mut Sums,
    ) -> Result<Result<usize, StoreError>, Error> {
        const PAGE: &str = "
            SELECT kind, id, document, tag FROM gw.records
            WHERE (kind, id) > ($1, $2) ORDER BY kind, id LIMIT $3";
        const UPDATE: &str = "
            UPDATE gw.records SET tag = new.tag, document = coalesce(new.document, records.document)
            FROM unnest($1::text[], $2::text[], $3::bytea[], $4::text[])
                AS new (kind, id, tag, document)
            WHERE records.kind = new.kind AND records.id = new.id";
        let page = transaction.prepare(PAGE).await?;
        let update = transaction.prepare(UPDATE).await?;
        let mut last = (String::new(), String::new());
        let mut count = 0;
        let mut refused = RefusedRows::default();
        loop {
            let rows = transaction.query(&page, &[&last.0, &last.1, &ROWS]).await?;
            let Some(end) = rows.last() else { break };
            last = match column(end, 0).and_then(|kind| Ok((kind, column(end, 1)?))) {
                Ok(last) => last,
                Err(error) => return Ok(Err(error)),
            };
            let mut columns = RekeyColumns::default();
            for row in &rows {
                if let Err(error) =
                    self.rewrite_record(row, before, sums, &mut columns, &mut refused)
                {
                    return Ok(Err(error));
                }
            }
            count += rows.len();
            let RekeyColumns {
                kinds,
                ids,
                tags,
                documents,
            } = &columns;
            transaction
                .execute(&update, &[kinds, ids, tags, documents])
                .await?;
        }
        Ok(refused.check().map(|()| count))
    }

    fn rewrite_record<'a>(
        &self,
        row: &'a Row,
        before: &Position,
        sums: &mut Sums,
        columns: &mut RekeyColumns<'a>,
        refused: &mut RefusedRows,
    ) -> Result<(), StoreError> {
        let kind: &str = column(row, 0)?;
        let id: &str = column(row, 1)?;
        let document: &str = column(row, 2)?;
        let (tag, element) = self
            .earlier
            .authenticator
            .record(&before.origin, kind, id, document);
        if !is_tag(&tag, column(row, 3)?) {
            refused.add(kind, id);
            return Ok(());
        }
        sums.earlier ^= element;
        let mut stored = StoredRecord::read(kind, document)?;
        // Documents without secrets stay as they are, with members that only a later version knows.
        let sealed = stored.secret_mut().is_some().then(|| {
            let opened = self.earlier.sealer.open_record(stored)?;
            self.next.sealer.seal_record(&opened)?.document()
        });
        let sealed = sealed.transpose()?;
        let document = sealed.as_deref().unwrap_or(document);
        let (tag, element) = self
            .next
            .authenticator
            .record(&before.origin, kind, id, document);
        sums.next ^= element;
        columns.kinds.push(kind);
        columns.ids.push(id);
        columns.tags.push(tag.to_vec());
        columns.documents.push(sealed);
        Ok(())
    }

    async fn rewrite_secrets(
        &self,
        transaction: &Transaction<'_>,
        before: &Position,
        sums: &mut Sums,
    ) -> Result<Result<(), StoreError>, Error> {
        for row in transaction
            .query("SELECT name, sealed FROM gw.secrets", &[])
            .await?
        {
            let (name, earlier): (&str, &str) =
                match column(&row, 0).and_then(|name| Ok((name, column(&row, 1)?))) {
                    Ok(columns) => columns,
                    Err(error) => return Ok(Err(error)),
                };
            sums.earlier ^= self
                .earlier
                .authenticator
                .secret(&before.origin, name, earlier);
            let opened = self
                .earlier
                .sealer
                .open(name, earlier)
                .map_err(|_| forged_secret(name));
            let sealed = match opened.and_then(|secret| self.next.sealer.seal(name, &secret)) {
                Ok(sealed) => sealed,
                Err(error) => return Ok(Err(error)),
            };
            sums.next ^= self
                .next
                .authenticator
                .secret(&before.origin, name, &sealed);
            transaction
                .execute(
                    "UPDATE gw.secrets SET sealed = $2 WHERE name = $1",
                    &[&name, &sealed],
                )
                .await?;
        }
        Ok(Ok(()))
    }

    /// Makes the next key that of the region. Nodes load all records, so that earlier changes are
    /// not needed any more. The epoch is another one, so that nodes also store the table of nodes
    /// with its new tags.
    async fn record_change(
        &self,
        transaction: &Transaction<'_>,
        before: &Position,
        sum: Element,
    ) -> Result<Position, Error> {
        const REGION: &str = "
            UPDATE gw.region SET revision = $1, last_change = $2::text::uuid, tag = $3,
                key_check = $4, epoch = epoch + 1";
        const CHANGE: &str = "
            INSERT INTO gw.changes (revision, change_id, node, steps, tag)
            VALUES ($1, $2::text::uuid, $3, '[]', $4)";
        const AUDIT: &str = "INSERT INTO gw.audit (number, at, actor, action, target, detail) \
                             VALUES ($1, $2, $3, $4, $5, $6)";
        let revision = Revision(before.revision.0 + 1);
        let after = Position {
            origin: before.origin.clone(),
            revision,
            change: self.change.to_owned(),
        };
        let tag = self.next.authenticator.region(&after, sum);
        let of_change = self.next.authenticator.change(before, &after, "[]");
        let Self {
            next, entry, node, ..
        } = self;
        transaction
            .execute(
                REGION,
                &[&revision.0, &after.change, &&tag[..], &next.check],
            )
            .await?;
        transaction.execute("DELETE FROM gw.changes", &[]).await?;
        transaction
            .execute(CHANGE, &[&revision.0, &after.change, node, &&of_change[..]])
            .await?;
        let detail = entry.detail.to_string();
        let action = entry.action.as_ref();
        transaction
            .execute(
                AUDIT,
                &[
                    &revision.0,
                    &entry.at.0,
                    &entry.actor,
                    &action,
                    &entry.target,
                    &detail,
                ],
            )
            .await?;
        transaction
            .execute("SELECT pg_notify('gw', $1::bigint::text)", &[&revision.0])
            .await?;
        Ok(after)
    }

    /// Locks the rows and not the table: a node that joins or moves waits for the row of the
    /// region, which this transaction holds, and has the table locked against such a lock already.
    async fn rewrite_nodes(
        &self,
        transaction: &Transaction<'_>,
    ) -> Result<Result<(), StoreError>, Error> {
        let select = format!("{} FOR UPDATE", ProvenKeys::SELECT);
        for row in transaction.query(&select, &[]).await? {
            let (number, tag): (i16, &[u8]) =
                match column(&row, 0).and_then(|number| Ok((number, column(&row, 6)?))) {
                    Ok(columns) => columns,
                    Err(error) => return Ok(Err(error)),
                };
            let Some((slot, session, address)) = nodes::identity(&row) else {
                let slot = u16::try_from(number)
                    .ok()
                    .and_then(NodeSlot::new)
                    .unwrap_or_default();
                return Ok(Err(forged_node(slot)));
            };
            if !is_tag(
                &self.earlier.authenticator.node(slot, session, address),
                tag,
            ) {
                return Ok(Err(forged_node(slot)));
            }
            let tag = self.next.authenticator.node(slot, session, address);
            transaction
                .execute(
                    "UPDATE gw.nodes SET tag = $2 WHERE slot = $1",
                    &[&number, &&tag[..]],
                )
                .await?;
        }
        Ok(Ok(()))
    }
}

/// Rows of `gw.records`, as parameters of a statement. A document that stays is `None`.
#[derive(Default)]
struct RekeyColumns<'a> {
    kinds: Vec<&'a str>,
    ids: Vec<&'a str>,
    tags: Vec<Vec<u8>>,
    documents: Vec<Option<String>>,
}
