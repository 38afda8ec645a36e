//! Two servers of PostgreSQL that take changes: an older primary beside a newer one, or two copies
//! of one database.

use std::fs;
use std::os::unix::fs::symlink;

use gw_base::clock::Timestamp;
use gw_region::Statement;
use gw_store::{AuditEntry, PostgresStore, Store, StoreError};
use serde_json::{Value, json};

use crate::support::doctor::examine;
use crate::support::eventually;
use crate::support::peers::gate::{Gate, Passage, Target};
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::postgres::Postgres;
use crate::support::processes::process::gw_gateway;
use crate::support::processes::region::Region;
use crate::support::processes::successor::{admin, replace};

/// The URL of a database that is at two servers.
fn url(first: &Postgres, second: &Postgres) -> String {
    let second = second.url();
    let host = second.split(['@', '/']).nth(3).unwrap();
    first
        .url()
        .replace("/postgres", &format!(",{host}/postgres"))
}

/// The names of two servers, as nodes give them.
fn names(servers: [&Postgres; 2]) -> [String; 2] {
    servers.map(|it| it.socket().parent().unwrap().display().to_string())
}

/// Starts a node again, which finds PostgreSQL at `store`.
fn restart_at(region: &mut Region, node: usize, store: &str) {
    region.kill(node);
    let path = region.config(node);
    let text = fs::read_to_string(&path).unwrap();
    let of_store = |line: &str| match line.starts_with("store = ") {
        true => format!("store = \"{store}\"\n"),
        false => format!("{line}\n"),
    };
    fs::write(path, text.lines().map(of_store).collect::<String>()).unwrap();
    region.restart(node);
}

/// Status and `Retry-After` of a change at a node.
fn change(region: &Region, node: usize) -> (u16, String) {
    let body = json!({ "services": ["echo"] });
    let path = "/accounts/demo/enrollment-tokens";
    let reply = region.api(node).ask("POST", path, &body);
    (reply.status, reply.retry_after)
}

fn refused() -> (u16, String) {
    (503, "1".to_owned())
}

fn has_all(text: &str, words: &[String]) -> bool {
    words.iter().all(|word| text.contains(word))
}

/// Waits until a node names both servers.
#[track_caller]
fn await_names(region: &Region, node: usize, names: &[String]) {
    eventually("the node is ready and names both servers", || {
        let (status, text) = readiness(region, node);
        assert!(status == 200 && text.starts_with("ready"), "{text}");
        has_all(&text, names).then_some(())
    });
    let warnings = region.get(node, "/warnings").body;
    let warning = warnings["store"].as_str().unwrap_or_default();
    assert!(has_all(warning, names), "{warnings}");
}

