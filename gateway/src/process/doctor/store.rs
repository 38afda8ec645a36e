//! Checks of a store on PostgreSQL: the server, its standby, and the region in the database.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use gw_base::clock::{ClockDifference, DIFFERENCE_MAX};
use gw_control_plane::control::{node_name, postgres_source};
use gw_interface::config::Config;
use gw_region::{NodeRow, RegionKeys, Roster};
use gw_shared::doctor::Examination;
use gw_store::{
    EngineState, POOLED, PostgresInspector, PostgresSettings, PostgresSource, PostgresStore,
    RegionState, Replication, Store, StoreError, failure,
};

const STORE: &str = "store";
const PRIMARY: &str = "store: primary";
const REGION: &str = "region";
const REGION_KEY: &str = "region key";
/// Longest attempt to connect to another node.
const CONNECT_WITHIN: Duration = Duration::from_secs(2);

/// Checks the database at `settings`, as a node of this configuration uses it.
pub(crate) fn examine(out: &mut Examination, config: &Config, settings: &PostgresSettings) {
    password_file(out, settings);
    let keys = region_keys(out, config);
    let mut inspector = match PostgresInspector::connect(settings, &node_name()) {
        Ok(inspector) => inspector,
        Err(error) => return without_primary(out, settings, &error),
    };
    if !notifications(out, inspector.is_notified()) {
        // What other checks find through a pool is of no use.
        return;
    }
    match inspector.engine() {
        Ok(state) => engine(out, settings, &state),
        Err(error) => return out.failed(STORE, reason(&error), "see the log of PostgreSQL"),
    }
    clock(out, inspector.clock().map(|reading| reading.difference()));
    match inspector.region() {
        Ok(Some(state)) => {
            region(out, config, &state, keys.as_ref());
            let is_known = state.schema == state.schema_known && state.name == config.region.apex();
            if let Some(keys) =
                keys.filter(|keys| is_known && state.check(&state.name, keys).is_ok())
            {
                records(out, &postgres_source(config, settings, keys));
            }
            if let (Some(own), Ok(roster)) = (
                config.peer_address.or(config.peer_listen),
                inspector.nodes(),
            ) {
                other_nodes(out, own, &roster);
            }
        }
        Ok(None) => out.failed(
            REGION,
            format!("{settings} holds no region"),
            "create it with `gw-gateway region init`, or correct the database in `store`",
        ),
        Err(error) => {
            let reason = reason(&error);
            let advice = if reason.contains("permission denied") {
                "give the schema gw and its tables to the user of `store`"
            } else {
                "see the log of PostgreSQL"
            };
            out.failed(REGION, reason, advice);
        }
    }
}

/// The password must be readable by this user alone.
fn password_file(out: &mut Examination, settings: &PostgresSettings) {
    const CHECK: &str = "store_password_file";
    let Some(path) = settings.password_file() else {
        return;
    };
    let name = path.display();
    match fs::metadata(path).map(|metadata| metadata.permissions().mode() & 0o777) {
        // A group may read it: service managers pass secrets on that way.
        Ok(mode) if mode & 0o027 != 0 => out.failed(
            CHECK,
            format!("{name}: other users can read it (mode {mode:03o})"),
            format!("it holds a password: chmod 600 {name}"),
        ),
        Ok(_) => out.ok(CHECK, name.to_string()),
        Err(error) => {
            out.failed(
                CHECK,
                format!("{name}: {error}"),
                "set it to a file that the gateway's user can read",
            );
        }
    }
}

fn region_keys(out: &mut Examination, config: &Config) -> Option<RegionKeys> {
    const ADVICE: &str = "copy the key from another node to this file with mode 0600, owned by the \
                          gateway's user; `gw-gateway region init` makes the key of a new region";
    match config.region_keys() {
        // A store on PostgreSQL has one.
        Ok(keys) => keys,
        Err(error) => {
            out.failed(
                REGION_KEY,
                error.to_string().trim_start_matches("region_key: "),
                ADVICE,
            );
            None
        }
    }
}

/// Without a connection to a primary.
fn without_primary(out: &mut Examination, settings: &PostgresSettings, error: &StoreError) {
    let standby =
        PostgresInspector::connect_to_any(settings, &node_name()).and_then(|mut any| any.engine());
    match standby {
        Ok(state) => {
            out.ok(STORE, answers(settings, &state));
            out.failed(
                PRIMARY,
                "only standbys answer, which take no changes",
                "promote a standby with `pg_ctl promote`, or name the primary in `store` too",
            );
        }
        Err(_) => {
            let reason = reason(error);
            let advice = failure::remedy(&reason).unwrap_or(failure::UNREACHABLE);
            out.failed(STORE, reason, advice);
        }
    }
}

