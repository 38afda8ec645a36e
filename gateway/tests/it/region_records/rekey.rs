//! The region key is replaced while nodes, agents and callers go on.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::{Value, json};

use super::{Ended, OK, StopOnDrop, assert_says, config_file, region_command};
use crate::region_losses::load::Load;
use crate::region_records::clocks::token;
use crate::region_records::records::Node;
use crate::support::admin_api::Api;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::peers::backend;
use crate::support::processes::postgres::Postgres;
use crate::support::processes::region::Region;
use crate::support::processes::successor::{Successor, replace};

/// Runs `gw-gateway region rekey` with the configuration of a node that is not started.
fn rekey(postgres: &Postgres) -> Ended {
    let folder = tempfile::tempdir().unwrap();
    let config = config_file(postgres, &folder.path().join("data"));
    region_command("rekey", &config, &[])
}

/// All rows that a key authenticates or seals.
fn rows(postgres: &Postgres) -> String {
    const ROWS: &str = "
        SELECT (SELECT string_agg(row::text, ' ' ORDER BY kind, id) FROM gw.records row),
            (SELECT string_agg(row::text, ' ') FROM gw.secrets row),
            (SELECT string_agg(row::text, ' ') FROM gw.changes row),
            id, revision, last_change, tag, key_check FROM gw.region";
    postgres.sql(ROWS)
}

/// A region with an account and a signing key, and a next key.
fn region() -> Option<Postgres> {
    let postgres = Postgres::with_region()?;
    postgres.make_next_key();
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(&postgres, folder.path(), "first");
    let api = node.gateway.api();
    api.create_account("first");
    assert_eq!(api.list("/signing-keys").len(), 1);
    node.gateway.drain();
    Some(postgres)
}

#[test]
fn changes_of_the_same_moment_are_kept_under_the_next_key() {
    let Some(postgres) = region() else { return };
    let folder = tempfile::tempdir().unwrap();
    let names = ["a", "b", "c"];
    let nodes = names.map(|name| Node::start(&postgres, folder.path(), name));
    let api = nodes[0].gateway.api();
    api.create_service("demo", "echo");
    let credential = api.create_credential("demo", &["echo"]);
    api.post("/agent-ca/replace", &json!({ "immediately": true }));
    api.await_workers();
    let before = token(&nodes[0].about(), &credential);
    let accounts = || -> usize {
        let count = "SELECT count(*) FROM gw.records WHERE kind = 'account'";
        postgres.sql(count).parse().unwrap()
    };
    let others = accounts();
    let apis = nodes.each_ref().map(|node| node.gateway.api());
    let made = while_accounts_are_created(&apis, |wait_for_changes| {
        wait_for_changes(20);
        let replaced = rekey(&postgres).done();
        let written = replaced.split(' ').find_map(|word| word.parse().ok());
        let has_all = written.is_some_and(|records: usize| records >= 22);
        assert!(has_all, "{replaced}");
        wait_for_changes(20);
    });
    for node in nodes {
        node.gateway.drain();
    }
    // With the next key alone, all records are authentic, and all changes are there.
    postgres.exchange_keys();
    let node = Node::start(&postgres, folder.path(), "after");
    assert_eq!(accounts(), made + others);
    // The private keys are the same: of the authority of agents, and of tokens.
    let _agent = node.agent(folder.path(), &backend::answering(OK));
    wait_until_relayed(&node, &before);
    wait_until_relayed(&node, &token(&node.about(), &credential));
    let replacements = "SELECT count(*) FROM gw.audit WHERE action = 'region.rekey'";
    assert_eq!(postgres.sql(replacements), "1");
}

