//! The table of the nodes of a region, and the statements of their membership on it.

use std::net::SocketAddr;
use std::sync::Arc;

use gw_region::{Join, NodeRow, NodeSlot, NodeState, Replaced, Roster, Statement};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::super::StoreError;
use super::authenticity::forged_node;
use super::connection::engine::{CALL, Engine, SqlSession};
use super::connection::primaries::Primary;
use super::keys::{StoreKey, StoreKeys};
use super::{PostgresStore, column};

/// Version of the tables that has the nodes and their tags.
pub(super) const SCHEMA: usize = 3;

/// One query, so that epoch and rows are of one snapshot.
const ROSTER: &str = "
    SELECT nodes.slot, nodes.session::text, nodes.peer_address, nodes.state, nodes.beat,
        nodes.acknowledged, nodes.version, nodes.applied_revision, nodes.tag,
        region.epoch, region.key_check
    FROM gw.region LEFT JOIN gw.nodes ON true ORDER BY nodes.slot";

/// Committed without waiting for the disk or a standby.
const BEAT: &str = "
    WITH quick AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
    UPDATE gw.nodes SET beat = greatest(beat, $3), acknowledged = greatest(acknowledged, $4),
        applied_revision = greatest(applied_revision, $5), version = $6, key_proofs = $7
    FROM quick WHERE slot = $1 AND session = $2::text::uuid AND state NOT IN ('left', 'dead')";

/// The bits of an epoch from 31 on are the timeline, less 1, and those from 47 on count how often a
/// lower one has followed, as after `pg_upgrade`. So epochs at a newer primary are later than those
/// at an older one, whose members do not count then.
const TICK: &str = "
    UPDATE gw.region SET tick = tick + 1, epoch = CASE (epoch >> 31) & 65535
        WHEN $1::bigint THEN epoch ELSE coalesce(
            (((epoch >> 47) + ((epoch >> 31) & 65535 > $1)::int) << 47) + ($1 << 31), epoch) END";

/// Waits for a replacement of the region key that is under way, and inserts nothing after it.
const INSERT: &str = "
    INSERT INTO gw.nodes (slot, session, state, peer_address, version, tag)
    SELECT $1::smallint, $2::text::uuid, 'joining', $3::text, $4::text, $5::bytea FROM gw.region
    WHERE key_check = $6 FOR SHARE ON CONFLICT DO NOTHING";

const REPLACE: &str = "
    WITH bumped AS (
        UPDATE gw.region SET epoch = epoch + 1 WHERE epoch = $9 AND key_check = $6 AND EXISTS (
            SELECT FROM gw.nodes WHERE slot = $1 AND session = $7::text::uuid AND state = $8
        ) RETURNING 1
    )
    UPDATE gw.nodes SET session = $2::text::uuid, state = 'joining', beat = 0, acknowledged = 0,
        peer_address = $3, version = $4, applied_revision = 0, tag = $5
    FROM bumped WHERE slot = $1 AND session = $7::text::uuid AND state = $8";

/// Changes the state of a row, and increments the epoch if it has the given value.
const MOVE_AT_EPOCH: &str = "
    WITH bumped AS (
        UPDATE gw.region SET epoch = epoch + 1 WHERE epoch = $5 AND EXISTS (
            SELECT FROM gw.nodes WHERE slot = $1 AND session = $2::text::uuid AND state = $3
        ) RETURNING 1
    )
    UPDATE gw.nodes SET state = $4 FROM bumped
    WHERE slot = $1 AND session = $2::text::uuid AND state = $3";

const MOVE: &str =
    "UPDATE gw.nodes SET state = $4 WHERE slot = $1 AND session = $2::text::uuid AND state = $3";

const END: &str = "
    UPDATE gw.nodes SET state = 'left'
    WHERE slot = $1 AND session = $2::text::uuid AND state IN ('leaving', 'joining')";

const DECLARE_DEAD: &str = "
    WITH bumped AS (
        UPDATE gw.region SET epoch = epoch + 1 WHERE epoch = $4 AND EXISTS (
            SELECT FROM gw.nodes
            WHERE slot = $1 AND session = $2::text::uuid AND state = $3 AND beat = $5
        ) RETURNING 1
    )
    UPDATE gw.nodes SET state = 'dead' FROM bumped
    WHERE slot = $1 AND session = $2::text::uuid AND state = $3 AND beat = $5";

const REMOVE: &str = "
    DELETE FROM gw.nodes
    WHERE slot = $1 AND session = $2::text::uuid AND state IN ('left', 'dead')";