fn reason(error: &StoreError) -> String {
    match error {
        StoreError::Unavailable(reason)
        | StoreError::Postgres(reason)
        | StoreError::Region(reason) => {
            // PostgreSQL gives details in further lines.
            reason.replace('\n', "; ")
        }
        error => error.to_string(),
    }
}

fn answers(settings: &PostgresSettings, state: &EngineState) -> String {
    let from = state
        .address
        .as_ref()
        .map_or_else(String::new, |address| format!(" from {address}"));
    format!("{settings} answers{from}")
}

fn engine(out: &mut Examination, settings: &PostgresSettings, state: &EngineState) {
    out.ok(STORE, answers(settings, state));
    let version = format!("PostgreSQL {}", state.version);
    if state.is_supported {
        out.ok("store: version", version);
    } else {
        out.failed(
            "store: version",
            version,
            "upgrade it to PostgreSQL 15 or newer",
        );
    }
    if let Some(found) = settings.several_primaries() {
        let advice = "keep the newer one; see docs/region-operation.md, Two primaries";
        out.failed(PRIMARY, found, advice);
    } else if state.is_primary {
        out.ok(PRIMARY, "takes changes");
    } else {
        out.failed(
            PRIMARY,
            "the server takes no changes",
            "name the primary in `store`",
        );
    }
    if state.is_durable {
        out.ok("store: durability", "an acknowledged change is on the disk");
    } else {
        out.warning(
            "store: durability",
            "fsync or synchronous_commit is off: a crash can lose acknowledged changes",
            "set both to on in postgresql.conf, and for the user and the database",
        );
    }
    standby(out, state);
}

fn standby(out: &mut Examination, state: &EngineState) {
    const CHECK: &str = "store: standby";
    let standbys = state.standbys;
    match state.replication {
        Replication::Synchronous => out.ok(CHECK, format!("synchronous; {standbys} connected")),
        Replication::SynchronousMissing => out.failed(
            CHECK,
            "commits wait for a synchronous standby, and none is connected: changes are not \
             acknowledged",
            "start the standby, or take it off synchronous_standby_names",
        ),
        Replication::Asynchronous => out.warning(
            CHECK,
            format!("asynchronous; {standbys} connected: a failover can lose acknowledged changes"),
            "set synchronous_standby_names on the primary, such as 'ANY 1 (*)'",
        ),
        Replication::None => out.warning(
            CHECK,
            "none is connected: if the server is lost, so are the changes since the last backup",
            "add a synchronous standby, unless the storage of the server is replicated",
        ),
    }
}

/// Whether the connections are sessions of this node alone.
fn notifications(out: &mut Examination, is_notified: Result<bool, StoreError>) -> bool {
    const CHECK: &str = "store: notifications";
    const ADVICE: &str = "connect to PostgreSQL itself, or through PgBouncer with pool_mode = \
                          session: LISTEN needs a session of its own";
    match is_notified {
        Ok(true) => {
            out.ok(CHECK, "arrive");
            return true;
        }
        Ok(false) => out.failed(CHECK, format!("do not arrive: {POOLED}"), ADVICE),
        Err(error) => out.failed(CHECK, reason(&error), ADVICE),
    }
    false
}

/// Compares the clock of this machine with that of the server.
fn clock(out: &mut Examination, difference: Result<ClockDifference, StoreError>) {
    const CHECK: &str = "store: clock";
    const ADVICE: &str = "set the clock that is wrong, and synchronise both with NTP";
    match difference {
        Ok(difference) if difference.is_small() => {
            out.ok(
                CHECK,
                format!("differs by {:.3} s", difference.seconds().abs()),
            );
        }
        Ok(difference) if difference.is_allowed() => {
            out.warning(CHECK, difference.to_string(), ADVICE);
        }
        Ok(difference) => {
            let most = DIFFERENCE_MAX.as_secs();
            out.failed(
                CHECK,
                format!("{difference}; a node joins with {most} s at most"),
                ADVICE,
            );
        }
        Err(error) => out.failed(CHECK, reason(&error), "see the log of PostgreSQL"),
    }
}