/// What `region status` says of the configuration of a node.
fn status(region: &Region, node: usize) -> Value {
    let mut command = gw_gateway();
    command.args(["region", "status", "--json", "--config"]);
    let output = command.arg(region.config(node)).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Asserts that `doctor` fails this check of the configuration of a node, and names both servers.
fn assert_doctor_names(region: &Region, node: usize, check: &str, names: &[String]) {
    let mut doctor = gw_gateway();
    doctor.args(["doctor", "--config"]).arg(region.config(node));
    let looked = examine(&mut doctor);
    let finding = looked.of(check);
    assert_eq!(finding.verdict, "failed", "{finding:?}");
    let text = format!("{finding:?}");
    assert!(has_all(&text, names), "{text}");
}

/// Asserts that `doctor` and `region status` name both servers.
fn assert_commands_name(region: &Region, node: usize, names: &[String]) {
    assert_doctor_names(region, node, "store: primary", names);
    let status = status(region, node);
    let primaries = status["several_primaries"].as_str().unwrap_or_default();
    assert!(has_all(primaries, names), "{status}");
}

/// Asserts that `doctor` names both servers at a node whose configuration has one of them.
fn assert_doctor_asks_the_process(region: &Region, node: usize, names: &[String]) {
    let text = fs::read_to_string(region.config(node)).unwrap();
    let admin_listen = format!("admin_listen = \"{}\"", region.node(node).admin_address);
    let known = text.replace("admin_listen = \"127.0.0.1:0\"", &admin_listen);
    fs::write(region.config(node), known).unwrap();
    assert_doctor_names(region, node, "store: in use", names);
    fs::write(region.config(node), text).unwrap();
}

fn revision(server: &Postgres) -> String {
    server.sql("SELECT revision FROM gw.region")
}

fn promote(standby: &Postgres) {
    assert_eq!(standby.sql("SELECT pg_promote()"), "t");
}

/// A server that takes changes on the next timeline.
fn promoted_standby(primary: &Postgres) -> Postgres {
    let standby = primary.standby();
    promote(&standby);
    standby
}

/// The smallest epoch after the first promotion.
const PROMOTED: u64 = 1 << 31;

fn epoch(region: &Region, node: usize) -> u64 {
    region.status(node)["epoch"].as_u64().unwrap()
}

fn wait_until_changed(region: &Region, node: usize) {
    eventually("a change is made", || {
        (change(region, node).0 == 201).then_some(())
    });
}

fn wait_until_refused(region: &Region, node: usize) {
    eventually("changes are refused", || {
        (change(region, node) == refused()).then_some(())
    });
}

/// Status and body of the readiness of a node.
fn readiness(region: &Region, node: usize) -> (u16, String) {
    admin(region.node(node).admin_address, "/readyz")
}

fn ready() -> (u16, String) {
    (200, "ready\n".to_owned())
}

/// Asserts that requests at both nodes are relayed.
#[track_caller]
fn assert_both_relay(region: &Region) {
    let answers = [0, 1].map(|node| region.request(node));
    assert_eq!(answers, ["200", "200"]);
}

#[test]
fn changes_at_an_older_primary_are_refused_and_its_nodes_stand_outside() {
    let Some(mut region) = Region::start(2) else {
        return;
    };
    let backend = HeldBackend::start();
    let _agent = region.run_agent(&backend.url);
    region.owner();
    let standby = region.postgres.standby();
    // The first node never reaches the other server.
    let store = url(&region.postgres, &standby);
    restart_at(&mut region, 1, &store);
    region.wait_for_members(2);
    assert_eq!(change(&region, 0).0, 201);

    promote(&standby);
    wait_until_refused(&region, 0);
    let before = revision(&region.postgres);
    let names = names([&region.postgres, &standby]);
    for node in [0, 1] {
        await_names(&region, node, &names);
        let log = &region.node(node).log;
        let line = log.line_with("PostgreSQL takes changes at");
        assert!(has_all(&line, &names), "{line}");
    }
    assert_commands_name(&region, 1, &names);
    assert_doctor_asks_the_process(&region, 0, &names);
    let status = status(&region, 1);
    let known = revision(&standby);
    assert_eq!(status["region"]["revision"].to_string(), known);
    assert_eq!(change(&region, 1).0, 201);
    assert_eq!(change(&region, 0), refused());
    assert_eq!(revision(&region.postgres), before);
    assert!(revision(&standby) > known, "of the newer primary");
    assert_both_relay(&region);

    wait_until_first_is_outside(&region);
    assert_both_relay(&region);

    region.postgres.stop();
    eventually("one server takes changes", || {
        (readiness(&region, 1).1 == "ready\n").then_some(())
    });
    restart_at(&mut region, 0, &store);
    region.wait_for_members(2);
    assert_eq!(change(&region, 0).0, 201);
}

/// Waits until both nodes know that the first one is dead, and the agent is at the second one. The
/// first one has no beats at the newer primary, and learns of that from the second one.
fn wait_until_first_is_outside(region: &Region) {
    eventually("both nodes know the members", || {
        let members = [0, 1].map(|node| {
            let status = region.status(node);
            let nodes = status["nodes"].as_array().unwrap();
            let states: Vec<_> = nodes.iter().map(|it| it["state"].clone()).collect();
            (status["epoch"].clone(), states)
        });
        let [(_, states), other] = &members;
        let is_over = states[..] == ["dead", "live"] && members[0] == *other;
        is_over.then_some(())
    });
    eventually("the agent is at the other node", || {
        (region.metric(1, "gw_tunnels") >= 1.0).then_some(())
    });
}

#[test]
fn changes_at_two_primaries_of_one_timeline_are_refused_until_one_is_stopped() {
    let Some(mut region) = Region::start(1) else {
        return;
    };
    let backend = HeldBackend::start();
    let _agent = region.run_agent(&backend.url);
    region.owner();
    let mut copy = region.postgres.copy();
    let store = url(&copy, &region.postgres);
    restart_at(&mut region, 0, &store);
    region.owner();
    assert_eq!(change(&region, 0), refused());
    let names = names([&region.postgres, &copy]);
    await_names(&region, 0, &names);
    assert_commands_name(&region, 0, &names);
    assert_eq!(region.request(0), "200");

    copy.stop();
    wait_until_changed(&region, 0);
    assert_eq!(readiness(&region, 0), ready());
}

/// Otherwise nodes whose epoch has gone on at the older primary do not follow the newer one.
#[test]
fn epochs_at_a_newer_primary_are_later_from_the_first_statement_on() {
    let Some(older) = Postgres::with_region() else {
        return;
    };
    let newer = promoted_standby(&older);
    let source = older.source_at(&newer.url(), "a");
    let mut store = PostgresStore::new(&source).unwrap();
    store.load().unwrap();
    let (_, roster) = store.run(&Statement::Read).unwrap();
    assert!(roster.epoch >= PROMOTED, "{roster:?}");
}

#[test]
fn changes_stay_refused_while_one_of_two_equal_primaries_does_not_answer() {
    let Some(first) = Postgres::with_region() else {
        return;
    };
    let copy = first.copy();
    let gate = Gate::to(Target::Unix(copy.socket()));
    let hosts = format!(",{}/postgres", gate.address);
    let source = first.source_at(&first.url().replace("/postgres", &hosts), "a");
    let is_refused = || {
        source.settings.look_for_primaries("a");
        source.settings.refuse_equal_primaries().is_err()
    };
    eventually("both are found", || is_refused().then_some(()));
    gate.set(Passage::Stalled);
    assert!(is_refused());
    drop(copy);
    gate.set(Passage::Open);
    assert!(is_refused(), "it closes connections");
}

/// A copy may be old: nodes that used it would accept keys that were deleted since.
#[test]
fn of_two_equal_primaries_the_one_with_more_changes_is_used_also_after_its_restart() {
    let Some(mut first) = Postgres::with_region() else {
        return;
    };
    let copy = first.copy();
    first.sql("UPDATE gw.region SET revision = revision + 1, epoch = epoch + 7");
    let epoch = first.sql("SELECT epoch FROM gw.region");
    first.stop();
    first.resume();
    let source = first.source_at(&url(&copy, &first), "a");
    source.settings.look_for_primaries("a");
    let mut store = PostgresStore::new(&source).unwrap();
    let (_, roster) = store.run(&Statement::Read).unwrap();
    assert_eq!(roster.epoch.to_string(), epoch);
}

#[test]
fn a_change_is_refused_if_the_next_server_is_equal_to_the_last_one() {
    let Some(first) = Postgres::with_region() else {
        return;
    };
    let copy = first.copy();
    let gate = Gate::to(Target::Unix(copy.socket()));
    let hosts = format!("@{},", gate.address);
    let source = first.source_at(&first.url().replacen('@', &hosts, 1), "a");
    let mut store = PostgresStore::new(&source).unwrap();
    let position = store.load().unwrap().position;
    let entry = AuditEntry {
        at: Timestamp(1),
        actor: "test".to_owned(),
        action: "test".into(),
        account: None,
        target: "test".to_owned(),
        detail: Value::Null,
    };
    gate.set(Passage::Stalled);
    eventually("changes are refused", || {
        let made = store.commit(&position, &[], &entry);
        match made.unwrap_err() {
            StoreError::SeveralPrimaries(_) => Some(()),
            error => {
                assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
                None
            }
        }
    });
}

#[test]
fn nodes_at_two_primaries_of_one_timeline_refuse_changes_and_one_is_outside() {
    let Some(mut region) = Region::start(2) else {
        return;
    };
    let backend = HeldBackend::start();
    let _agent = region.run_agent(&backend.url);
    region.owner();
    // The name that the second node has for the server.
    let folder = tempfile::tempdir().unwrap();
    let socket = region.postgres.socket();
    let name = folder.path().join(socket.file_name().unwrap());
    symlink(&socket, &name).unwrap();
    let store = region.postgres.url();
    let host = store.split(['@', '/']).nth(3).unwrap();
    let encoded = folder.path().display().to_string().replace('/', "%2F");
    restart_at(&mut region, 1, &store.replace(host, &encoded));
    region.wait_for_members(2);

    // It becomes that of a copy, which only this node reaches.
    let mut copy = region.postgres.copy();
    fs::remove_file(&name).unwrap();
    symlink(copy.socket(), &name).unwrap();
    region.postgres.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()",
    );
    let names = [&socket, &name].map(|path| path.parent().unwrap().display().to_string());
    for node in [0, 1] {
        wait_until_refused(&region, node);
        await_names(&region, node, &names);
    }
    let ticks = || copy.sql("SELECT epoch, tick FROM gw.region");
    let before = ticks();
    eventually("requests are served", || {
        let answers = [0, 1].map(|node| region.request(node));
        (answers == ["200", "200"]).then_some(())
    });
    assert_eq!(ticks(), before, "no leases at the copy");

    copy.stop();
    wait_until_changed(&region, 0);
    fs::remove_file(&name).unwrap();
    symlink(&socket, &name).unwrap();
    region.wait_for_members(2);
    assert_eq!(change(&region, 1).0, 201);
}

