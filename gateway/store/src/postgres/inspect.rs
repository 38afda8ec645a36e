//! Looks at a database and the region in it. Changes nothing, and needs no region key.

use std::time::Duration;

use gw_base::clock::{ClockReading, Timestamp};
use gw_region::{RegionKeys, Roster};
use serde::Serialize;
use tokio::sync::Notify;
use tokio_postgres::Row;

use super::super::{Revision, StoreError};
use super::authenticity::Authenticator;
use super::connection::engine::{CALL, Engine, SqlSession};
use super::connection::server_clock;
use super::connection::settings::PostgresSettings;
use super::keys::ProvenKeys;
use super::nodes;
use super::schema::{self, MIGRATIONS, SERVER_LEAST};

/// Longest count of all rows.
const COUNT: Duration = Duration::from_secs(30);
/// Longest wait for a notification.
const NOTIFICATION: Duration = Duration::from_secs(2);

/// Waits for no standby.
const NOTIFY: &str = "BEGIN; SET LOCAL synchronous_commit = off; NOTIFY gw_probe; COMMIT";

const ENGINE: &str = "
    SELECT host(inet_server_addr()), inet_server_port(), current_setting('server_version'),
        current_setting('server_version_num')::integer, pg_is_in_recovery(),
        current_setting('transaction_read_only')::boolean, current_setting('fsync')::boolean,
        current_setting('synchronous_commit'), current_setting('synchronous_standby_names'),
        connected, known, synchronous
    FROM (
        SELECT count(*) AS connected, count(sync_state) AS known,
            count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')) AS synchronous
        FROM pg_stat_replication WHERE state IS DISTINCT FROM 'backup'
    ) AS standbys";

/// A connection that only reads.
pub struct PostgresInspector {
    settings: PostgresSettings,
    node: String,
    engine: Engine,
}

/// A server of PostgreSQL.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EngineState {
    /// Address and port that the server sees; `None` on a Unix socket.
    pub address: Option<String>,
    /// Version of the server, as its setting `server_version` has it.
    pub version: String,
    /// The version is new enough.
    pub is_supported: bool,
    /// It takes changes, unlike a standby.
    pub is_primary: bool,
    /// An acknowledged commit is on the disk of this server.
    pub is_durable: bool,
    /// Whether standbys have acknowledged commits.
    pub replication: Replication,
    /// Number of connected standbys.
    pub standbys: i64,
}

/// Whether a standby has a commit before it is acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Replication {
    /// A connected standby has each commit before it is acknowledged.
    Synchronous,
    /// Commits wait for a synchronous standby, but none is connected.
    SynchronousMissing,
    /// Standbys may be behind.
    Asynchronous,
    /// No standby is connected.
    None,
}

/// A region as its database holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RegionState {
    /// UUID, made by `region init`.
    pub id: String,
    /// `{region}.{domain}`
    pub name: String,
    /// Revision of the records.
    pub revision: Revision,
    /// Version of the tables.
    pub schema: usize,
    /// Newest version of the tables that this program knows.
    #[serde(skip)]
    pub schema_known: usize,
    /// Column `feature_level` of `gw.region`; 1 unless a later version of the program has raised
    /// it.
    pub feature_level: i32,
    #[serde(skip)]
    key_check: String,
}

/// Number and size of the records of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RecordsOfKind {
    /// `account`, `service`, …; `audit` for entries of the audit log.
    pub kind: String,
    /// Number of records.
    pub count: i64,
    /// Length of all documents.
    pub bytes: i64,
}

/// The newest entry of the audit log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastChange {
    /// Number of the entry; for a change, its [`Revision`].
    pub number: i64,
    /// Time of the change.
    pub at: Timestamp,
    /// As [`AuditEntry::actor`](crate::AuditEntry::actor).
    pub actor: String,
    /// As [`AuditEntry::action`](crate::AuditEntry::action).
    pub action: String,
    /// The node that committed it; `None` after a day.
    pub node: Option<String>,
}

impl PostgresInspector {
    /// Connects to the newest primary.
    pub fn connect(settings: &PostgresSettings, node: &str) -> Result<Self, StoreError> {
        settings.look_for_primaries(node);
        let mut engine = Engine::new(settings.clone(), node)?;
        engine.call(CALL, async |session: &mut SqlSession| {
            session.client.batch_execute("SELECT 1").await
        })?;
        Ok(Self {
            settings: settings.clone(),
            node: node.to_owned(),
            engine,
        })
    }

    /// Connects to the first host that answers, which may be a standby.
    pub fn connect_to_any(settings: &PostgresSettings, node: &str) -> Result<Self, StoreError> {
        Self::connect(&settings.with_standbys(), node)
    }

    /// Reads version, role, durability and replication of the connected server.
    pub fn engine(&mut self) -> Result<EngineState, StoreError> {
        let row = self.engine.call(CALL, async |session: &mut SqlSession| {
            session.client.query_one(ENGINE, &[]).await
        })?;
        Ok(engine_state(&row))
    }

    /// `None` if the database holds no region.
    pub fn region(&mut self) -> Result<Option<RegionState>, StoreError> {
        if schema::schema_version(&mut self.engine)?.is_none() {
            return Ok(None);
        }
        const SELECT: &str =
            "SELECT id::text, name, revision, schema, feature_level, key_check FROM gw.region";
        let row = self.engine.call(CALL, async |session: &mut SqlSession| {
            session.client.query_one(SELECT, &[]).await
        })?;
        Ok(Some(RegionState {
            id: row.get(0),
            name: row.get(1),
            revision: Revision(row.get(2)),
            schema: usize::try_from(row.get::<_, i32>(3)).unwrap_or(0),
            schema_known: MIGRATIONS.len(),
            feature_level: row.get(4),
            key_check: row.get(5),
        }))
    }