fn region(out: &mut Examination, config: &Config, state: &RegionState, keys: Option<&RegionKeys>) {
    let about = format!(
        "{}, revision {}, schema {}",
        state.name, state.revision.0, state.schema
    );
    let known = state.schema_known;
    if state.name != config.region.apex() {
        out.failed(
            REGION,
            format!(
                "the database belongs to {}, but this node is of {}",
                state.name,
                config.region.apex()
            ),
            "correct `region` and `domain`, or the database in `store`",
        );
    } else if state.schema == known + 1 {
        let advice = "upgrade this node too";
        out.warning(
            REGION,
            format!("{about}: a node of a newer version has upgraded the tables"),
            advice,
        );
    } else if state.schema > known {
        let advice = "install the version of gw-gateway that the other nodes run";
        out.failed(
            REGION,
            format!("{about}: this program knows at most schema {known}"),
            advice,
        );
    } else if state.schema < known {
        let advice = "nothing to do; start the nodes one after another";
        out.warning(
            REGION,
            format!("{about}: the start of a node will upgrade it to schema {known}"),
            advice,
        );
    } else {
        out.ok(REGION, about);
    }
    let Some(keys) = keys else { return };
    match state.check(&state.name, keys) {
        Ok(0) if config.region_key_next.is_some() => {
            let advice = "when `gw-gateway region status` shows `next` for all nodes, run \
                          `gw-gateway region rekey`";
            out.warning(
                REGION_KEY,
                "is the key of the region; region_key_next is to replace it",
                advice,
            );
        }
        Ok(0) => out.ok(REGION_KEY, "is the key of the region"),
        Ok(_) => {
            let advice = "set region_key to the file of region_key_next, remove region_key_next, \
                          and replace the process";
            out.warning(
                REGION_KEY,
                "region_key_next has become the key of the region",
                advice,
            );
        }
        Err(error) => out.failed(
            REGION_KEY,
            reason(&error),
            "copy the key from a node that works",
        ),
    }
}

/// Reads and verifies all records, as the start of a node does.
fn records(out: &mut Examination, source: &PostgresSource) {
    const CHECK: &str = "records";
    match PostgresStore::new(source).and_then(|mut store| store.load()) {
        Ok(snapshot) => out.ok(
            CHECK,
            format!(
                "{} records, all authentic",
                snapshot.records.into_vec().len()
            ),
        ),
        Err(StoreError::Forged { what, .. }) => out.failed(
            CHECK,
            format!("the database was changed by something other than a gateway: {what}"),
            "end that access, then `gw-gateway region repair`; see docs/region-operation.md, When \
             the database was changed",
        ),
        Err(error) => out.failed(CHECK, reason(&error), "see the log of PostgreSQL"),
    }
}

/// Connects to the other members at the addresses that they have published. `own` is the address of
/// this node.
fn other_nodes(out: &mut Examination, own: SocketAddr, roster: &Roster) {
    const CHECK: &str = "other nodes";
    let others: Vec<&NodeRow> = roster
        .rows
        .iter()
        .filter(|row| row.state.may_admit() && row.peer_address != own)
        .collect();
    let mut reached = Vec::new();
    for row in &others {
        let slot = row.slot.get();
        let address = row.peer_address;
        match TcpStream::connect_timeout(&address, CONNECT_WITHIN) {
            Ok(_) => reached.push(format!("node {slot} at {address}")),
            Err(error) => out.failed(
                CHECK,
                format!("node {slot} does not answer at {address}: {error}"),
                "let the nodes connect to each other at `peer_listen` (firewall), and correct \
                 `peer_address` of that node; if the node is lost, the others declare it dead \
                 within seconds",
            ),
        }
    }
    if others.is_empty() {
        out.ok(CHECK, "none is a member now");
    } else if !reached.is_empty() {
        out.ok(CHECK, format!("connected to {}", reached.join(", ")));
    }
}

#[cfg(test)]
mod tests {
    use gw_region::{NodeSlot, NodeState};
    use gw_shared::doctor::{Finding, Verdict};

    use super::*;

    fn state(replication: Replication, standbys: i64) -> EngineState {
        EngineState {
            address: Some("10.0.0.5:5432".to_owned()),
            version: "15.8".to_owned(),
            is_supported: true,
            is_primary: true,
            is_durable: true,
            replication,
            standbys,
        }
    }