/// Creates accounts by each of `apis` during `action`, which can wait for a number of them. Returns
/// how many were created.
fn while_accounts_are_created(apis: &[Api], action: impl FnOnce(&dyn Fn(usize))) -> usize {
    let stop = AtomicBool::new(false);
    let made = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        for (node, api) in apis.iter().enumerate() {
            let (stop, made) = (&stop, &made);
            scope.spawn(move || {
                for number in (0..).take_while(|_| !stop.load(Ordering::SeqCst)) {
                    api.create_account(&format!("acme{node}x{number}"));
                    made.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        action(&|count: usize| {
            let until = made.load(Ordering::SeqCst) + count;
            eventually("changes are made", || {
                (made.load(Ordering::SeqCst) >= until).then_some(())
            });
        });
    });
    made.into_inner()
}

/// Waits until a node relays a request with this token.
fn wait_until_relayed(node: &Node, token: &str) {
    let field = format!("X-Gw-Authorization: Bearer {token}");
    eventually("a request is relayed", || {
        (node.response_to(&field).status == 200).then_some(())
    });
}

#[test]
fn a_node_with_the_earlier_key_alone_does_not_start_after_a_replacement() {
    let Some(postgres) = region() else { return };
    rekey(&postgres).done();
    let earlier = postgres.exchange_keys();
    let folder = tempfile::tempdir().unwrap();
    let next = postgres.key_file().display().to_string();
    let config = postgres.config(&folder.path().join("earlier"));
    let config = config.replace(&next, &earlier.display().to_string());
    let refused = Gateway::try_start(&config).err().unwrap();
    let reason = "the region key differs from the key of the other nodes";
    assert_says(&refused, &[reason]);
}

#[test]
fn the_key_of_a_region_is_not_replaced_by_itself() {
    let Some(postgres) = region() else { return };
    rekey(&postgres).done();
    let reason = "region_key_next is the key of the region already";
    rekey(&postgres).assert_failed(&[reason]);
}

#[test]
fn the_copy_of_a_node_that_started_without_postgresql_is_written_again_with_the_key_in_use() {
    let Some(mut postgres) = region() else { return };
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(&postgres, folder.path(), "a");
    rekey(&postgres).done();
    // The answer to a change means that the data folder has it, too.
    node.gateway.api().create_account("kept");
    let newest = node.revision();
    let [copy, journal] = ["records.sealed", "records.journal"].map(|file| node.file(file));
    node.gateway.drain();
    postgres.stop();
    let restart = |postgres: &Postgres, before: &[u8]| {
        let node = Node::start(postgres, folder.path(), "a");
        assert!(node.revision() >= newest, "it knows all records");
        eventually("the copy is written", || {
            Some(fs::read(&copy).unwrap()).filter(|now| now != before)
        });
        node
    };
    // Without PostgreSQL, it seals with `region_key`, which is the earlier one.
    let node = restart(&postgres, &fs::read(&copy).unwrap());
    let before = fs::read(&copy).unwrap();
    postgres.resume();
    eventually("the copy is written again", || {
        (fs::read(&copy).unwrap() != before).then_some(())
    });
    let revision = postgres.sql("SELECT revision FROM gw.region");
    let expected = newest.to_string();
    assert_eq!(revision, expected, "no change has made another copy due");
    eventually("the journal begins again", || {
        fs::read(&journal).unwrap().is_empty().then_some(())
    });
    node.gateway.drain();
    postgres.stop();
    // The next key alone opens it.
    postgres.exchange_keys();
    restart(&postgres, &fs::read(&copy).unwrap())
        .gateway
        .drain();
}

/// A statement of a node that joins while the key is replaced: its row has a tag of the earlier
/// key.
const JOIN: &str = "
    INSERT INTO gw.nodes (slot, session, state, peer_address, version, tag)
    SELECT 7, gen_random_uuid(), 'joining', '127.0.0.1:1', '1', '' FROM gw.region
    WHERE key_check = (SELECT earlier FROM checked) FOR SHARE";

#[test]
fn a_node_that_joins_while_the_key_is_replaced_waits_and_gets_no_row_of_the_earlier_key() {
    let Some(postgres) = region() else { return };
    // Everything but the nodes is written; the replacement goes on when the other statement waits
    // for it.
    postgres.sql(
        "CREATE TABLE checked AS SELECT key_check AS earlier FROM gw.region;
         CREATE FUNCTION await() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            PERFORM pg_advisory_xact_lock(7);
            LOOP
                PERFORM pg_stat_clear_snapshot();
                EXIT WHEN EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock');
                PERFORM pg_sleep(0.01);
            END LOOP;
            RETURN NEW;
         END $$;
         CREATE TRIGGER await BEFORE INSERT ON gw.audit FOR EACH ROW EXECUTE FUNCTION await()",
    );
    std::thread::scope(|scope| {
        let replaced = scope.spawn(|| rekey(&postgres));
        let is_writing = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 7";
        eventually("the replacement writes", || {
            (postgres.sql(is_writing) == "1").then_some(())
        });
        postgres.sql(JOIN);
        replaced.join().unwrap().done();
    });
    let rows = "SELECT count(*) FROM gw.nodes WHERE slot = 7";
    assert_eq!(postgres.sql(rows), "0");
}

#[test]
fn a_replacement_that_fails_changes_nothing() {
    let Some(postgres) = region() else { return };
    let before = rows(&postgres);
    let assert_refused = |parts: &[&str]| rekey(&postgres).assert_failed(parts);
    postgres.sql("UPDATE gw.region SET schema = schema + 1");
    assert_refused(&["too new for this program"]);
    postgres.sql("UPDATE gw.region SET schema = schema - 1");
    // What cannot be read afterwards is not committed.
    postgres.sql(
        "CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN NEW.document := NEW.document || ' '; RETURN NEW; END $$;
         CREATE TRIGGER spoil BEFORE UPDATE ON gw.records FOR EACH ROW EXECUTE FUNCTION spoil()",
    );
    assert_refused(&["cannot be read with region_key_next", "nothing was changed"]);
    postgres.sql("DROP TRIGGER spoil ON gw.records");
    assert_eq!(rows(&postgres), before);
    // A row that no gateway has written does not get a tag.
    postgres.sql("UPDATE gw.records SET tag = '' WHERE kind = 'account'");
    assert_refused(&["account first", "region repair"]);
    postgres.sql("DELETE FROM gw.records WHERE kind = 'account'");
    assert_refused(&["some were removed"]);
    let key_check = |rows: &str| rows.rsplit('|').next().map(str::to_owned);
    assert_eq!(key_check(&rows(&postgres)), key_check(&before));
}

#[test]
fn a_replacement_whose_connection_breaks_leaves_the_earlier_key_and_can_be_repeated() {
    let Some(postgres) = region() else { return };
    let before = rows(&postgres);
    // Near the end of the transaction, which has written everything but the nodes.
    postgres.sql(
        "CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NEW; END $$;
         CREATE TRIGGER stop BEFORE INSERT ON gw.audit FOR EACH ROW EXECUTE FUNCTION stop()",
    );
    rekey(&postgres).assert_failed(&["whether the key was replaced is not known"]);
    assert_eq!(rows(&postgres), before);
    postgres.sql("DROP TRIGGER stop ON gw.audit");
    let folder = tempfile::tempdir().unwrap();
    let starts = |name| Node::start(&postgres, folder.path(), name).gateway.drain();
    starts("b");
    rekey(&postgres).done();
    postgres.exchange_keys();
    starts("c");
}

/// The keys that each node shows, as `region status` with the configuration of a node has them.
fn shown_keys(region: &Region, node: usize) -> Vec<Value> {
    let status = region_command("status", &region.config(node), &["--json"]).out;
    let status: Value = serde_json::from_str(&status).unwrap();
    let nodes = status["nodes"].as_array().unwrap().iter();
    nodes.map(|node| node["keys"].clone()).collect()
}

/// Waits until the status with the configuration of a node shows these keys of each node.
fn wait_for_keys(region: &Region, node: usize, expected: &[Value]) {
    eventually("the nodes show their keys", || {
        (shown_keys(region, node) == expected).then_some(())
    });
}

/// Replaces a line of the configuration of a node.
fn reconfigure(region: &Region, node: usize, from: &str, to: &str) {
    let text = fs::read_to_string(region.config(node)).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(region.config(node), text.replace(from, to)).unwrap();
}

#[test]
fn no_request_and_no_change_fails_while_the_key_of_running_nodes_is_replaced() {
    let Some(mut region) = Region::start(0) else {
        return;
    };
    let next = format!(
        "region_key_next = \"{}\"\n",
        region.postgres.next_key_file().display()
    );
    region.postgres.make_next_key();
    for _ in 0..3 {
        region.add();
    }
    region.wait_for_members(3);
    let _agent = region.run_agent(&backend::answering(OK));
    let owner = region.owner();
    let before = enrollments(&region);
    let ended = region.metric(owner, "gw_tunnels_ended_total");
    let callers = Load::start(&region, 3);
    callers.wait_for(100);
    wait_for_keys(&region, 0, &vec![json!(["in use", "next"]); 3]);

    let apis = [0, 1, 2].map(|node| region.api(node));
    let made = while_accounts_are_created(&apis, |wait_for_changes| {
        wait_for_changes(5);
        region_command("rekey", &region.config(1), &[]).done();
        wait_for_changes(10);
    });
    callers.wait_for(200);
    wait_for_keys(&region, 0, &vec![json!(["in use", "earlier"]); 3]);
    region.wait_for_members(3);
    let ended_now = region.metric(owner, "gw_tunnels_ended_total");
    assert_eq!(ended_now, ended, "no agent connected again");

    let earlier = region.postgres.exchange_keys();
    let mut successors: Vec<Successor> = Vec::new();
    for node in 0..3 {
        reconfigure(&region, node, &next, "");
        let served = region.node(node);
        successors.push(replace(served.process.id(), &served.log));
        callers.wait_for(100);
    }
    wait_for_keys(&region, 0, &vec![json!(["in use"]); 3]);
    region.wait_for_members(3);
    callers.stop().assert_no_failure(|_| true);
    region.await_owner(owner);
    assert_eq!(enrollments(&region), before, "no agent enrolled again");
    let accounts = "SELECT count(*) FROM gw.records WHERE kind = 'account'";
    assert_eq!(region.postgres.sql(accounts), (made + 1).to_string());

    a_file_with_the_earlier_key_is_refused(&region, &earlier);
}

fn a_file_with_the_earlier_key_is_refused(region: &Region, earlier: &Path) {
    let earlier = earlier.file_name().unwrap().to_str().unwrap();
    reconfigure(region, 0, "region.key", earlier);
    let refused = region_command("join", &region.config(0), &[]);
    assert_ne!(refused.code, 0, "{refused:?}");
    assert_says(&refused.out, &["the region key differs"]);
}

/// Entries of the audit log about agents.
fn enrollments(region: &Region) -> String {
    region.postgres.sql(
        "SELECT string_agg(number || action, ' ' ORDER BY number) FROM gw.audit WHERE action \
              ~ 'agent|enroll'",
    )
}

#[test]
fn a_node_without_the_next_key_is_named_and_goes_on_from_memory() {
    let Some(mut region) = Region::start(1) else {
        return;
    };
    region.postgres.make_next_key();
    region.add();
    region.wait_for_members(2);
    let _agent = region.run_agent(&backend::answering(OK));
    region.owner();
    let without = [json!(["in use"]), json!(["in use", "next"])];
    wait_for_keys(&region, 1, &without);
    let before = rows(&region.postgres);
    let refused = region_command("rekey", &region.config(1), &[]);
    refused.assert_failed(&["the nodes 0 do not have the next key", "SIGUSR2"]);
    assert_eq!(rows(&region.postgres), before);

    region_command("rekey", &region.config(1), &["--force"]).done();
    let log = &region.node(0).log;
    log.line_with("the region key differs from the key of the other nodes");
    assert_eq!([region.request(0), region.request(1)], ["200", "200"]);
    let one_is_behind = [json!(["earlier"]), json!(["in use", "earlier"])];
    wait_for_keys(&region, 1, &one_is_behind);

    // With the key, it is as before.
    let key = |setting: &str, file: &Path| format!("{setting} = \"{}\"\n", file.display());
    let own = key("region_key", &region.postgres.key_file());
    let next = key("region_key_next", &region.postgres.next_key_file());
    reconfigure(&region, 0, &own, &format!("{own}{next}"));
    let served = region.node(0);
    let _successor = replace(served.process.id(), &served.log);
    region.wait_for_members(2);
    wait_for_keys(&region, 1, &vec![json!(["in use", "earlier"]); 2]);
    assert_eq!([region.request(0), region.request(1)], ["200", "200"]);
}
