//! Bounds of a service with several agents: memory of kept bodies, and the wait for a slot.

use std::net::Shutdown;
use std::time::{Duration, Instant};

use gw_shared::tunnel::endpoint::STREAMS_MAX;
use gw_shared::tunnel::frame::{Kind, StreamId};

use crate::support::agents::modified_agent::Tunnel;
use crate::support::agents::scripted::{
    Attempt, Scripted, answered, body, refused_unsent, statistics,
};
use crate::support::agents::tunnel_frames::{hello, ok, ping, reset, uploaded};
use crate::support::limits::SLOT_WAIT;
use crate::support::peers::caller::{Caller, HOST, use_once};
use crate::support::peers::http1_peer::Response;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::Served;
use crate::support::scene::Scene;
use crate::support::stopwatch::{Stopwatch, in_time};
use crate::support::{eventually, turn};

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
const RELAY_MEMORY: usize = 64 * MIB;
/// More uploads than the share of an account has room for.
const UPLOADS: usize = 400;
/// Length of the longest body of which a copy is kept.
const BODY: usize = 64 * KIB;
/// Memory of an open request beside what is charged for it, in the gateway process: its task and
/// its records.
const REQUEST: usize = 16 * KIB;
/// Memory of the process that does not depend on the number of requests: buffers of the tunnels,
/// the log and the allocator.
const PROCESS: usize = 8 * MIB;

/// An agent that accepts uploads and does not answer them.
struct Holder {
    tunnel: Tunnel,
    uploads: Vec<Held>,
}

/// An upload that an agent holds.
struct Held {
    stream: StreamId,
    /// Number of the caller.
    number: usize,
    body: Vec<u8>,
    is_whole: bool,
}

impl Holder {
    /// Handles all frames that the gateway has sent.
    fn receive(&mut self) {
        self.tunnel.0.send(ping());
        loop {
            let next = self.tunnel.next().unwrap();
            let upload = self
                .uploads
                .iter_mut()
                .find(|upload| upload.stream == next.stream);
            match (next.kind, upload) {
                (Kind::Pong, _) => return,
                (Kind::Request, _) => {
                    let head = String::from_utf8_lossy(&next.payload).into_owned();
                    let (_, number) = head.split_once("x-number: ").unwrap();
                    let number = number.split("\r\n").next().unwrap().parse().unwrap();
                    self.uploads.push(Held {
                        stream: next.stream,
                        number,
                        body: Vec::new(),
                        is_whole: next.end,
                    });
                }
                (Kind::Data, Some(upload)) => {
                    upload.body.extend_from_slice(&next.payload);
                    upload.is_whole = next.end;
                }
                (Kind::Reset, _) => self.tunnel.0.send(reset(next.stream, b"")),
                _ => {}
            }
        }
    }

    fn answer(&mut self, stream: StreamId) {
        let report = uploaded(stream, BODY as u64);
        self.tunnel.0.send([report, ok(stream, b"held")].concat());
    }
}

fn metric(gateway: &Served, name: &str, label: &str) -> usize {
    gateway.metrics().count_with(name, label) as usize
}

fn body_of(number: usize) -> Vec<u8> {
    (0..BODY)
        .map(|at| b'a' + ((at + number) % 23) as u8)
        .collect()
}

/// Callers that have sent a POST each, two agents that hold those for which there was room, and the
/// memory of the process before.
fn uploads(prepared: &Prepared, gateway: &Served) -> (Vec<Caller>, [Holder; 2], usize) {
    let key = prepared.service_key();
    let mut agents = ["one", "two"].map(|name| {
        let mut tunnel = prepared.upgraded(name, gateway.address);
        tunnel.0.send(hello(u32::try_from(STREAMS_MAX).unwrap()));
        tunnel.until_handled();
        Holder {
            tunnel,
            uploads: Vec::new(),
        }
    });
    let used = |_| {
        let mut caller = prepared.connect(gateway.address);
        use_once(&mut caller, HOST, key);
        caller
    };
    let mut callers: Vec<Caller> = (0..UPLOADS).map(used).collect();
    let before = gateway.resident();
    for (number, caller) in callers.iter_mut().enumerate() {
        let head = format!(
            "POST / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\nX-Number: {number}\r\n\
             Content-Length: {BODY}\r\n\r\n"
        );
        caller.send([head.into_bytes(), body_of(number)].concat());
        agents.iter_mut().for_each(Holder::receive);
    }
    eventually("all uploads are whole or refused", || {
        agents.iter_mut().for_each(Holder::receive);
        let uploads = agents.iter().flat_map(|agent| &agent.uploads);
        let held = uploads.filter(|upload| upload.is_whole).count();
        let refused = metric(gateway, "gw_refusals_total", "GW_OVERLOADED");
        (held + refused == UPLOADS).then_some(())
    });
    (callers, agents, before)
}

