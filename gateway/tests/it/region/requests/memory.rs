//! Memory of the owner of a service for what another node sends on a link.

use std::fs;

use gw_shared::tunnel::endpoint::STREAMS_MAX;

use crate::support::agents::in_process;
use crate::support::agents::modified_agent::{self, Tunnel};
use crate::support::agents::tunnel_frames::hello;
use crate::support::peers::caller::{Caller, HOST};
use crate::support::processes::region::Region;
use crate::support::{eventually, turn};

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
/// Relay memory of the owner, half of which one account may hold.
const RELAY_MEMORY: usize = 256 * MIB;
/// Requests: more than that has room for.
const REQUESTS: usize = 800;
/// Body of each, of which the owner may get a part before it has room.
const BODY: usize = 128 * KIB;
/// Memory of an open request beside what is charged for it, and of the process that does not depend
/// on requests: also what it has freed and not given back before the first one.
const REQUEST: usize = 16 * KIB;
const PROCESS: usize = 8 * MIB;

/// Starts a node again with one worker and these further lines of configuration.
fn reconfigure(region: &mut Region, node: usize, lines: &str) {
    region.kill(node);
    let path = region.config(node);
    let config = fs::read_to_string(&path).unwrap();
    fs::write(
        &path,
        config.replace("workers = 2\n", &format!("workers = 1\n{lines}")),
    )
    .unwrap();
    region.restart(node);
    region.wait_for_members(2);
}

/// A tunnel of a modified agent, which reads nothing of requests.
fn tunnel(region: &Region) -> Tunnel {
    let identity = in_process::identity(&region.agent_folder());
    let about = region.about(0);
    let mut tunnel = Tunnel::upgrade(modified_agent::connection(&about, HOST, identity), HOST);
    tunnel.0.send(hello(u32::try_from(STREAMS_MAX).unwrap()));
    tunnel
}

#[test]
fn requests_of_another_node_grow_the_owner_by_no_more_than_the_share_of_the_account() {
    let _turn = turn();
    let Some(mut region) = Region::start(2) else {
        return;
    };
    let token = region.api(0).create_enrollment_token("demo", &["echo"]);
    region.enroll(token, &region.agent_folder());
    let found = tunnel(&region);
    let owner = region.owner();
    drop(found);
    let memory = format!("relay_memory_mib = {}\n", RELAY_MEMORY / MIB);
    reconfigure(&mut region, owner, &memory);
    reconfigure(&mut region, 1 - owner, "");
    let _tunnel = tunnel(&region);
    assert_eq!(region.owner(), owner);

    let key = region.service_key();
    let post = format!(
        "POST / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\nContent-Length: {BODY}\r\n\
         \r\n"
    );
    let post = [post.as_bytes(), &[b'b'; BODY - 1]].concat();
    let before = region.node(owner).resident();
    // A connection that waits for the others would have no request for too long on a busy machine.
    let send = |_| {
        let mut caller = region.connect(1 - owner);
        // Fails if the request was refused and the rest of its body is not read.
        let _ = caller.try_send(&post);
        caller
    };
    let _callers: Vec<Caller> = (0..REQUESTS).map(send).collect();
    let count = |node, name, label| region.metrics(node).count_with(name, label) as usize;
    let refused = || count(1 - owner, "gw_refusals_total", "GW_OVERLOADED");
    let in_flight = || count(owner, "gw_tunnel_in_flight", "demo");
    let opened = eventually("all requests are opened or refused", || {
        let opened = in_flight();
        (opened + refused() == REQUESTS).then_some(opened)
    });
    assert!((50..REQUESTS).contains(&opened), "{opened} requests");
    // The parts of bodies that have room arrive after their heads.
    let growth = eventually("each request has sent what has room", || {
        let growth = region.node(owner).resident().saturating_sub(before);
        (growth + PROCESS >= opened * 64 * KIB).then_some(growth)
    });
    let figures = format!("{opened} requests, grown by {} KiB", growth / KIB);
    eprintln!("{figures}");
    assert!(
        growth <= RELAY_MEMORY / 2 + opened * REQUEST + PROCESS,
        "{figures}"
    );
}
