//! The schema of a region's database, and the checks of a node that uses it.

use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use gw_region::{RegionKey, RegionKeys};

use tokio_postgres::{Error, Row, Transaction};

use super::super::{Position, Revision, StoreError, StoredRecord};
use super::authenticity::Authenticator;
use super::connection::engine::{CALL, Engine, SqlSession};
use super::keys::{StoreKeys, other_key};
use super::{column, nodes};

/// Oldest server, as of `server_version_num`.
pub(super) const SERVER_LEAST: i32 = 150_000;

/// Migrations: the entry at index N upgrades the schema from version N to N + 1. Append only. The
/// gateways of the previous version must be able to use the schema: first expand it, and contract
/// it one version later.
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
        state text NOT NULL
            CHECK (state IN ('joining', 'live', 'draining', 'leaving', 'left', 'dead')),
        beat bigint NOT NULL DEFAULT 0,
        acknowledged bigint NOT NULL DEFAULT 0,
        peer_address text NOT NULL,
        version text NOT NULL,
        applied_revision bigint NOT NULL DEFAULT 0
    ) WITH (fillfactor = 50);
",
    // Tags follow: see `authenticate`.
    "
    ALTER TABLE gw.region ADD COLUMN tag bytea;
    ALTER TABLE gw.records ADD COLUMN tag bytea;
    ALTER TABLE gw.changes ADD COLUMN tag bytea;
    ALTER TABLE gw.nodes ADD COLUMN tag bytea;
    -- Nodes that follow load all records once.
    DELETE FROM gw.changes;
",
    // Which region keys the process of a node has: see `StoreKeys::proofs`.
    "ALTER TABLE gw.nodes ADD COLUMN key_proofs bytea",
    // The chain of the audit log: see `audit_chain.rs`. A trigger, so that the entries of nodes of
    // the version before are in it, too. A change has the row of the region, so that no other entry
    // is added meanwhile.
    r"
    ALTER TABLE gw.audit ADD COLUMN hash bytea;
    CREATE FUNCTION gw.audit_part(part text) RETURNS bytea LANGUAGE sql STABLE AS $$
        SELECT int8send(octet_length(convert_to(part, 'UTF8'))) || convert_to(part, 'UTF8')
    $$;
    CREATE FUNCTION gw.audit_hash(entry gw.audit, before bytea) RETURNS bytea
    LANGUAGE sql STABLE AS $$
        SELECT sha256(coalesce(before, decode(repeat('00', 32), 'hex')) || sha256(
            gw.audit_part(entry.number::text) || gw.audit_part(entry.at::text)
            || gw.audit_part(entry.actor)
            || gw.audit_part(entry.action) || gw.audit_part(coalesce(entry.account, ''))
            || gw.audit_part(entry.target)
            || gw.audit_part(entry.detail)))
    $$;
    CREATE FUNCTION gw.chain_audit() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF NEW.hash IS NULL THEN
                NEW.hash := gw.audit_hash(NEW,
                    (SELECT hash FROM gw.audit ORDER BY number DESC LIMIT 1));
            END IF;
            RETURN NEW;
        END
    $$;
    CREATE TRIGGER chain BEFORE INSERT ON gw.audit FOR EACH ROW EXECUTE FUNCTION gw.chain_audit();
    DO $$
        DECLARE
            entry gw.audit;
            last bytea;
            numbers bigint[] := '{}';
            hashes bytea[] := '{}';
        BEGIN
            FOR entry IN SELECT * FROM gw.audit ORDER BY number LOOP
                last := gw.audit_hash(entry, last);
                numbers := numbers || entry.number;
                hashes := hashes || last;
            END LOOP;
            UPDATE gw.audit SET hash = new.hash
                FROM unnest(numbers, hashes) AS new (number, hash) WHERE audit.number = new.number;
        END
    $$;
    ALTER TABLE gw.audit ALTER hash SET NOT NULL;
    -- What each node has counted of each service on each day. `source` is the file of the node.
    CREATE TABLE gw.usage (
        date date NOT NULL,
        label text NOT NULL,
        source uuid NOT NULL,
        requests bigint NOT NULL,
        refusals bigint NOT NULL,
        bytes_in bigint NOT NULL,
        bytes_out bigint NOT NULL,
        PRIMARY KEY (date, label, source)
    );
