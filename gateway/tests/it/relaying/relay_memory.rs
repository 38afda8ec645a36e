//! Memory of a gateway process under modified agents that send all they may, to callers that read
//! nothing.

mod kernel_memory;

use std::net::{SocketAddr, TcpStream};
use std::{fs, thread};

use gw_shared::tunnel::endpoint::STREAMS_MAX;
use gw_shared::tunnel::frame::{DATA_MAX, Kind, StreamId};
use http::Method;

use crate::support::agents::in_process;
use crate::support::agents::modified_agent;
use crate::support::agents::modified_agent::{Enrolled, HOST, Tunnel, enroll};
use crate::support::agents::tunnel_frames::{
    CHUNKED, data, frame, head, head_text, hello, last_data, last_head, ping, response, trailers,
};
use crate::support::gateway::Gateway;
use crate::support::peers::caller::{Caller, Tls, session, use_once};
use crate::support::peers::http1_peer::Peer;
use crate::support::peers::http2_frames::{self, END_STREAM};
use crate::support::processes::process::{Served, config_text};
use crate::support::processes::{prepared, process};
use crate::support::scene::{About, Scene};
use crate::support::{eventually, turn};

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
const RELAY_MEMORY: usize = 64 * MIB;
/// Requests of each account: more than its share has room for.
const REQUESTS: usize = 600;
/// Requests on one connection of HTTP/2.
const HTTP2_REQUESTS: usize = 100;
/// Memory of an open request beside what is charged for it, in the gateway process: its task and
/// its records.
const REQUEST: usize = 16 * 1024;
/// Memory of the process that does not depend on the number of requests: buffers of the tunnels,
/// the log and the allocator.
const PROCESS: usize = 8 * MIB;

/// A gateway process with one worker and an account for each of `accounts`.
struct Setup {
    directory: tempfile::TempDir,
    gateway: Served,
    keys: Vec<String>,
    accounts: &'static [&'static str],
}

impl Setup {
    fn new(accounts: &'static [&'static str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let data_dir = directory.path().join("data");
        let config = config_text(&data_dir, 0);
        let gateway = Gateway::start(&config);
        let api = gateway.api();
        let key = |account: &&str| {
            api.create_service(account, "echo");
            gateway.enroll(account, &["echo"], &directory.path().join(account));
            api.create_service_key(account, &["echo"]).1
        };
        let keys = accounts.iter().map(key).collect();
        gateway.drain();
        let path = directory.path().join("gateway.toml");
        fs::write(&path, with_one_worker(&config, RELAY_MEMORY)).unwrap();
        let gateway = process::serve(&mut process::serve_command(&path));
        Self {
            directory,
            gateway,
            keys,
            accounts,
        }
    }

    fn about(&self) -> About {
        let ca_file = self.directory.path().join("data/dev-ca.crt");
        prepared::about(self.gateway.address, "", ca_file)
    }

    fn attack(&self, account: usize, protocol: Protocol) -> Attack {
        let name = self.accounts[account];
        let key = &self.keys[account];
        let about = self.about();
        let host = format!("{name}--echo.eu1.gw.localhost");
        let identity = in_process::identity(&self.directory.path().join(name));
        let connection = modified_agent::connection(&about, &host, identity);
        let mut tunnel = Tunnel::upgrade(connection, &host);
        tunnel.0.send(hello(u32::try_from(STREAMS_MAX).unwrap()));
        let (alpn, connections, requests): (&[u8], _, _) = match protocol {
            Protocol::Http1 => {
                let fields = format!("Host: {host}\r\nX-Gw-Service-Key: {key}\r\n");
                let get = format!("GET / HTTP/1.1\r\n{fields}\r\n");
                (b"http/1.1", REQUESTS, get.into_bytes())
            }
            Protocol::Http2 => {
                let get = http2_frames::get("/", Some(key));
                let ids = (0..HTTP2_REQUESTS as u32).map(|number| 2 * number + 1);
                let gets = ids.flat_map(|id| http2_frames::headers(id, END_STREAM, &get));
                let preface = http2_frames::preface(&[]).into_iter();
                let connections = REQUESTS / HTTP2_REQUESTS;
                (b"h2", connections, preface.chain(gets).collect())
            }
        };
        let connect = || {
            let session = session(&about, &host, &[alpn], None);
            let mut caller = Peer::new(Tls::new(session, small_socket(&about)));
            match protocol {
                Protocol::Http1 => use_once(&mut caller, &host, key),
                Protocol::Http2 => {
                    let Tls { conn, sock } = &mut caller.stream;
                    while conn.is_handshaking() {
                        conn.complete_io(sock).unwrap();
                    }
                }
            }
            caller
        };
        let callers = std::iter::repeat_with(connect).take(connections).collect();
        eventually("the tunnel is registered", || {
            (self.metric("gw_tunnel_window_bytes", name) > 0).then_some(())
        });
        Attack {
            tunnel,
            callers,
            requests,
            streams: Vec::new(),
        }
    }