impl PostgresStore {
    /// Runs a statement of the membership. Returns whether it was applied, and the roster after it.
    /// After an error the outcome is unknown.
    pub fn run(&mut self, statement: &Statement) -> Result<(bool, Roster), StoreError> {
        self.checked()?;
        run(&mut self.engine, Some(&self.keys), statement)
    }
}

/// The roster of the region that `engine` is connected to. Not verified, for a look without the
/// region key.
pub(super) fn roster(engine: &mut Engine) -> Result<Roster, StoreError> {
    run(engine, None, &Statement::Read).map(|(_, roster)| roster)
}

fn run(
    engine: &mut Engine,
    keys: Option<&StoreKeys>,
    statement: &Statement,
) -> Result<(bool, Roster), StoreError> {
    let (changed, rows, is_unreplicated, timeline) =
        engine.call(CALL, async |session: &mut SqlSession| {
            session.take_unreplicated();
            let roster = session.prepare(ROSTER).await?;
            let timeline = session.primary.as_ref().map(timeline_of_epochs);
            let change = RowChange::of(statement, keys, timeline);
            let Some(RowChange { sql, parameters }) = &change else {
                let rows = session.client.query(&roster, &[]).await?;
                return Ok((0, rows, false, timeline));
            };
            let change = session.prepare(sql).await?;
            let parameters: Vec<&(dyn ToSql + Sync)> = parameters
                .iter()
                .map(|parameter| &**parameter as _)
                .collect();
            // Both are sent at once; the server runs them in this order.
            let client = &session.client;
            let (changed, rows) = futures_util::try_join!(
                client.execute(&change, &parameters),
                client.query(&roster, &[])
            )?;
            Ok((changed, rows, session.take_unreplicated(), timeline))
        })?;
    if is_unreplicated && statement.is_synchronous() {
        return Err(StoreError::Unavailable(
            "the synchronous standby does not confirm the statement".to_owned(),
        ));
    }
    let roster = read_roster(&rows, keys)?;
    let is_of_other = |timeline| (int(roster.epoch) >> 31) & 0xffff != timeline;
    let is_tick = matches!(statement, Statement::Tick);
    if keys.is_some() && !is_tick && timeline.is_some_and(is_of_other) {
        // An epoch from before the promotion may also be one of the older primary, with other
        // members, or be before its last.
        let (_, roster) = run(engine, keys, &Statement::Tick)?;
        return Ok((changed > 0, roster));
    }
    Ok((changed > 0, roster))
}

/// The timeline of the primary as the bits of an epoch from 31 on have it.
fn timeline_of_epochs(primary: &Primary) -> i64 {
    i64::from(primary.timeline.saturating_sub(1)) & 0xffff
}

type Parameter = Box<dyn ToSql + Sync + Send>;

/// SQL that changes at most one row of `gw.nodes`.
struct RowChange {
    sql: &'static str,
    parameters: Vec<Parameter>,
}

impl RowChange {
    /// `None` if the statement only reads. `timeline` is [that of the primary](timeline_of_epochs),
    /// if it tells.
    fn of(statement: &Statement, keys: Option<&StoreKeys>, timeline: Option<i64>) -> Option<Self> {
        use NodeState::{Draining, Joining, Leaving, Live};
        Some(match *statement {
            Statement::Read => return None,
            Statement::Tick => Self {
                sql: TICK,
                parameters: vec![Box::new(timeline)],
            },
            Statement::Beat {
                slot,
                session,
                beat,
                acknowledged,
                applied_revision,
            } => {
                let beat = Self::on(BEAT, slot, session)
                    .with(int(beat))
                    .with(int(acknowledged));
                // A process that replaces another has the row of that one.
                let beat = beat
                    .with(int(applied_revision))
                    .with(env!("CARGO_PKG_VERSION"));
                beat.with(keys.map_or(Vec::new(), |keys| keys.proofs(slot, session)))
            }
            Statement::Join(ref join) => Self::join(join, keys),
            Statement::GoLive {
                slot,
                session,
                epoch,
            } => Self::to(MOVE_AT_EPOCH, slot, session, Joining, Live).with(int(epoch)),
            Statement::Drain { slot, session } => Self::to(MOVE, slot, session, Live, Draining),
            Statement::Leave {
                slot,
                session,
                epoch,
            } => Self::to(MOVE_AT_EPOCH, slot, session, Draining, Leaving).with(int(epoch)),
            Statement::End { slot, session } => Self::on(END, slot, session),
            Statement::DeclareDead {
                slot,
                session,
                beat,
                state,
                epoch,
            } => Self::on(DECLARE_DEAD, slot, session)
                .with(state.as_str())
                .with(int(epoch))
                .with(int(beat)),
            Statement::Remove { slot, session } => Self::on(REMOVE, slot, session),
        })
    }

