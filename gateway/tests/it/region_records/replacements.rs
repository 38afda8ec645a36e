//! A process is replaced while another node changes the records.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use http::Method;
use serde_json::json;

use super::store::Writer;
use super::{OK, StopOnDrop};
use crate::support::eventually;
use crate::support::limits::DRAIN_IDLE_SUCCEEDED;
use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST};
use crate::support::processes::region::Region;
use crate::support::processes::successor::{Successor, replace};
use crate::support::stopwatch::in_time;

const REPLACEMENTS: usize = 8;

/// Status of a request. Fails if the gateway has closed the connection.
fn status(region: &Region, caller: &mut Caller) -> io::Result<u16> {
    let key = region.service_key();
    caller.try_send(format!(
        "GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n"
    ))?;
    Ok(caller.try_response(&Method::GET)?.status.as_u16())
}

/// Replaces the process of the node and changes records. `None` if the replaced process may have
/// closed an idle connection before it was used again.
fn replaced(region: &Region, successors: &mut Vec<Successor>) -> Option<()> {
    let node = region.node(0);
    let mut kept = region.connect(0);
    assert_eq!(status(region, &mut kept).unwrap(), 200);
    let process = successors.last().map_or(node.process.id(), |last| last.0);
    let began = Instant::now();
    successors.push(replace(process, &node.log));
    // Without a node that is behind: the replaced process says that it uses the change.
    let api = region.api(0);
    for allowed in [true, false] {
        let changes = json!({ "capture_allowed": allowed });
        let patched = api.ask("PATCH", "/accounts/demo", &changes);
        assert_eq!((patched.status, &*patched.pending_nodes), (200, ""));
    }
    let status = status(region, &mut kept);
    let is_late = began.elapsed() >= DRAIN_IDLE_SUCCEEDED;
    assert!(region.metric(0, "gw_background_panics_total") < 0.5);
    drop(kept);
    eventually("the agent is at the new process", || {
        (region.metric(0, "gw_tunnels") >= 1.0).then_some(())
    });
    match status {
        Ok(status) => assert_eq!(status, 200),
        Err(error) => {
            assert!(is_late, "{error}");
            return None;
        }
    }
    Some(())
}

#[test]
fn replacements_beside_changes_of_another_node_pass_them_on() {
    let Some(region) = Region::start(1) else {
        return;
    };
    let _agent = region.run_agent(&backend::answering(OK));
    region.owner();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        scope.spawn(|| {
            let mut other = Writer::start(&region.postgres, "other");
            for number in 0.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                other.create(&format!("account{number:06}"));
                // Leaves room for the changes of the node.
                thread::sleep(Duration::from_millis(10));
            }
        });
        let mut successors: Vec<Successor> = Vec::new();
        for _ in 0..REPLACEMENTS {
            in_time(
                "an idle connection of a replaced process stays open",
                || replaced(&region, &mut successors),
            );
        }
    });
}