    fn metric(&self, metric: &str, account: &str) -> usize {
        self.gateway.metrics().count_with(metric, account) as usize
    }
}

/// The configuration of a gateway with this memory on one worker.
fn with_one_worker(config: &str, relay_memory: usize) -> String {
    let memory = format!("relay_memory_mib = {}", relay_memory / MIB);
    config.replace("workers = 2", &format!("workers = 1\n{memory}"))
}

/// A connection to the gateway whose kernel takes little.
fn small_socket(about: &About) -> TcpStream {
    let port: u16 = about.base_url.rsplit(':').next().unwrap().parse().unwrap();
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket
        .connect(&SocketAddr::from(([127, 0, 0, 1], port)).into())
        .unwrap();
    socket.into()
}

#[derive(Clone, Copy)]
enum Protocol {
    Http1,
    Http2,
}

/// A modified agent with a tunnel, and callers of its service that read nothing.
struct Attack {
    tunnel: Tunnel,
    callers: Vec<Caller>,
    /// Requests of each connection.
    requests: Vec<u8>,
    streams: Vec<Stream>,
}

/// A stream that the gateway has not reset.
struct Stream {
    id: StreamId,
    /// Bytes of body that the agent may send.
    credit: usize,
    is_reset: bool,
}

impl Attack {
    /// Sends all requests, and receives those that the gateway opens.
    fn open(&mut self, setup: &Setup, account: &str) {
        let refused = || setup.metric("gw_refusals_total", "GW_OVERLOADED");
        let refused_before = refused();
        self.callers
            .iter_mut()
            .for_each(|caller| caller.send(&self.requests));
        let opened = eventually("all requests are opened or refused", || {
            let opened = setup.metric("gw_tunnel_in_flight", account);
            (opened + refused() - refused_before == REQUESTS).then_some(opened)
        });
        while self.streams.len() < opened {
            self.exchange(&[]);
        }
    }

    /// Sends frames, and handles all frames that the gateway sends meanwhile.
    fn exchange(&mut self, frames: &[u8]) {
        self.tunnel.0.send(frames);
        self.tunnel.0.send(ping());
        loop {
            let next = self.tunnel.next().unwrap();
            let number = || u32::from_be_bytes(*next.payload.first_chunk().unwrap()) as usize;
            let stream = self
                .streams
                .iter_mut()
                .find(|stream| stream.id == next.stream);
            match next.kind {
                Kind::Request => {
                    self.streams.push(Stream {
                        id: next.stream,
                        credit: number(),
                        is_reset: false,
                    });
                }
                Kind::Credit => stream.unwrap().credit += number(),
                // Not answered, so that the slot is not used again.
                Kind::Reset => stream.unwrap().is_reset = true,
                Kind::Pong => return,
                _ => {}
            }
        }
    }

    /// Sends the frames that `frames` makes on each stream.
    fn send_on_each(&mut self, frames: impl Fn(StreamId) -> Vec<u8>) {
        for at in 0..self.streams.len() {
            if !self.streams[at].is_reset {
                self.exchange(&frames(self.streams[at].id));
            }
        }
    }