",
];

/// Version of the tables whose rows are authenticated. The check of the region key differs from
/// earlier versions, so that the database cannot be presented as an earlier one, whose rows would
/// be trusted.
const AUTHENTICATED: usize = 3;
/// Rows of one statement.
const ROWS: usize = 2_000;

/// Held while the schema is created or migrated.
const LOCK: &str = "SELECT pg_advisory_xact_lock(7446251)";

/// The region that a database belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionIdentity {
    /// UUID, made by `region init`.
    pub id: String,
    /// Revision of the records.
    pub revision: Revision,
}

/// Creates the schema for the region with this apex. Fails if the database has one already.
pub(super) fn create(engine: &mut Engine, apex: &str, key: &RegionKey) -> Result<(), StoreError> {
    check_server(engine)?;
    if schema_version(engine)?.is_some() {
        return Err(StoreError::Region(
            "the database holds a region already; use `gw-gateway region join`".to_owned(),
        ));
    }
    engine.call(CALL * 5, async |session: &mut SqlSession| {
        let transaction = session.client.transaction().await?;
        transaction.batch_execute(LOCK).await?;
        for migration in MIGRATIONS {
            transaction.batch_execute(migration).await?;
        }
        let insert = "INSERT INTO gw.region (name, key_check, schema) VALUES ($1, '', $2)";
        transaction
            .execute(insert, &[&apex, &(MIGRATIONS.len() as i32)])
            .await?;
        if let Err(error) = authenticate(&transaction, apex, key).await? {
            return Ok(Err(error));
        }
        transaction.commit().await.map(Ok)
    })?
}

/// Checks that the database belongs to the region with this apex and key, and migrates its schema.
/// Refuses tables without tags if this node has seen them with tags (`had_tags`).
pub(super) fn check(
    engine: &mut Engine,
    apex: &str,
    keys: &StoreKeys,
    had_tags: bool,
) -> Result<RegionIdentity, StoreError> {
    check_server(engine)?;
    let known = MIGRATIONS.len();
    let Some(found) = schema_version(engine)? else {
        let problem = "the database holds no region: create one with `gw-gateway region init`";
        return Err(StoreError::Region(problem.to_owned()));
    };
    if !is_usable(found) {
        return Err(StoreError::NewerSchema { found, known });
    }
    if found < AUTHENTICATED && had_tags {
        let what = format!("its tables have version {found}, without tags, and had tags before");
        return Err(StoreError::Forged { what, count: 1 });
    }
    if found < known {
        migrate(engine, apex, keys.all())?;
    }
    let row = engine.call(CALL, async |session: &mut SqlSession| {
        session
            .client
            .query_one(
                "SELECT id::text, name, key_check, revision FROM gw.region",
                &[],
            )
            .await
    })?;
    let key = belongs_to(apex, keys.all(), known, column(&row, 1)?, column(&row, 2)?)?;
    keys.use_key(key);
    Ok(RegionIdentity {
        id: column(&row, 0)?,
        revision: Revision(column(&row, 3)?),
    })
}

/// Checks that a database with tables of version `schema`, the region `name` and this check of its
/// key belongs to the region with this apex and one of the accepted `keys`. Returns the index of
/// that key.
pub(super) fn belongs_to(
    apex: &str,
    keys: &RegionKeys,
    schema: usize,
    name: &str,
    check: &str,
) -> Result<usize, StoreError> {
    if name != apex {
        return Err(StoreError::Region(format!(
            "the database belongs to region {name}, but this node is of {apex}: correct `region` \
             and `domain`, or name another database in `store`"
        )));
    }
    keys.accepted()
        .iter()
        .position(|key| check == key_check(key, apex, schema))
        .ok_or_else(other_key)
}

