//! A region of several node processes: live data of all nodes, and console sessions that are valid
//! at each.

use serde_json::Value;

use super::{OK, owner_and_others};
use crate::administration::console::browser::{Browser, Reply};
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::gate::Passage;
use crate::support::processes::process;
use crate::support::processes::region::Region;

fn browser(region: &Region, node: usize) -> Browser {
    Browser::at(format!("http://{}", region.node(node).admin_address))
}

/// The same browser, at another node. Browsers do not tell cookies of different ports apart.
fn at(region: &Region, node: usize, browser: &Browser) -> Browser {
    let mut there = self::browser(region, node);
    there.cookies.clone_from(&browser.cookies);
    there
}

fn signed_in(region: &Region, node: usize) -> Browser {
    let mut browser = browser(region, node);
    let reply = browser.sign_in(region.admin_token().trim(), "/");
    assert_eq!((reply.status, reply.header("location")), (303, "/"));
    browser
}

fn agents(region: &Region, node: usize) -> Value {
    region.api(node).agents("demo").into()
}

/// A row of the table of nodes, as text without elements.
fn node_row(page: &Reply, slot: &Value) -> String {
    let row = page.between(&format!("<td data-label=\"Node\">{slot}"), "</tr>");
    row.split('<')
        .filter_map(|element| element.split_once('>'))
        .map(|(_, text)| text.trim())
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn live_data_of_all_nodes_is_shown_at_each_of_them() {
    let Some(region) = Region::start_gated(3) else {
        return;
    };
    let _agent = region.run_agent(&backend::answering(OK));
    let [owner, other, third] = owner_and_others(&region);
    let slot = region.status(owner)["node"].clone();
    for node in 0..3 {
        a_node_shows_what_all_have(&region, node, &slot);
    }

    // The node stays a member, but the others do not reach it.
    region.peer_gates[owner].set(Passage::Stalled);
    the_others_name_the_node(&region, [other, third], &slot);
    region.peer_gates[owner].set(Passage::Open);
    eventually("the node answers", || {
        let agents = agents(&region, third);
        agents[0]["missing_nodes"].is_null().then_some(())
    });
}

/// `slot` is the node that does not answer.
fn the_others_name_the_node(region: &Region, [other, third]: [usize; 2], slot: &Value) {
    let agents = agents(region, other);
    let missing = Value::from(vec![slot.clone()]);
    assert_eq!(agents[0]["missing_nodes"], missing, "{agents}");
    let mut browser = signed_in(region, third);
    let missing = format!("because they do not answer: {slot}.");
    for page in ["/", "/tunnels", "/accounts/demo/agents"] {
        let Reply { status, text, .. } = browser.get(page);
        assert!(status == 200 && text.contains(&missing), "{page}: {text}");
    }
    let row = node_row(&browser.get("/region"), slot);
    assert!(row.contains("does not answer"), "{row}");
}

/// `slot` is the node with the tunnel.
fn a_node_shows_what_all_have(region: &Region, node: usize, slot: &Value) {
    let agents = eventually("all nodes answer in time", || {
        Some(agents(region, node)).filter(|agents| agents[0]["missing_nodes"].is_null())
    });
    let id = agents[0]["agent_id"].as_str().unwrap();
    let agent = region.api(node).agent("demo", id);
    for shown in [&agents[0], &agent] {
        let tunnels = shown["tunnels"].as_array().unwrap();
        assert_eq!(tunnels.len(), 1, "at node {node}: {shown}");
        assert_eq!(tunnels[0]["node"], *slot, "at node {node}");
    }

    let mut browser = signed_in(region, node);
    let tunnel = format!("demo--echo</a> <span class=\"muted\">at node {slot}");
    let tunnels = "<dt>Live tunnels</dt><dd><a href=\"/tunnels\">1</a></dd>";
    for (path, shown) in [("/tunnels", &*tunnel), ("/", tunnels)] {
        let text = browser.get(path).text;
        assert!(text.contains(shown), "{path}: {text}");
    }
    let page = browser.get("/region");
    let row = node_row(&page, slot);
    // Services, tunnels and requests in flight.
    assert!(
        row.contains("live") && row.contains("ready") && row.contains(" 1  1  0 "),
        "{row}"
    );
    assert!(page.text.contains("<a href=\"/region\""));
}

#[test]
fn why_the_tunnel_of_a_killed_agent_ended_is_shown_at_all_nodes() {
    let Some(region) = Region::start(3) else {
        return;
    };
    let agent = region.run_agent(&backend::answering(OK));
    eventually("the agent has a tunnel", || {
        let agents = agents(&region, 0);
        agents[0]["tunnels"][0].is_object().then_some(())
    });
    // The supervisor neither drains the agent nor starts it again.
    agent.signal("STOP");
    let kill = |worker| process::send_signal(worker, "KILL");
    assert!(process::children(agent.id()).into_iter().all(kill));
    for node in 0..3 {
        let shown = eventually("the tunnel has ended", || {
            let agents = agents(&region, node);
            agents[0]["tunnels"][0]
                .is_null()
                .then(|| agents[0]["ended_tunnels"].clone())
        });
        let ended = shown.as_array().unwrap();
        assert_eq!(ended.len(), 1, "at node {node}: {shown}");
        assert_eq!(ended[0]["service"], "demo--echo", "at node {node}");
        assert_eq!(ended[0]["reason"], "connection_lost", "at node {node}");
        let page = signed_in(&region, node).get("/accounts/demo/services/echo");
        let reason = page
            .text
            .contains("<span class=\"code\">connection_lost</span>");
        assert!(reason, "at node {node}: {}", page.text);
    }
}

#[test]
fn a_console_session_is_valid_at_every_node_until_it_is_ended_at_one() {
    let Some(mut region) = Region::start(3) else {
        return;
    };
    let first = signed_in(&region, 0);
    assert_valid(&region, 0..3, &first);
    // The session outlives the node that opened it, and a node that starts again learns of it.
    region.kill(0);
    assert_valid(&region, [1], &first);
    region.wait_for_members(2);
    region.restart(0);
    region.wait_for_members(3);
    assert_valid(&region, [0], &first);

    let second = signed_in(&region, 2);
    let signed_out = at(&region, 1, &first).press("/accounts", "/sign-out");
    assert_eq!(signed_out.header("location"), "/sign-in");
    for node in 0..3 {
        let reply = at(&region, node, &first).get("/accounts");
        assert_eq!(reply.status, 303, "at node {node}");
        let location = reply.header("location");
        assert_eq!(location, "/sign-in?next=%2Faccounts", "at node {node}");
    }
    assert_valid(&region, 0..3, &second);
    // An id that no node knows.
    let mut unknown = browser(&region, 0);
    let id = "a".repeat(first.cookies["gw_session"].len());
    unknown.cookies.insert("gw_session".to_owned(), id);
    assert_eq!(unknown.get("/accounts").status, 303);
}

/// Asserts that these nodes accept the session of a browser.
#[track_caller]
fn assert_valid(region: &Region, nodes: impl IntoIterator<Item = usize>, browser: &Browser) {
    for node in nodes {
        let page = at(region, node, browser).get("/accounts");
        assert_eq!(page.status, 200, "at node {node}");
    }
}