#[test]
fn a_store_at_a_copy_is_not_used_once_it_is_told_of_the_first_server() {
    let Some(first) = Postgres::with_region() else {
        return;
    };
    let copy = first.copy();
    let [of_first, of_copy] = [first.source("a"), copy.source("b")];
    let mut store = PostgresStore::new(&of_copy).unwrap();
    store.run(&Statement::Tick).unwrap();
    PostgresStore::new(&of_first).unwrap().load().unwrap();
    of_copy.settings.told(of_first.settings.known_primaries());
    let ran = store.run(&Statement::Tick);
    assert!(matches!(ran, Err(StoreError::SeveralPrimaries(_))));
}

#[test]
fn a_node_that_is_restarted_or_replaced_uses_no_older_primary() {
    let Some(mut region) = Region::start(1) else {
        return;
    };
    let mut standby = region.postgres.standby();
    let store = url(&region.postgres, &standby);
    restart_at(&mut region, 0, &store);
    region.wait_for_members(1);
    promote(&standby);
    let kept = region.data(0).join("node.json");
    eventually("the node has the newer primary in its file", || {
        let text = fs::read_to_string(&kept).unwrap();
        text.contains("\"timeline\":2").then_some(())
    });
    wait_until_changed(&region, 0);
    let copy = region.data(0).join("records.sealed");
    eventually("the node has a copy", || copy.exists().then_some(()));
    standby.stop();

    let names = names([&region.postgres, &standby]);
    let assert_refuses = |region: &Region| {
        eventually("changes are refused, and both servers are named", || {
            assert_ne!(change(region, 0).0, 201);
            let (_, text) = readiness(region, 0);
            (change(region, 0) == refused() && has_all(&text, &names)).then_some(())
        });
    };
    let served = region.node(0);
    let successor = replace(served.process.id(), &served.log);
    assert_refuses(&region);
    drop(successor);
    region.kill(0);
    region.restart(0);
    assert_refuses(&region);
    standby.resume();
    wait_until_changed(&region, 0);
}