    fn finding(check: &str, examine: impl FnOnce(&mut Examination)) -> Finding {
        let mut out = Examination::default();
        examine(&mut out);
        out.checks()
            .iter()
            .find(|finding| finding.check == check)
            .unwrap()
            .clone()
    }

    #[test]
    fn a_standby_is_judged_by_what_a_failover_loses() {
        for (replication, standbys, verdict, words) in [
            (
                Replication::Synchronous,
                1,
                Verdict::Ok,
                "synchronous; 1 connected",
            ),
            (
                Replication::SynchronousMissing,
                0,
                Verdict::Failed,
                "changes are not acknowledged",
            ),
            (
                Replication::Asynchronous,
                2,
                Verdict::Warning,
                "2 connected: a failover can lose acknowledged changes",
            ),
            (
                Replication::None,
                0,
                Verdict::Warning,
                "if the server is lost",
            ),
        ] {
            let found = finding("store: standby", |out| {
                standby(out, &state(replication, standbys));
            });
            assert_eq!(found.verdict, verdict, "{replication:?}");
            assert!(found.found.contains(words), "{}", found.found);
            assert_eq!(found.advice.is_none(), verdict == Verdict::Ok);
        }
    }

    #[test]
    fn an_old_or_lossy_server_is_named() {
        let settings = PostgresSettings::new(
            "postgres://gw:secret@db1,db2/gw?sslmode=disable",
            None,
            None,
        )
        .unwrap();
        let old = EngineState {
            version: "14.2".to_owned(),
            is_supported: false,
            ..state(Replication::None, 0)
        };
        let found = finding("store: version", |out| engine(out, &settings, &old));
        assert_eq!(
            (found.verdict, found.found.as_str()),
            (Verdict::Failed, "PostgreSQL 14.2")
        );
        let lossy = EngineState {
            is_durable: false,
            ..state(Replication::None, 0)
        };
        assert_eq!(
            finding("store: durability", |out| engine(out, &settings, &lossy)).verdict,
            Verdict::Warning
        );
        let found = finding("store", |out| engine(out, &settings, &lossy)).found;
        assert_eq!(found, "postgres://gw@db1,db2/gw answers from 10.0.0.5:5432");
    }

    #[test]
    fn members_that_do_not_answer_are_named() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap();
        // Nothing listens on a port that is bound without `listen`.
        let silent =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        silent
            .bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into())
            .unwrap();
        let silent_address = silent.local_addr().unwrap().as_socket().unwrap();
        let row = |slot, state, peer_address| NodeRow {
            slot: NodeSlot::new(slot).unwrap(),
            session: 1,
            state,
            beat: 1,
            acknowledged: 1,
            peer_address,
            version: "1".into(),
            applied_revision: 1,
            tag: Default::default(),
        };
        let own = "127.0.0.1:1".parse().unwrap();
        let mut roster = Roster {
            epoch: 1,
            rows: vec![row(0, NodeState::Live, own), row(1, NodeState::Live, here)],
        };
        let found = finding("other nodes", |out| other_nodes(out, own, &roster));
        assert_eq!(
            (found.verdict, found.found),
            (Verdict::Ok, format!("connected to node 1 at {here}"))
        );
        roster.rows.truncate(1);
        roster
            .rows
            .push(row(2, NodeState::Draining, silent_address));
        let found = finding("other nodes", |out| other_nodes(out, own, &roster));
        assert_eq!(found.verdict, Verdict::Failed);
        let words = format!("node 2 does not answer at {silent_address}: Connection refused");
        assert!(found.found.starts_with(&words), "{}", found.found);
        roster.rows[1].state = NodeState::Dead;
        let found = finding("other nodes", |out| other_nodes(out, own, &roster));
        assert_eq!(
            (found.verdict, found.found.as_str()),
            (Verdict::Ok, "none is a member now")
        );
    }

    #[test]
    fn lost_notifications_are_a_connection_pool() {
        let found = finding("store: notifications", |out| {
            assert!(!notifications(out, Ok(false)));
        });
        assert_eq!(found.verdict, Verdict::Failed);
        assert!(
            found.found.contains("PgBouncer")
                && found.advice.unwrap().contains("pool_mode = session")
        );
        let found = finding("store: notifications", |out| {
            assert!(notifications(out, Ok(true)));
        });
        assert_eq!(found.verdict, Verdict::Ok);
    }
}