    /// Sends bodies until no stream has credit and no more comes.
    fn fill(&mut self) {
        let mut unchanged = 0;
        while unchanged < 50 {
            unchanged += 1;
            for at in 0..self.streams.len() {
                let Stream {
                    id,
                    credit,
                    is_reset,
                } = self.streams[at];
                if credit == 0 || is_reset {
                    continue;
                }
                unchanged = 0;
                self.streams[at].credit = 0;
                let body = vec![0; credit];
                let pieces = body.chunks(DATA_MAX);
                let frames: Vec<u8> = pieces.flat_map(|piece| data(id, piece)).collect();
                self.exchange(&frames);
            }
            self.exchange(&[]);
        }
    }

    /// Interim responses and a head on each stream, as large as they may be.
    fn send_heads(&mut self) {
        let hints = head_text("103", &[("x", &"h".repeat(21_000))]).into_bytes();
        let large = head_text(
            "200",
            &[("transfer-encoding", "chunked"), ("x", &"h".repeat(59_000))],
        );
        self.send_on_each(|id| {
            let hints = frame(Kind::Interim, false, id, &hints).repeat(3);
            [hints, response(id, false, &large)].concat()
        });
    }

    /// As many fields on each stream as there may be.
    fn send_fields(&mut self) {
        let value = "v".repeat(50);
        let names: Vec<String> = (0..1000).map(|at| format!("x-{at:03}")).collect();
        let fields: Vec<(&str, &str)> = names.iter().map(|name| (&**name, &*value)).collect();
        let hints = head_text("103", &fields[..500]).into_bytes();
        let many = head_text("204", &fields);
        self.send_on_each(|id| {
            let hints = frame(Kind::Interim, false, id, &hints);
            [hints, response(id, true, &many)].concat()
        });
        self.exchange(&[]);
    }

    /// Responses that end only after all that a stream may carry.
    fn send_endless(&mut self) {
        self.send_heads();
        self.fill();
        self.send_on_each(|id| trailers(id, &[("x", &"t".repeat(60_000))]));
    }

    /// Responses that are complete and small enough to pass without credit of the caller.
    fn send_complete(&mut self) {
        self.send_heads();
        self.send_on_each(|id| last_data(id, &[0; DATA_MAX]));
        self.exchange(&[]);
    }
}

/// Runs an attack of each account after the other. Asserts that the process grows by no more than
/// `most`, and what open requests need besides.
fn assert_growth(
    accounts: &'static [&'static str],
    protocol: Protocol,
    send: fn(&mut Attack),
    most: usize,
) {
    let _turn = turn();
    let setup = Setup::new(accounts);
    let mut attacks: Vec<Attack> = (0..accounts.len())
        .map(|account| setup.attack(account, protocol))
        .collect();
    let before = setup.gateway.resident();
    for (attack, account) in attacks.iter_mut().zip(accounts) {
        attack.open(&setup, account);
        send(attack);
    }
    let growth = setup.gateway.resident() - before;
    let opened: usize = attacks.iter().map(|attack| attack.streams.len()).sum();
    let streams = attacks.iter().flat_map(|attack| &attack.streams);
    let resets = streams.filter(|stream| stream.is_reset).count();
    let held = |account: &&str| setup.metric("gw_tunnel_held_bytes", account);
    let held: usize = accounts.iter().map(held).sum();
    let charged = setup.metric("gw_relay_memory_bytes", "worker");
    let figures = format!(
        "{opened} requests, {resets} of them reset, {} KiB held, {} KiB charged, grown by {} KiB",
        held / KIB,
        charged / KIB,
        growth / KIB
    );
    assert!(opened >= 50 && held >= most / 4, "{figures}");
    assert!(charged <= most, "{figures}");
    assert!(growth <= most + opened * REQUEST + PROCESS, "{figures}");
}

const HALF: usize = RELAY_MEMORY / 2;

#[test]
fn one_account_grows_the_process_by_its_half_of_the_relay_memory() {
    assert_growth(&["mallory"], Protocol::Http1, Attack::send_endless, HALF);
}

#[test]
fn two_accounts_grow_the_process_by_the_relay_memory() {
    let send = Attack::send_endless;
    assert_growth(&["mallory", "eve"], Protocol::Http1, send, RELAY_MEMORY);
}