#[test]
fn epochs_are_later_after_each_promotion_also_of_another_cluster() {
    let Some(first) = Postgres::with_region() else {
        return;
    };
    let tick = |server: &Postgres| {
        let mut store = PostgresStore::new(&server.source("a")).unwrap();
        let (is_applied, roster) = store.run(&Statement::Tick).unwrap();
        assert!(is_applied);
        roster.epoch
    };
    let newer = promoted_standby(&first);
    let before = tick(&newer);
    assert!(tick(&first) < PROMOTED && before >= PROMOTED);

    // The timelines of a cluster that pg_upgrade has made begin with 1.
    let upgraded = Postgres::of_another_cluster();
    upgraded.sql(&format!("UPDATE gw.region SET epoch = {before} + 5"));
    let moved = tick(&upgraded);
    assert!(moved > before + 5 && tick(&upgraded) == moved);
    upgraded.sql("UPDATE gw.region SET epoch = epoch + 5");
    assert!(tick(&promoted_standby(&upgraded)) > moved + 5);
}

#[test]
fn another_cluster_is_used_once_the_earlier_one_has_ended() {
    let Some(mut earlier) = Postgres::with_region() else {
        return;
    };
    let upgraded = Postgres::of_another_cluster();
    let source = earlier.source_at(&url(&earlier, &upgraded), "a");
    let load = || {
        source.settings.look_for_primaries("a");
        PostgresStore::new(&source).unwrap().load()
    };
    load().unwrap();
    assert!(source.settings.refuse_equal_primaries().is_err());
    earlier.stop();
    load().unwrap();
    assert!(source.settings.refuse_equal_primaries().is_ok());
}

