//! The schema of a region's database, and the checks of a node that uses it.

use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::super::{Revision, StoreError};
use super::engine::{CALL, Engine, Session};
use crate::region::RegionKey;

/// Oldest server, as of `server_version_num`.
pub(super) const SERVER_LEAST: i32 = 150_000;

/// Migrations: the entry at index N upgrades the schema from version N to N + 1. Append only. The gateways of the
/// previous version must be able to use the schema: first expand it, and contract it one version later.
pub(super) const MIGRATIONS: &[&str] = &[
    "
    CREATE SCHEMA gw;
    -- One row: the region, and the revision of its last change.
    CREATE TABLE gw.region (
        one boolean PRIMARY KEY DEFAULT true CHECK (one),
        id uuid NOT NULL DEFAULT gen_random_uuid(),
        name text NOT NULL,
        key_check text NOT NULL,
        schema integer NOT NULL,
        feature_level integer NOT NULL DEFAULT 1,
        revision bigint NOT NULL DEFAULT 0,
        last_change uuid,
        epoch bigint NOT NULL DEFAULT 0,
        tick bigint NOT NULL DEFAULT 0
    );
    -- Records of every kind, each a JSON document.
    CREATE TABLE gw.records (
        kind text NOT NULL,
        id text NOT NULL,
        document text NOT NULL,
        revision bigint NOT NULL,
        PRIMARY KEY (kind, id)
    );
    -- The changes of the last day, for nodes that follow.
    CREATE TABLE gw.changes (
        revision bigint PRIMARY KEY,
        change_id uuid NOT NULL UNIQUE,
        node text NOT NULL,
        committed_at timestamptz NOT NULL DEFAULT now(),
        steps text NOT NULL
    );
    CREATE INDEX changes_by_time ON gw.changes (committed_at);
    CREATE TABLE gw.audit (
        number bigint PRIMARY KEY,
        at bigint NOT NULL,
        actor text NOT NULL,
        action text NOT NULL,
        account text,
        target text NOT NULL,
        detail text NOT NULL
    );
    CREATE INDEX audit_of_account ON gw.audit (account, number);
    -- Secrets that all nodes share, sealed with the region key.
    CREATE TABLE gw.secrets (name text PRIMARY KEY, sealed text NOT NULL);
",
    "
    -- The nodes of the region. Only `region.epoch` and these rows say which of them own services.
    CREATE TABLE gw.nodes (
        slot smallint PRIMARY KEY CHECK (slot BETWEEN 0 AND 1023),
        session uuid NOT NULL,
        state text NOT NULL CHECK (state IN ('joining', 'live', 'draining', 'leaving', 'left', 'dead')),
        beat bigint NOT NULL DEFAULT 0,
        acknowledged bigint NOT NULL DEFAULT 0,
        peer_address text NOT NULL,
        version text NOT NULL,
        applied_revision bigint NOT NULL DEFAULT 0
    ) WITH (fillfactor = 50);
",
];

/// Held while the schema is created or migrated.
const LOCK: &str = "SELECT pg_advisory_xact_lock(7446251)";

/// The region that a database belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionIdentity {
    /// UUID, made by `region init`.
    pub id: String,
    pub revision: Revision,
}

/// Creates the schema for the region with this apex. Fails if the database has one already.
pub(super) fn create(engine: &mut Engine, apex: &str, key: &RegionKey) -> Result<(), StoreError> {
    check_server(engine)?;
    if schema_version(engine)?.is_some() {
        return Err(StoreError::Region("the database holds a region already; use `gw-gateway region join`".to_owned()));
    }
    let check = key_check(key, apex);
    engine.call(CALL * 5, async |session: &mut Session| {
        let transaction = session.client.transaction().await?;
        transaction.batch_execute(LOCK).await?;
        for migration in MIGRATIONS {
            transaction.batch_execute(migration).await?;
        }
        let insert = "INSERT INTO gw.region (name, key_check, schema) VALUES ($1, $2, $3)";
        transaction.execute(insert, &[&apex, &check, &(MIGRATIONS.len() as i32)]).await?;
        transaction.commit().await
    })
}