#[test]
fn kept_bodies_grow_the_process_by_no_more_than_the_relay_memory() {
    let _turn = turn();
    let prepared = Prepared::with_agents(&["one", "two"]);
    let limited = format!("workers = 1\nrelay_memory_mib = {}", RELAY_MEMORY / MIB);
    let gateway = prepared.serve_with(&prepared.config().replace("workers = 2", &limited));
    let (mut callers, [mut one, mut two], before) = uploads(&prepared, &gateway);
    let growth = gateway.resident().saturating_sub(before);
    let charged = || metric(&gateway, "gw_relay_memory_bytes", "worker");
    let opened = one.uploads.len() + two.uploads.len();
    let most = RELAY_MEMORY / 2;
    let figures = format!(
        "{opened} requests, {} KiB charged, grown by {} KiB",
        charged() / KIB,
        growth / KIB
    );
    assert!(
        (100..UPLOADS).contains(&opened) && (most / 2..=most).contains(&charged()),
        "{figures}"
    );
    assert!(growth <= most + opened * REQUEST + PROCESS, "{figures}");

    // A refused request goes to the other agent if a copy of its body was kept. The latest have no
    // copy, and free memory for the earlier ones.
    let (repeated, tried_once) = refuse_all(&gateway, &mut callers, &mut one, &mut two);
    assert!(
        repeated >= 10 && tried_once >= 10,
        "{repeated} and {tried_once} of {figures}"
    );

    // Half of the requests are answered, the callers of the others leave.
    for (at, upload) in std::mem::take(&mut two.uploads).into_iter().enumerate() {
        let caller = &mut callers[upload.number];
        if at.is_multiple_of(2) {
            two.answer(upload.stream);
            assert_eq!(caller.response().body, b"held");
        } else {
            caller.stream.sock.shutdown(Shutdown::Both).unwrap();
        }
    }
    eventually("nothing is charged", || {
        one.receive();
        two.receive();
        (charged() == 0).then_some(())
    });
}

/// Refuses the uploads of `one`. Returns how many of them `two` got, and how many failed.
fn refuse_all(
    gateway: &Served,
    callers: &mut [Caller],
    one: &mut Holder,
    two: &mut Holder,
) -> (usize, usize) {
    let mut repeated = 0;
    let mut tried_once = 0;
    for upload in std::mem::take(&mut one.uploads).into_iter().rev() {
        assert!(upload.body == body_of(upload.number), "{}", upload.number);
        let before = two.uploads.len();
        let refused = refused_unsent(upload.stream, "GW_BACKEND_UNREACHABLE");
        one.tunnel.0.send(refused);
        one.receive();
        let caller = &mut callers[upload.number];
        let is_repeated = eventually("the request has failed or was repeated", || {
            two.receive();
            if let Some(again) = two.uploads.get(before) {
                return again.is_whole.then_some(true);
            }
            let failed = metric(gateway, "gw_refusals_total", "GW_BACKEND_UNREACHABLE");
            (failed > tried_once).then_some(false)
        });
        if is_repeated {
            let again = &two.uploads[before];
            assert_eq!(again.number, upload.number);
            assert!(again.body == upload.body, "{}", upload.number);
            repeated += 1;
        } else {
            assert_eq!(caller.response().code(), "GW_BACKEND_UNREACHABLE");
            tried_once += 1;
        }
    }
    (repeated, tried_once)
}

fn answer(tunnel: &mut Tunnel, attempt: &Attempt) -> bool {
    let (body, _) = body(tunnel, attempt);
    tunnel.0.send(answered(attempt, body.len(), &body));
    true
}

/// Reports one slot, and this state of the backend.
fn report(tunnel: &mut Tunnel, backend: &str) {
    tunnel.0.send(statistics(1, backend, false));
    tunnel.until_handled();
}