/// Whether this program can use tables of version `found`, also of the next version: nodes are
/// upgraded one after another.
pub(super) fn is_usable(found: usize) -> bool {
    found <= MIGRATIONS.len() + 1
}

/// Fails if the tables have to be migrated.
pub(super) fn refuse_older(engine: &mut Engine) -> Result<(), StoreError> {
    let known = MIGRATIONS.len();
    match schema_version(engine)? {
        Some(found) if found < known => Err(StoreError::OlderSchema { found, known }),
        _ => Ok(()),
    }
}

fn migrate(engine: &mut Engine, apex: &str, keys: &RegionKeys) -> Result<(), StoreError> {
    engine.call(CALL * 60, async |session: &mut SqlSession| {
        let transaction = session.client.transaction().await?;
        transaction
            .batch_execute("SET LOCAL statement_timeout = 0")
            .await?;
        transaction.batch_execute(LOCK).await?;
        let row = transaction
            .query_one("SELECT schema, name, key_check FROM gw.region", &[])
            .await?;
        let (found, key) = match version_of_own_region(&row, apex, keys) {
            Ok(found) => found,
            Err(error) => return Ok(Err(error)),
        };
        // Another node may have been faster.
        for migration in MIGRATIONS.get(found..).unwrap_or_default() {
            transaction.batch_execute(migration).await?;
        }
        if found < AUTHENTICATED {
            let rows = match authenticate(&transaction, apex, key).await? {
                Ok(rows) => rows,
                Err(error) => return Ok(Err(error)),
            };
            tracing::warn!(
                rows,
                "from now on, records are authenticated with the region key: \
                                  these rows were trusted"
            );
        }
        transaction
            .execute(
                "UPDATE gw.region SET schema = greatest(schema, $1)",
                &[&(MIGRATIONS.len() as i32)],
            )
            .await?;
        transaction.commit().await.map(Ok)
    })?
}

/// The version of the tables whose row of `gw.region` begins with schema, name and check of the
/// key, and that key.
fn version_of_own_region<'a>(
    region: &Row,
    apex: &str,
    keys: &'a RegionKeys,
) -> Result<(usize, &'a RegionKey), StoreError> {
    let found = usize::try_from(column::<i32>(region, 0)?).unwrap_or(0);
    let key = belongs_to(apex, keys, found, column(region, 1)?, column(region, 2)?)?;
    Ok((found, &keys.accepted()[key]))
}

/// Fails if the record of a row has another name than the row: it would come back after it was
/// deleted.
fn check_name(kind: &str, id: &str, document: &str) -> Result<(), StoreError> {
    let record = StoredRecord::read(kind, document)?;
    let (_, named) = record.id().columns();
    if named == id {
        return Ok(());
    }
    Err(StoreError::Corrupt(format!(
        "the row {kind} {id} of gw.records holds {named}: delete the row"
    )))
}

