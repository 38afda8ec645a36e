//! Changes while the server or its standby does not answer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::Writer;
use crate::support::eventually;
use crate::support::peers::gate::{Gate, Passage, Target};
use crate::support::processes::postgres::Postgres;
use crate::support::stopwatch::within;

/// Asserts that a change is refused within two seconds.
fn is_refused_soon(writer: &mut Writer) {
    let refused = within(Duration::from_secs(2), "the refusal of a change", || {
        writer.try_create("acme2")
    });
    assert_eq!(refused, Err("unavailable"));
}

#[test]
fn changes_are_refused_soon_while_the_server_does_not_answer() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let gate = Gate::to(Target::Unix(postgres.socket()));
    let url = format!("postgres://gw@{}/postgres", gate.address);
    let mut writer = Writer::start_at(&postgres, &url, "a");
    writer.create("acme1");
    gate.set(Passage::Stalled);
    // The first one waits on its connection, the others for a new one.
    for _ in 0..4 {
        is_refused_soon(&mut writer);
    }
    gate.set(Passage::Open);
    // What was sent meanwhile may be committed now.
    eventually("the server takes changes", || {
        writer.reload()?;
        writer.try_create("acme3").ok()
    });
}

#[test]
fn changes_are_refused_soon_while_the_server_is_stopped() {
    let Some(mut postgres) = Postgres::with_region() else {
        return;
    };
    let mut writer = Writer::start(&postgres, "a");
    writer.create("acme1");
    postgres.stop();
    // A commit waits some time for another primary.
    for _ in 0..3 {
        is_refused_soon(&mut writer);
    }
    postgres.resume();
    writer.create("acme2");
    assert_eq!(writer.reload(), Some(2));
}

#[test]
fn a_change_that_the_standby_does_not_confirm_is_not_acknowledged() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let set = |names: &str| {
        postgres.sql(&format!(
            "ALTER SYSTEM SET synchronous_standby_names = '{names}'"
        ));
        postgres.sql("SELECT pg_reload_conf()");
        eventually("the setting applies", || {
            (postgres.sql("SHOW synchronous_standby_names") == names).then_some(())
        });
    };
    set("absent");
    let mut writer = Writer::start(&postgres, "a");
    let has_ended = AtomicBool::new(false);
    let refused = std::thread::scope(|scope| {
        // A cancelled wait ends with a warning, and the change can be seen.
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                postgres.sql(
                    "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event \
                              = 'SyncRep'",
                );
            }
        });
        let refused = writer.try_create("acme");
        has_ended.store(true, Ordering::Relaxed);
        refused
    });
    assert_eq!(refused, Err("unavailable"));
    set("");
    // It was made all the same. The server makes it visible when the wait ends.
    eventually("the change can be seen", || {
        (writer.reload() == Some(1)).then_some(())
    });
    assert_eq!(writer.audit(), [(1, "acme".to_owned())], "once");
}
