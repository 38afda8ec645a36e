//! A region of several node processes: live data of all nodes, and console sessions that are valid
//! at each.

use serde_json::Value;

use crate::administration::console::browser::{Browser, Reply};
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::gate::Passage;
use crate::support::processes::process;
use crate::support::processes::region::Region;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

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
    let owner = region.owner();
    let other = (owner + 1) % 3;
    let third = (owner + 2) % 3;
    let slot = region.status(owner)["node"].clone();
    for node in 0..3 {
        a_node_shows_what_all_have(&region, node, &slot);
    }

    // The node stays a member, but the others do not reach it.
    region.peer_gates[owner].set(Passage::Stalled);
    let agents = agents(&region, other);
    assert_eq!(
        agents[0]["missing_nodes"],
        Value::from(vec![slot.clone()]),
        "{agents}"
    );
    let mut browser = signed_in(&region, third);
    let missing = format!("because they do not answer: {slot}.");
    for page in ["/", "/tunnels", "/accounts/demo/agents"] {
        let page = browser.get(page);
        assert!(
            page.status == 200 && page.text.contains(&missing),
            "{}",
            page.text
        );
    }
    let row = node_row(&browser.get("/region"), &slot);
    assert!(row.contains("does not answer"), "{row}");
    region.peer_gates[owner].set(Passage::Open);
    eventually("the node answers", || {
        (self::agents(&region, third)[0]["missing_nodes"] == Value::Null).then_some(())
    });
}

/// `slot` is the node with the tunnel.
fn a_node_shows_what_all_have(region: &Region, node: usize, slot: &Value) {
    let agents = eventually("all nodes answer in time", || {
        Some(agents(region, node)).filter(|agents| agents[0]["missing_nodes"].is_null())
    });
    assert_eq!(
        agents[0]["tunnels"].as_array().unwrap().len(),
        1,
        "at node {node}: {agents}"
    );
    assert_eq!(agents[0]["tunnels"][0]["node"], *slot);
    let id = agents[0]["agent_id"].as_str().unwrap();
    let agent = region.api(node).agent("demo", id);
    assert_eq!(
        agent["tunnels"].as_array().unwrap().len(),
        1,
        "at node {node}: {agent}"
    );

    let mut browser = signed_in(region, node);
    let tunnels = browser.get("/tunnels");
    assert!(
        tunnels.text.contains(&format!(
            "demo--echo</a> <span class=\"muted\">at node {slot}"
        )),
        "{}",
        tunnels.text
    );
    assert!(
        browser
            .get("/")
            .text
            .contains("<dt>Live tunnels</dt><dd><a href=\"/tunnels\">1</a></dd>")
    );
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
    let has_tunnel = |node| agents(&region, node)[0]["tunnels"][0].is_object();
    eventually("the agent has a tunnel", || has_tunnel(0).then_some(()));
    // The supervisor neither drains the agent nor starts it again.
    agent.signal("STOP");
    assert!(
        process::children(agent.id())
            .into_iter()
            .all(|worker| process::send_signal(worker, "KILL"))
    );
    for node in 0..3 {
        let shown = eventually("the tunnel has ended", || {
            let agents = agents(&region, node);
            agents[0]["tunnels"][0]
                .is_null()
                .then(|| agents[0]["ended_tunnels"].clone())
        });
        assert_eq!(
            shown.as_array().unwrap().len(),
            1,
            "at node {node}: {shown}"
        );
        let service = &shown[0]["service"];
        let reason = &shown[0]["reason"];
        assert_eq!(
            (service, reason),
            (&"demo--echo".into(), &"connection_lost".into()),
            "at node {node}: {shown}"
        );
        let service = signed_in(&region, node).get("/accounts/demo/services/echo");
        assert!(
            service
                .text
                .contains("<span class=\"code\">connection_lost</span>"),
            "{}",
            service.text
        );
    }
}

#[test]
fn a_console_session_is_valid_at_every_node_until_it_is_ended_at_one() {
    let Some(mut region) = Region::start(3) else {
        return;
    };
    let first = signed_in(&region, 0);
    for node in 0..3 {
        assert_eq!(
            at(&region, node, &first).get("/accounts").status,
            200,
            "at node {node}"
        );
    }
    // The session outlives the node that opened it, and a node that starts again learns of it.
    region.kill(0);
    assert_eq!(at(&region, 1, &first).get("/accounts").status, 200);
    region.wait_for_members(2);
    region.restart(0);
    region.wait_for_members(3);
    assert_eq!(at(&region, 0, &first).get("/accounts").status, 200);

    let second = signed_in(&region, 2);
    assert_eq!(
        at(&region, 1, &first)
            .press("/accounts", "/sign-out")
            .header("location"),
        "/sign-in"
    );
    for node in 0..3 {
        let reply = at(&region, node, &first).get("/accounts");
        assert_eq!(
            (reply.status, reply.header("location")),
            (303, "/sign-in?next=%2Faccounts"),
            "at node {node}"
        );
        assert_eq!(
            at(&region, node, &second).get("/accounts").status,
            200,
            "at node {node}"
        );
    }
    // An id that no node knows.
    let mut unknown = browser(&region, 0);
    unknown.cookies.insert(
        "gw_session".to_owned(),
        "a".repeat(first.cookies["gw_session"].len()),
    );
    assert_eq!(unknown.get("/accounts").status, 303);
}
