//! Forged addresses and certificates of nodes.

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};

use serde_json::Value;

use crate::support::peers::http1_peer::Peer;
use crate::support::peers::node_peer;
use crate::support::processes::region::Region;

#[test]
fn nodes_connect_only_to_addresses_that_a_node_has_written() {
    let Some(region) = Region::start(2) else {
        return;
    };
    let internal = TcpListener::bind("127.0.0.1:0").unwrap();
    internal.set_nonblocking(true).unwrap();
    let address = internal.local_addr().unwrap();
    region.postgres.sql(&format!(
        "CREATE TABLE good AS TABLE gw.nodes;
         UPDATE gw.nodes SET peer_address = '{address}'; UPDATE gw.region SET epoch = epoch + 1"
    ));
    for node in 0..2 {
        region
            .node(node)
            .log
            .line_with("of gw.nodes has no valid tag");
    }
    region.postgres.sql(
        "UPDATE gw.nodes SET peer_address = good.peer_address FROM good WHERE \
                         nodes.slot = good.slot",
    );
    for node in 0..2 {
        region
            .node(node)
            .log
            .line_with("the table of nodes is reached again");
    }
    assert_eq!(internal.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    // A row of a node that does not exist.
    region.postgres.sql(&format!(
        "INSERT INTO gw.nodes SELECT 7, gen_random_uuid(), 'live', 1, 1, '{address}', version, 0, \
         tag FROM good LIMIT 1"
    ));
    region
        .node(0)
        .log
        .line_with("the row 7 of gw.nodes has no valid tag");
    assert_eq!(internal.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

/// All rows of the table of nodes, as nodes tell each other of them.
const MEMBERS: &str = "
    SELECT json_agg(json_build_object('slot', slot, 'session', replace(session::text, '-', ''),
        'state', state, 'beat', beat,
        'acknowledged', acknowledged, 'peer_address', peer_address, 'version', version,
        'applied_revision', applied_revision,
        'tag', (SELECT json_agg(get_byte(tag, at)) FROM generate_series(0, 15) at))
        ORDER BY slot) FROM gw.nodes";

/// With the key of the authority, or of a node's certificate, but without the region key.
#[test]
fn the_certificate_of_a_node_neither_adds_nor_moves_members() {
    let Some(region) = Region::start(2) else {
        return;
    };
    let internal = TcpListener::bind("127.0.0.1:0").unwrap();
    internal.set_nonblocking(true).unwrap();
    let members: Value = serde_json::from_str(&region.postgres.sql(MEMBERS)).unwrap();
    let epoch: u64 = region
        .postgres
        .sql("SELECT epoch FROM gw.region")
        .parse()
        .unwrap();
    let session = members[1]["session"].as_str().unwrap();
    let uri = format!("gw://eu1.gw.localhost/node/1/{session}");
    let tell = |epoch: u64, members: &Value| {
        let node = TcpStream::connect(members[0]["peer_address"].as_str().unwrap()).unwrap();
        let identity = node_peer::certificate_in(&region.data(0), &uri);
        let mut peer = Peer::new(node_peer::shake_hands(
            node,
            b"gw-control/1",
            Some(identity),
        ));
        let message = serde_json::json!({
            "slot": 1,
            "session": session,
            "acknowledged": 0,
            "epoch": epoch,
            "nodes": members,
            "levels": [],
        });
        let body = message.to_string();
        peer.send(format!(
            "PUT /v1/state HTTP/1.1\r\nHost: node\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ));
        peer.response().status.as_u16()
    };
    assert_eq!(tell(epoch, &members), 200, "the genuine rows");

    let address = internal.local_addr().unwrap().to_string();
    let mut moved = members.clone();
    moved[1]["peer_address"] = address.clone().into();
    let mut added = members.clone();
    let mut row = members[1].clone();
    (row["slot"], row["session"], row["peer_address"]) =
        (7.into(), "7".repeat(32).into(), address.into());
    added.as_array_mut().unwrap().push(row);
    for forged in [moved, added] {
        assert_eq!(tell(epoch + 1000, &forged), 403);
    }
    assert_eq!(region.status(0)["epoch"], epoch);
    assert_eq!(internal.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}