/// A POST that has one slot of agent 0 until its body is sent.
fn holding_a_slot(scene: &Scene, scripted: &Scripted) -> Caller {
    let mut caller = scene.connect();
    caller.send(scene.request("POST /", "Content-Length: 1\r\n\r\n"));
    assert_eq!(scripted.next().agent, 0);
    caller
}

/// A connection that has served a request, so that the next one comes to the service at once. All
/// slots are free again.
fn used(scene: &Scene) -> Caller {
    let mut caller = scene.connect();
    use_once(&mut caller, HOST, &scene.about.service_key);
    scene.wait_until_idle();
    caller
}

/// The response to a request that waits for a slot; `None` if it is an error because the slot may
/// have become free too late.
fn in_its_wait(response: Response, until_free: Duration) -> Option<Response> {
    (response.status == 200 || until_free < SLOT_WAIT).then_some(response)
}

/// A request waits until the only slot becomes free, and gets it.
fn slot_waited_for(scene: &Scene, scripted: &Scripted) -> Option<()> {
    let mut waiting = used(scene);
    eventually("no request is left to the owner", || {
        (scene.left_to_owner() == 0).then_some(())
    });
    let mut held = holding_a_slot(scene, scripted);
    // The request that has the slot counts if it crossed workers.
    let before = scene.left_to_owner();
    let began = Instant::now();
    waiting.send(scene.get("/"));
    eventually("the request waits", || {
        (scene.left_to_owner() == before + 1 || began.elapsed() >= SLOT_WAIT).then_some(())
    });
    assert_eq!(held.ask("a").body, b"a");
    let until_free = began.elapsed();
    let response = in_its_wait(waiting.response(), until_free);
    if let Some(response) = &response {
        assert_eq!(response.status, 200);
        assert_eq!(scripted.next().agent, 0);
    }
    scene.wait_until_idle();
    response.map(drop)
}

#[test]
fn a_request_waits_for_a_slot_while_another_agent_is_sick() {
    let scene = Scene::service().enrolled(&["one", "sick"]).start();
    let scripted = Scripted::new();
    for (number, name, backend) in [(0, "one", "healthy"), (1, "sick", "unhealthy")] {
        let mut tunnel = scene.tunnel(name);
        report(&mut tunnel, backend);
        scripted.serve(number, tunnel, answer);
    }
    for _ in 0..5 {
        in_time("a slot becomes free", || slot_waited_for(&scene, &scripted));
    }
    let mut refused = used(&scene);
    let mut held = holding_a_slot(&scene, &scripted);
    let started = Instant::now();
    let watch = Stopwatch::start();
    assert_eq!(
        refused.ask(scene.get("/")).code(),
        "GW_AGENT_CONCURRENCY_LIMIT"
    );
    assert!(started.elapsed() >= SLOT_WAIT, "{:?}", started.elapsed());
    watch.assert_within(Duration::from_secs(4), "the wait for a slot");
    assert_eq!(held.ask("a").body, b"a");
    assert!(
        scripted.attempts().is_empty(),
        "the sick agent got a request"
    );
}

#[test]
fn a_request_that_was_refused_waits_for_a_slot_of_the_other_agent() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    let scripted = Scripted::new();
    let mut tunnels = ["one", "two"].map(|name| scene.tunnel(name));
    for tunnel in &mut tunnels {
        report(tunnel, "healthy");
    }
    let [one, mut two] = tunnels;
    scripted.serve(0, one, answer);
    in_time("a slot becomes free", || {
        report(&mut two, "unhealthy");
        let mut caller = used(&scene);
        let mut held = holding_a_slot(&scene, &scripted);
        report(&mut two, "healthy");
        let began = Instant::now();
        caller.send(scene.request("POST /", "Content-Length: 2\r\n\r\nhi"));
        let stream = two.request();
        two.0.send(refused_unsent(stream, "GW_BACKEND_UNREACHABLE"));
        two.until_handled();
        assert_eq!(held.ask("a").body, b"a");
        let until_free = began.elapsed();
        let response = in_its_wait(caller.response(), until_free);
        if let Some(response) = &response {
            assert_eq!(response.body, b"hi");
            assert_eq!(scripted.next().agent, 0);
        }
        scene.wait_until_idle();
        response.map(drop)
    });
}