#[test]
fn an_older_primary_is_not_used_while_the_newer_one_is_away() {
    let Some(older) = Postgres::with_region() else {
        return;
    };
    let mut newer = promoted_standby(&older);
    let source = older.source_at(&url(&older, &newer), "a");
    source.settings.look_for_primaries("a");
    PostgresStore::new(&source).unwrap().load().unwrap();
    newer.stop();
    let names = names([&older, &newer]);
    let is_refused = |mut store: PostgresStore| match store.load() {
        Err(StoreError::SeveralPrimaries(text)) => assert!(has_all(&text, &names), "{text}"),
        loaded => panic!("{:?}", loaded.map(|snapshot| snapshot.position)),
    };
    is_refused(PostgresStore::new(&source).unwrap());

    // Another node that is connected to the older one is told.
    let other = older.source("b");
    let mut store = PostgresStore::new(&other).unwrap();
    store.load().unwrap();
    other.settings.told(source.settings.known_primaries());
    is_refused(store);

    newer.resume();
    PostgresStore::new(&source).unwrap().load().unwrap();
}

#[test]
fn a_failover_fails_no_request_and_begins_later_epochs() {
    let Some(mut region) = Region::start(2) else {
        return;
    };
    let backend = HeldBackend::start();
    let _agent = region.run_agent(&backend.url);
    region.owner();
    let standby = region.postgres.standby();
    let store = url(&region.postgres, &standby);
    for node in [0, 1] {
        restart_at(&mut region, node, &store);
        region.wait_for_members(2);
    }
    region.owner();
    assert_both_relay(&region);
    let before = epoch(&region, 0);
    region.postgres.stop();
    promote(&standby);
    eventually("nodes make changes at the new primary", || {
        assert_both_relay(&region);
        let made = [0, 1].map(|node| change(&region, node).0);
        (made == [201, 201]).then_some(())
    });
    eventually("the epochs are later", || {
        assert_both_relay(&region);
        let epochs = [0, 1].map(|node| epoch(&region, node));
        epochs.iter().all(|epoch| *epoch >= PROMOTED).then_some(())
    });
    assert!(before < PROMOTED, "{before}");
    region.wait_for_members(2);
    assert_both_relay(&region);
    for node in [0, 1] {
        assert_eq!(readiness(&region, node), ready(), "at node {node}");
    }
}