#[test]
fn callers_of_http2_grow_the_process_by_no_more() {
    assert_growth(&["demo"], Protocol::Http2, Attack::send_endless, HALF);
}

#[test]
fn heads_with_many_fields_grow_the_process_by_no_more() {
    for protocol in [Protocol::Http1, Protocol::Http2] {
        assert_growth(&["demo"], protocol, Attack::send_fields, HALF);
    }
}

#[test]
fn complete_responses_count_until_http2_callers_have_them() {
    assert_growth(&["demo"], Protocol::Http2, Attack::send_complete, HALF);
}

/// Opens requests until the share of the account is full and one is refused. Returns the callers
/// of the others.
fn fill_share(scene: &Scene, enrolled: &Enrolled) -> Vec<Caller> {
    let refusals = || scene.metrics().count("gw_refusals_total");
    let before = refusals();
    let mut callers = Vec::new();
    loop {
        let mut caller = enrolled.caller(scene);
        caller.send(enrolled.get());
        let is_opened = || {
            let report = enrolled.report(scene);
            report.is_some_and(|report| report.in_flight > callers.len())
        };
        eventually("the request is opened or refused", || {
            (refusals() > before || is_opened()).then_some(())
        });
        if refusals() > before {
            assert_eq!(caller.response().code(), "GW_OVERLOADED");
            return callers;
        }
        callers.push(caller);
    }
}

#[test]
fn a_head_without_room_is_refused_and_ordinary_heads_pass() {
    let scene = Scene::service()
        .agent()
        .workers(1)
        .configuration("relay_memory_mib = 16\n")
        .start();
    let enrolled = enroll(&scene);
    let mut tunnel = enrolled.tunnel(&scene);
    let mut callers = fill_share(&scene, &enrolled);
    let streams: Vec<StreamId> = callers.iter().map(|_| tunnel.request()).collect();
    // Every second response begins with a large head, which takes more room than all requests left.
    let large = head_text("200", &[CHUNKED, ("x", &"h".repeat(59_000))]);
    for stream in streams.iter().step_by(2) {
        tunnel.0.send(response(*stream, false, &large));
    }
    let mut refused = 0;
    for (number, (caller, stream)) in callers.iter_mut().zip(streams).enumerate() {
        if number % 2 == 1 {
            let head = head(stream, "200", &[CHUNKED, ("x", &"h".repeat(3000))]);
            tunnel.0.send([head, last_data(stream, b"ok")].concat());
            assert_eq!(caller.response().body, b"ok", "{number}");
            continue;
        }
        let head = caller.response_head(&Method::GET).unwrap();
        if head.status == 503 {
            assert_eq!(head.headers["x-gw-status"], "Overloaded", "{number}");
            refused += 1;
        } else {
            tunnel.0.send(last_data(stream, b"ok"));
            assert_eq!(caller.body(head.framing).unwrap().0, b"ok", "{number}");
        }
    }
    assert!(refused > 0);
}

#[test]
fn a_response_without_a_body_counts_until_the_caller_has_taken_it() {
    const HEAD: usize = 59_000;
    let scene = Scene::service().agent().workers(1).start();
    let enrolled = enroll(&scene);
    let mut tunnel = enrolled.tunnel(&scene);
    let answering = thread::spawn(move || {
        let value = "h".repeat(HEAD);
        while let Ok(request) = tunnel.next_of(Kind::Request) {
            let head = last_head(request.stream, "204", &[("x", &value)]);
            tunnel.0.send(head);
        }
    });
    let session = session(&scene.about, HOST, &[b"http/1.1"], None);
    let mut caller = Peer::new(Tls::new(session, small_socket(&scene.about)));
    caller.send(enrolled.get().repeat(100));
    let held = || {
        enrolled
            .report(&scene)
            .map(|report| (report.in_flight, report.held_bytes))
    };
    eventually("the caller's kernel is full", || {
        held().filter(|(in_flight, held)| *in_flight == 1 && *held >= HEAD)
    });
    for number in 0..100 {
        assert_eq!(caller.response().status, 204, "{number}");
    }
    eventually("nothing is held", || held().filter(|held| *held == (0, 0)));
    drop(scene);
    answering.join().unwrap();
}