    fn join(join: &Join, keys: Option<&StoreKeys>) -> Self {
        let Join {
            slot,
            session,
            peer_address,
            version,
            replaces,
        } = join;
        let sql = if replaces.is_some() { REPLACE } else { INSERT };
        let key = keys.map(StoreKeys::in_use);
        let tag = |key: &StoreKey| {
            key.authenticator
                .node(*slot, *session, *peer_address)
                .to_vec()
        };
        let (tag, check) = key.map_or((Vec::new(), String::new()), |key| {
            (tag(&key), key.check.clone())
        });
        let row = Self::on(sql, *slot, *session)
            .with(peer_address.to_string())
            .with(version.to_string());
        let row = row.with(tag).with(check);
        match *replaces {
            Some(Replaced {
                session,
                state,
                epoch,
            }) => row
                .with(uuid(session))
                .with(state.as_str())
                .with(int(epoch)),
            None => row,
        }
    }

    fn on(sql: &'static str, slot: NodeSlot, session: u128) -> Self {
        Self {
            sql,
            parameters: Vec::new(),
        }
        .with(i16::try_from(slot.get()).unwrap_or(i16::MAX))
        .with(uuid(session))
    }

    fn to(
        sql: &'static str,
        slot: NodeSlot,
        session: u128,
        from: NodeState,
        to: NodeState,
    ) -> Self {
        Self::on(sql, slot, session)
            .with(from.as_str())
            .with(to.as_str())
    }

    fn with(mut self, parameter: impl ToSql + Sync + Send + 'static) -> Self {
        self.parameters.push(Box::new(parameter));
        self
    }
}

fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// PostgreSQL reads a UUID without hyphens, too.
fn uuid(session: u128) -> String {
    format!("{session:032x}")
}

/// Verifies the rows if there are `keys`.
fn read_roster(rows: &[Row], keys: Option<&StoreKeys>) -> Result<Roster, StoreError> {
    let invalid = || StoreError::Corrupt("gw.nodes has a row that no gateway writes".to_owned());
    let first = rows
        .first()
        .ok_or_else(|| StoreError::Region("the database holds no region".to_owned()))?;
    let epoch = u64::try_from(column::<i64>(first, 9)?).map_err(|_| invalid())?;
    let key = keys
        .map(|keys| keys.named(column(first, 10)?))
        .transpose()?;
    // Without nodes there is one row, of the region alone.
    let has_node = |row: &&Row| !matches!(row.try_get::<_, Option<i16>>(0), Ok(None));
    let rows = rows.iter().filter(has_node).map(|row| {
        let node = read_row(row).ok_or_else(invalid)?;
        if key
            .as_ref()
            .is_none_or(|key| key.authenticator.has_written(&node))
        {
            Ok(node)
        } else {
            Err(forged_node(node.slot))
        }
    });
    Ok(Roster {
        epoch,
        rows: rows.collect::<Result<_, _>>()?,
    })
}

fn read_row(row: &Row) -> Option<NodeRow> {
    let unsigned = |at: usize| u64::try_from(column::<i64>(row, at).ok()?).ok();
    let (slot, session, peer_address) = identity(row)?;
    Some(NodeRow {
        slot,
        session,
        peer_address,
        state: NodeState::parse(column(row, 3).ok()?)?,
        beat: unsigned(4)?,
        acknowledged: unsigned(5)?,
        version: Arc::from(column::<&str>(row, 6).ok()?),
        applied_revision: unsigned(7)?,
        tag: column::<&[u8]>(row, 8).ok()?.try_into().unwrap_or_default(),
    })
}

/// The node of a row that begins with slot, session and address.
pub(super) fn identity(row: &Row) -> Option<(NodeSlot, u128, SocketAddr)> {
    let slot = NodeSlot::new(u16::try_from(column::<i16>(row, 0).ok()?).ok()?)?;
    let session = u128::from_str_radix(&column::<&str>(row, 1).ok()?.replace('-', ""), 16).ok()?;
    Some((slot, session, column::<&str>(row, 2).ok()?.parse().ok()?))
}
