//! Bodies of requests between control planes that do not end.

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::support::eventually;
use crate::support::peers::node_peer::{self, ALPN_CONTROL};
use crate::support::processes::region::Region;

const MIB: usize = 1024 * 1024;

#[test]
fn bodies_between_nodes_share_a_room_and_changes_do_not_wait() {
    const CLIENTS: usize = 60;
    const BODY: usize = 20_000_000;
    const ROOM: usize = 40 * MIB;
    let Some(region) = Region::start(2) else {
        return;
    };
    let session = region
        .postgres
        .sql("SELECT replace(session::text, '-', '') FROM gw.nodes WHERE slot = 1");
    let uri = format!("gw://eu1.gw.localhost/node/1/{session}");
    let connections: Vec<TcpStream> = (0..CLIENTS)
        .map(|_| TcpStream::connect(region.peer_listen(0)).unwrap())
        .collect();
    let before = region.node(0).resident();
    let sent = AtomicUsize::new(0);
    thread::scope(|scope| {
        for connection in &connections {
            let connection = connection.try_clone().unwrap();
            let identity = node_peer::certificate_in(&region.data(0), &uri);
            let sent = &sent;
            scope.spawn(move || {
                let mut node = node_peer::shake_hands(connection, ALPN_CONTROL, Some(identity));
                let head = format!(
                    "PUT /v1/state HTTP/1.1\r\nHost: node\r\nContent-Length: {BODY}\r\n\r\n"
                );
                // Fails once the test ends the connection.
                let written = node
                    .write_all(head.as_bytes())
                    .and_then(|()| node.write_all(&vec![b' '; BODY - 1]));
                if written.is_ok() {
                    sent.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        eventually("the room is full", || {
            (sent.load(Ordering::SeqCst) >= ROOM / BODY).then_some(())
        });
        // Both nodes use a change at once: they hear of each other.
        for enabled in [false, true] {
            let change = serde_json::json!({ "enabled": enabled });
            let path = "/accounts/demo/services/echo";
            let changed = region.api(0).ask("PATCH", path, &change);
            assert_eq!((changed.status, &*changed.pending_nodes), (200, ""));
            region.wait_for_members(2);
        }
        let grown = region.node(0).resident().saturating_sub(before);
        for connection in &connections {
            drop(connection.shutdown(Shutdown::Both));
        }
        assert!(
            grown < ROOM + 24 * MIB,
            "{grown} bytes for {CLIENTS} clients"
        );
    });
}