/// Gives the region and all of its records their tags, and the region the check of its key. Returns
/// the number of records.
async fn authenticate(
    transaction: &Transaction<'_>,
    apex: &str,
    key: &RegionKey,
) -> Result<Result<usize, StoreError>, Error> {
    const UPDATE: &str = "
        UPDATE gw.records SET tag = new.tag
        FROM unnest($1::text[], $2::text[], $3::bytea[]) AS new (kind, id, tag)
        WHERE records.kind = new.kind AND records.id = new.id";
    let authenticator = Authenticator::new(key);
    // Locked, so that no change comes between.
    let region =
        "SELECT id::text, revision, coalesce(last_change::text, '') FROM gw.region FOR UPDATE";
    let region = transaction.query_one(region, &[]).await?;
    let position = Position {
        origin: region.get(0),
        revision: Revision(region.get(1)),
        change: region.get(2),
    };
    let rows = transaction
        .query("SELECT kind, id, document FROM gw.records", &[])
        .await?;
    let mut sum = 0;
    for rows in rows.chunks(ROWS) {
        let (mut kinds, mut ids, mut tags): (Vec<&str>, Vec<&str>, Vec<Vec<u8>>) =
            Default::default();
        for row in rows {
            let kind = row.get(0);
            let id = row.get(1);
            if let Err(error) = check_name(kind, id, row.get(2)) {
                return Ok(Err(error));
            }
            let (tag, element) = authenticator.record(&position.origin, kind, id, row.get(2));
            sum ^= element;
            kinds.push(kind);
            ids.push(id);
            tags.push(tag.to_vec());
        }
        transaction.execute(UPDATE, &[&kinds, &ids, &tags]).await?;
    }
    for secret in transaction
        .query("SELECT name, sealed FROM gw.secrets", &[])
        .await?
    {
        sum ^= authenticator.secret(&position.origin, secret.get(0), secret.get(1));
    }
    let tag = authenticator.region(&position, sum);
    let check = key_check(key, apex, AUTHENTICATED);
    transaction
        .execute(
            "UPDATE gw.region SET tag = $1, key_check = $2",
            &[&&tag[..], &check],
        )
        .await?;
    authenticate_nodes(transaction, &authenticator).await?;
    // A process of an earlier version cannot write rows without a tag.
    let required = ["region", "records", "changes", "nodes"]
        .map(|table| format!("ALTER TABLE gw.{table} ALTER tag SET NOT NULL;"));
    transaction.batch_execute(&required.concat()).await?;
    Ok(Ok(rows.len()))
}

/// Gives the rows of the nodes their tags.
async fn authenticate_nodes(
    transaction: &Transaction<'_>,
    authenticator: &Authenticator,
) -> Result<(), Error> {
    const SELECT: &str = "SELECT slot, session::text, peer_address FROM gw.nodes";
    const UPDATE: &str = "UPDATE gw.nodes SET tag = $2 WHERE slot = $1";
    for node in transaction.query(SELECT, &[]).await? {
        let slot: i16 = node.get(0);
        // A row that is not valid gets an empty tag, and is refused.
        let tag = nodes::identity(&node)
            .map(|(slot, session, address)| authenticator.node(slot, session, address));
        let tag = tag.map_or(Vec::new(), |tag| tag.to_vec());
        transaction.execute(UPDATE, &[&slot, &tag]).await?;
    }
    Ok(())
}

fn check_server(engine: &mut Engine) -> Result<(), StoreError> {
    let version = engine.call(CALL, async |session: &mut SqlSession| {
        session
            .client
            .query_one("SELECT current_setting('server_version_num')::integer", &[])
            .await
    })?;
    let version: i32 = version.get(0);
    if version < SERVER_LEAST {
        let problem = format!(
            "PostgreSQL {} is too old; version {} is needed",
            version / 10_000,
            SERVER_LEAST / 10_000
        );
        return Err(StoreError::Region(problem));
    }
    Ok(())
}

/// `None` without a region.
pub(super) fn schema_version(engine: &mut Engine) -> Result<Option<usize>, StoreError> {
    let row = engine.call(CALL, async |session: &mut SqlSession| {
        let exists = session
            .client
            .query_one("SELECT to_regclass('gw.region') IS NOT NULL", &[])
            .await?;
        if exists.get(0) {
            session
                .client
                .query_opt("SELECT schema FROM gw.region", &[])
                .await
        } else {
            Ok(None)
        }
    })?;
    let Some(row) = row else { return Ok(None) };
    Ok(Some(usize::try_from(column::<i32>(&row, 0)?).unwrap_or(0)))
}

/// Recognises the region key without revealing it, in tables of version `schema`.
pub(super) fn key_check(key: &RegionKey, apex: &str, schema: usize) -> String {
    let purpose = if schema < AUTHENTICATED {
        "gw region key check 1"
    } else {
        "gw region key check 2"
    };
    STANDARD.encode(hmac::sign(&key.derive(purpose), apex.as_bytes()))
}