/// Checks that the database belongs to the region with this apex and key, and migrates its schema.
pub(super) fn check(engine: &mut Engine, apex: &str, key: &RegionKey) -> Result<RegionIdentity, StoreError> {
    check_server(engine)?;
    let known = MIGRATIONS.len();
    let Some(found) = schema_version(engine)? else {
        let problem = "the database holds no region: create one with `gw-gateway region init`";
        return Err(StoreError::Region(problem.to_owned()));
    };
    // Tables of the next version can be used: nodes are upgraded one after another.
    if found > known + 1 {
        return Err(StoreError::NewerSchema { found, known });
    }
    if found < known {
        migrate(engine)?;
    }
    let row = engine.call(CALL, async |session: &mut Session| {
        session.client.query_one("SELECT id::text, name, key_check, revision FROM gw.region", &[]).await
    })?;
    let (id, name, check, revision): (String, String, String, i64) = (row.get(0), row.get(1), row.get(2), row.get(3));
    belongs_to(apex, key, &name, &check)?;
    Ok(RegionIdentity { id, revision: Revision(revision) })
}

/// Checks that a database with the region `name` and this check of its key belongs to the region with this apex and
/// key.
pub(super) fn belongs_to(apex: &str, key: &RegionKey, name: &str, check: &str) -> Result<(), StoreError> {
    if name != apex {
        return Err(StoreError::Region(format!("the database belongs to region {name}, but this node is of {apex}")));
    }
    if check != key_check(key, apex) {
        return Err(StoreError::Region("the region key differs from the key of the other nodes".to_owned()));
    }
    Ok(())
}

fn migrate(engine: &mut Engine) -> Result<(), StoreError> {
    engine.call(CALL * 60, async |session: &mut Session| {
        let transaction = session.client.transaction().await?;
        transaction.batch_execute("SET LOCAL statement_timeout = 0").await?;
        transaction.batch_execute(LOCK).await?;
        // Another node may have been faster.
        let found: i32 = transaction.query_one("SELECT schema FROM gw.region", &[]).await?.get(0);
        for migration in MIGRATIONS.get(usize::try_from(found).unwrap_or(usize::MAX)..).unwrap_or_default() {
            transaction.batch_execute(migration).await?;
        }
        transaction
            .execute("UPDATE gw.region SET schema = greatest(schema, $1)", &[&(MIGRATIONS.len() as i32)])
            .await?;
        transaction.commit().await
    })
}

fn check_server(engine: &mut Engine) -> Result<(), StoreError> {
    let version = engine.call(CALL, async |session: &mut Session| {
        session.client.query_one("SELECT current_setting('server_version_num')::integer", &[]).await
    })?;
    let version: i32 = version.get(0);
    if version < SERVER_LEAST {
        let problem =
            format!("PostgreSQL {} is too old; version {} is needed", version / 10_000, SERVER_LEAST / 10_000);
        return Err(StoreError::Region(problem));
    }
    Ok(())
}

/// `None` without a region.
pub(super) fn schema_version(engine: &mut Engine) -> Result<Option<usize>, StoreError> {
    let row = engine.call(CALL, async |session: &mut Session| {
        let exists = session.client.query_one("SELECT to_regclass('gw.region') IS NOT NULL", &[]).await?;
        if exists.get(0) { session.client.query_opt("SELECT schema FROM gw.region", &[]).await } else { Ok(None) }
    })?;
    Ok(row.map(|row| usize::try_from(row.get::<_, i32>(0)).unwrap_or(0)))
}

/// Recognises the region key without revealing it.
fn key_check(key: &RegionKey, apex: &str) -> String {
    STANDARD.encode(hmac::sign(&key.derive("gw region key check 1"), apex.as_bytes()))
}
