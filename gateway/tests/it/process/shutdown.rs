//! Duration of a stop, and requests served during it.

use std::net::TcpStream;
use std::time::Duration;

use crate::support::eventually;
use crate::support::peers::caller::Caller;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::peers::http2_caller;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::hold;
use crate::support::processes::successor::admin;
use crate::support::stopwatch::{Stopwatch, within_a_second};

// While requests run, an idle connection may stay open for 1 s, and tunnels may take 2 s to end.

#[test]
fn an_idle_gateway_stops_at_once() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (mut served, _agent) = prepared.start(&backend.url);
    // A connection without a request, as browsers open in advance.
    let ahead = TcpStream::connect(served.admin_address).unwrap();
    // An idle keep-alive connection.
    let mut kept = prepared.connect(served.address);
    assert_eq!(kept.ask(prepared.get("/")).status, 200);
    within_a_second("the stop of an idle gateway", || served.process.stop());
    assert!(kept.is_closed());
    drop(ahead);
}

#[test]
fn an_idle_http2_connection_gets_goaway_and_does_not_delay_a_stop() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (mut served, _agent) = prepared.start(&backend.url);
    http2_caller::on_a_reactor(async {
        let about = prepared.about(served.address);
        let caller = http2_caller::connect_to(&about, &h2::client::Builder::new()).await;
        assert_eq!(caller.get("/").await.status, 200);
        let watch = Stopwatch::start();
        served.process.signal("TERM");
        // GOAWAY with NO_ERROR, then the end of the connection.
        caller.ended.await.unwrap().unwrap();
        watch.assert_within(Duration::from_secs(1), "the end of the connection");
    });
    assert_eq!(served.process.exit_code(), Some(0));
}

/// Sends requests on a connection until a response announces its end, as in a drain. It is never
/// idle for long, also on a busy machine.
fn ask_until_closed(prepared: &Prepared, caller: &mut Caller) {
    loop {
        let response = caller.ask(prepared.get("/"));
        assert_eq!(response.status, 200);
        if response.headers.contains("connection") {
            assert_eq!(response.header("connection"), "close");
            return;
        }
    }
}

#[test]
fn a_request_in_transit_during_a_stop_is_served() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (mut served, _agent) = prepared.start(&backend.url);
    let _port = hold(served.address);
    let mut half = prepared.connect(served.address);
    let mut running = prepared.connect(served.address);
    let mut idle = prepared.connect(served.address);
    for caller in [&mut half, &mut idle] {
        assert_eq!(caller.ask(prepared.get("/")).status, 200);
    }
    let request = prepared.get("/held");
    let (first, second) = request.split_at(40);
    half.send(first);
    running.send(prepared.get("/held"));
    backend.wait_for_held();
    served.process.signal("TERM");
    // While a request runs, other requests are still accepted.
    ask_until_closed(&prepared, &mut idle);
    half.send(second);
    eventually("the drain has begun", || {
        (admin(served.admin_address, "/readyz") == (503, "draining\n".into())).then_some(())
    });
    eventually("new connections are refused", || {
        TcpStream::connect(served.address).is_err().then_some(())
    });
    backend.release();
    backend.release();
    for caller in [&mut half, &mut running] {
        let response = caller.response();
        assert_eq!(
            (response.status.as_u16(), response.header("connection")),
            (200, "close")
        );
        assert!(caller.is_closed());
    }
    drop((half, running, idle));
    assert_eq!(served.process.exit_code(), Some(0));
}