    /// The nodes of the region; none if the tables are older than this program.
    pub fn nodes(&mut self) -> Result<Roster, StoreError> {
        if schema::schema_version(&mut self.engine)?.is_some_and(|version| version < nodes::SCHEMA)
        {
            return Ok(Roster {
                epoch: 0,
                rows: Vec::new(),
            });
        }
        nodes::roster(&mut self.engine)
    }

    /// Which of `keys` the nodes have; none if the tables are older than that.
    pub fn proven_keys(&mut self, keys: &RegionKeys) -> Result<Vec<ProvenKeys>, StoreError> {
        if schema::schema_version(&mut self.engine)?
            .is_none_or(|version| version < ProvenKeys::SCHEMA)
        {
            return Ok(Vec::new());
        }
        let authenticators: Vec<Authenticator> =
            keys.accepted().iter().map(Authenticator::new).collect();
        let rows = self.engine.call(CALL, async |session: &mut SqlSession| {
            session.client.query(ProvenKeys::SELECT, &[]).await
        })?;
        rows.iter()
            .map(|row| ProvenKeys::read(row, &authenticators.iter().collect::<Vec<_>>()))
            .collect()
    }

    /// Number and size of records of each kind, then of the audit log.
    pub fn records(&mut self) -> Result<Vec<RecordsOfKind>, StoreError> {
        const SELECT: &str = "
            (SELECT kind, count(*), sum(octet_length(document))::bigint FROM gw.records
                GROUP BY kind ORDER BY kind)
            UNION ALL
            SELECT 'audit', count(*), coalesce(sum(octet_length(detail)), 0)::bigint FROM gw.audit";
        let rows = self.engine.call(COUNT, async |session: &mut SqlSession| {
            session.client.query(SELECT, &[]).await
        })?;
        Ok(rows
            .iter()
            .map(|row| RecordsOfKind {
                kind: row.get(0),
                count: row.get(1),
                bytes: row.get(2),
            })
            .collect())
    }

    /// Reads the newest entry of the audit log; `None` if the log is empty.
    pub fn last_change(&mut self) -> Result<Option<LastChange>, StoreError> {
        const SELECT: &str = "
            SELECT number, at, actor, action, node
            FROM gw.audit LEFT JOIN gw.changes ON changes.revision = audit.number
            ORDER BY number DESC LIMIT 1";
        let row = self.engine.call(CALL, async |session: &mut SqlSession| {
            session.client.query_opt(SELECT, &[]).await
        })?;
        Ok(row.map(|row| LastChange {
            number: row.get(0),
            at: Timestamp(row.get(1)),
            actor: row.get(2),
            action: row.get(3),
            node: row.get(4),
        }))
    }

    /// Reads the clock of the server.
    pub fn clock(&mut self) -> Result<ClockReading, StoreError> {
        server_clock::read(&mut self.engine)
    }

    /// Whether notifications arrive. They do not through a connection pool that gives the
    /// connection of a waiting session to others (PgBouncer in transaction mode). Notifies from a
    /// second connection, as other nodes do.
    pub fn is_notified(&mut self) -> Result<bool, StoreError> {
        let mut other = Engine::new(self.settings.clone(), &self.node)?;
        self.engine.call(CALL, async |session: &mut SqlSession| {
            session.client.batch_execute("LISTEN gw_probe").await
        })?;
        other.call(CALL, async |session: &mut SqlSession| {
            session.client.batch_execute(NOTIFY).await
        })?;
        Ok(self
            .engine
            .wait_for_notification(NOTIFICATION, &Notify::new())
            && self.engine.is_connected())
    }
}

fn engine_state(row: &Row) -> EngineState {
    let host: Option<String> = row.get(0);
    let port: Option<i32> = row.get(1);
    let address = host.zip(port).map(|(host, port)| {
        // An IPv6 address has colons.
        if host.contains(':') {
            format!("[{host}]:{port}")
        } else {
            format!("{host}:{port}")
        }
    });
    let commit: &str = row.get(7);
    let names: &str = row.get(8);
    let standbys: i64 = row.get(9);
    let known: i64 = row.get(10);
    let synchronous: i64 = row.get(11);
    let waits = !names.is_empty() && !["off", "local"].contains(&commit);
    EngineState {
        address,
        version: row.get(2),
        is_supported: row.get::<_, i32>(3) >= SERVER_LEAST,
        is_primary: !row.get::<_, bool>(4) && !row.get::<_, bool>(5),
        is_durable: row.get::<_, bool>(6) && commit != "off",
        // PostgreSQL shows the states of standbys only to members of pg_monitor.
        replication: match (waits, standbys) {
            (true, 1..) if synchronous > 0 || known == 0 => Replication::Synchronous,
            (true, _) => Replication::SynchronousMissing,
            (false, 1..) => Replication::Asynchronous,
            (false, _) => Replication::None,
        },
        standbys,
    }
}

impl RegionState {
    /// Checks that it is the region with this apex and one of these keys. Returns the index of that
    /// key.
    pub fn check(&self, apex: &str, keys: &RegionKeys) -> Result<usize, StoreError> {
        schema::belongs_to(apex, keys, self.schema, &self.name, &self.key_check)
    }
}
