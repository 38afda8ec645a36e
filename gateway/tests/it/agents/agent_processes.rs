//! The processes of `gw-agent run`: replaced for a new configuration, or a restart by the service
//! manager, without a failed request.

use std::fs;
use std::path::Path;

use crate::support::agents::supervised_agent::{Agent, configuration, only_worker};
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::caller::Caller;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{Running, children, has_ended, send_signal};

/// Waits until the supervisor has one worker, other than `before`.
fn replaced(supervisor: u32, before: u32) -> u32 {
    eventually("the worker is replaced", || {
        match children(supervisor).as_slice() {
            [worker] if *worker != before => Some(*worker),
            _ => None,
        }
    })
}

/// A backend that answers each request with this status.
fn backend_with(status: u16) -> String {
    backend::start(move |mut peer| {
        while peer.request().is_ok() {
            peer.send(format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n"));
        }
    })
}

/// A request that the backend holds.
fn held_request(it: &Agent<'_>, held: &HeldBackend) -> Caller {
    let mut caller = it.prepared.connect(it.gateway.address);
    caller.send(it.prepared.get("/held"));
    held.wait_for_held();
    caller
}

#[test]
fn a_reload_uses_the_new_configuration_without_a_failed_request() {
    let prepared = Prepared::new();
    let held = HeldBackend::start();
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    let mut agent = it.start(&it.configure(&configuration(&held.url)));
    let first = only_worker(agent.id());
    let mut caller = held_request(&it, &held);

    it.while_calling(|| {
        it.configure(&configuration(&backend_with(203)));
        agent.signal("HUP");
        it.eventually_answered_with(203);
    });
    // The first worker finishes the request that it has, after further replacements too.
    for _ in 0..2 {
        let before = children(agent.id());
        agent.signal("HUP");
        eventually("the worker is replaced again", || {
            match children(agent.id()).as_slice() {
                [one, other] if *one == first && !before.contains(other) => Some(()),
                _ => None,
            }
        });
    }
    held.release();
    assert_eq!(caller.response().status, 200);
    let second = replaced(agent.id(), first);

    it.while_calling(|| {
        it.configure("backend = 7\n");
        agent.signal("HUP");
        it.wait_for_log("the agent is not replaced");
        it.configure(&configuration(&backend_with(204)));
        agent.signal("USR2");
        it.eventually_answered_with(204);
    });
    let third = replaced(agent.id(), second);
    agent.stop();
    assert!(!Path::new(&format!("/proc/{third}")).exists());
}

#[test]
fn a_restart_of_a_lone_agent_fails_no_request() {
    let prepared = Prepared::new();
    let held = HeldBackend::start();
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    let config = it.configure(&configuration(&held.url));
    let mut before = it.start(&config);
    let worker = only_worker(before.id());
    let mut caller = held_request(&it, &held);

    let mut after = it.while_calling(|| {
        // The unit of systemd restarts an agent like this.
        before.signal("USR1");
        assert_eq!(before.exit_code(), Some(0));
        let after = Running::new(it.command(&config).spawn().unwrap());
        eventually("the second process has its tunnel", || {
            let log = fs::read_to_string(prepared.path("agent.log")).unwrap();
            (log.matches("tunnel ready").count() == 2).then_some(())
        });
        after
    });
    assert!(!has_ended(worker), "the first worker has a request");
    held.release();
    assert_eq!(caller.response().status, 200);
    eventually("the first worker ends", || has_ended(worker).then_some(()));
    it.while_calling(|| {});
    after.stop();
}

#[test]
fn a_second_signal_ends_the_worker_with_its_requests() {
    let prepared = Prepared::new();
    let held = HeldBackend::start();
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    let mut agent = it.start(&it.configure(&configuration(&held.url)));
    let worker = only_worker(agent.id());
    let mut caller = held_request(&it, &held);
    agent.signal("TERM");
    it.wait_for_log("a second signal aborts them");
    agent.signal("TERM");
    assert_eq!(agent.exit_code(), Some(1));
    assert!(!send_signal(worker, "CONT"), "no worker is left");
    assert_eq!(caller.response().code(), "GW_RELAY_ERROR");
}

#[test]
fn a_worker_ends_with_its_requests_when_the_supervisor_is_killed() {
    let prepared = Prepared::new();
    let held = HeldBackend::start();
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    let config = it.configure(&configuration(&held.url));
    let agent = it.start(&config);
    let worker = only_worker(agent.id());
    let mut caller = held_request(&it, &held);
    agent.signal("KILL");
    drop(agent);
    // The state folder is free at once.
    let _agent = it.start(&config);
    held.release();
    assert_eq!(caller.response().status, 200);
    eventually("the worker ends", || {
        (!send_signal(worker, "CONT")).then_some(())
    });
}
