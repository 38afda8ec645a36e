//! Tests over a TLS connection that play the gateway.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use bytes::Bytes;
use futures_util::join;
use gw_shared::error_code::AgentErrorCode;
use gw_shared::http::{Fields, Framing};
use gw_shared::identity::program::{UpdateReport, UpdateState};
use gw_shared::net::Socket;
use gw_shared::net::tls::Trusted;
use gw_shared::tunnel::control::{self, BackendHealth, ToAgent, ToGateway};
use gw_shared::tunnel::endpoint::ReceivedPart;
use gw_shared::tunnel::frame::Kind;
use gw_shared::tunnel::head::{self, OutboundRequest};
use http::Method;
use http::uri::{Authority, PathAndQuery};
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls_pki_types::PrivateKeyDer;

use super::*;
use crate::backend::Backends;
use crate::fake_gateway::{self, HOSTNAME, NOW};
use crate::succession::Succession;
use crate::{testing, tls};

const TIME_LIMIT: Duration = Duration::from_secs(20);
const BODY: usize = 3_000_000;

/// The two ends of a TLS connection: agent, gateway.
async fn connect() -> (TlsStream, TlsStream) {
    let certified = rcgen::generate_simple_self_signed(["gateway".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der()).unwrap();
    let server = gw_bed::tls::server((certified.cert.der().clone(), key), &[]);
    let trusted = Arc::new(Trusted::only(vec![certified.cert.der().clone()]).unwrap());
    let versions = [&rustls::version::TLS13];
    let client = tls::client_config(&versions, trusted, Vec::new(), None, &[]).unwrap();
    let (socket, accepted) = testing::connect().await;
    let name = "gateway".try_into().unwrap();
    let client = UnbufferedClientConnection::new(Arc::new(client), name).unwrap();
    let agent = TlsStream::new(socket, client);
    let accepted = Socket::from_fd(accepted.into()).unwrap();
    let server = UnbufferedServerConnection::new(Arc::new(server)).unwrap();
    let gateway = TlsStream::new(accepted, server);
    let (agents, gateways) = join!(agent.handshake(), gateway.handshake());
    agents.and(gateways).unwrap();
    (agent, gateway)
}

/// Starts a backend that answers one request. Returns its URL.
fn backend() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let mut connection = listener.accept().unwrap().0;
        assert!(connection.read(&mut [0; 1000]).unwrap() > 0);
        let answer = gw_bed::http1::ok(vec![b'x'; BODY]);
        connection.write_all(&answer).unwrap();
    });
    format!("http://{address}")
}

/// Starts a backend that accepts connections and sends nothing. Returns its URL, with TLS.
fn silent_backend() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || listener.incoming().collect::<Vec<_>>());
    format!("https://{address}")
}

/// Runs `gateway` with its end of a tunnel with one slot until the agent ends the tunnel. Returns
/// how it ended for the gateway.
fn with_session(
    gateway: impl AsyncFnOnce(&Tunnel, &Session, watch::Sender<bool>),
) -> Result<(), TunnelError> {
    with_session_to(&backend(), 1, gateway)
}

fn with_session_to(
    url: &str,
    slots: u32,
    gateway: impl AsyncFnOnce(&Tunnel, &Session, watch::Sender<bool>),
) -> Result<(), TunnelError> {
    let run = async {
        let (_directory, agent) = fake_gateway::agent(&fake_gateway::Authority::new(), NOW, 1);
        let backends = Backends::from_urls("test", &[url.to_owned()], &mut Vec::new()).unwrap();
        let (stop, stopped) = watch::channel(false);
        let session = Rc::new(Session {
            agent: Rc::new(agent),
            pool: Rc::new(Pool::new("test", &backends, slots)),
            slots: Slots::new(slots),
            counts: Rc::default(),
            phase: watch::Sender::new(Phase::Starting),
            stop: stopped,
            no_more_requests: watch::Sender::new(false),
            displaced: Cell::default(),
        });
        let (stream, gateways) = connect().await;
        runtime::spawn(serve(Rc::clone(&session), stream));
        let tunnel = Tunnel::new(Endpoint::gateway());
        let driven = std::future::poll_fn(|cx| tunnel.poll_drive(cx, &gateways, &mut |_| Ok(())));
        let (ended, ()) = join!(driven, async {
            let streams = slots as usize + STREAMS_BEYOND_SLOTS;
            assert_eq!(tunnel.hello().await, Some(streams));
            gateway(&tunnel, &session, stop).await;
        });
        drop(gateways);
        reach(&session, Phase::Ended).await;
        ended
    };
    testing::block_on(async { runtime::timeout(TIME_LIMIT, run).await }).unwrap()
}

/// Waits until the session is in this phase.
async fn reach(session: &Session, wanted: Phase) {
    let mut phase = session.phase.subscribe();
    phase.wait_for(|phase| *phase == wanted).await.unwrap();
}

fn ready(generation: u64) -> ToAgent {
    ToAgent::Ready {
        agent_id: "ag_1".to_owned(),
        generation,
    }
}

fn tell(tunnel: &Tunnel, message: &ToAgent) {
    tunnel
        .send_message(control::encode(message).unwrap(), control::MESSAGE_MAX)
        .unwrap();
}

/// Sends a request, and returns the response's stream.
fn get(tunnel: &Tunnel) -> (StreamSender, StreamReceiver) {
    let request = OutboundRequest {
        method: Method::GET,
        target: PathAndQuery::from_static("/"),
        authority: Authority::from_static(HOSTNAME),
        headers: Fields::new(),
        framing: Framing::None,
        upgrade: None,
        caller_connection: None,
    };
    tunnel
        .open(window::FIRST as usize, true, |out| request.write(out, None))
        .unwrap()
}

/// Reads a response to its end. Returns the number of bytes of its body.
async fn read(receiver: &StreamReceiver) -> usize {
    let mut length = 0;
    loop {
        match receiver.receive().await.unwrap() {
            ReceivedPart::Head(kind, _) => assert_eq!(kind, Kind::Response),
            ReceivedPart::Data(data) => {
                receiver.release(data.len());
                length += data.len();
            }
            ReceivedPart::End => return length,
        }
    }
}

async fn refusal(receiver: &StreamReceiver) -> head::Refusal {
    match receiver.receive().await {
        Ok(ReceivedPart::Head(Kind::Refused, payload)) => head::parse_refusal(payload).unwrap(),
        other => panic!("not refused: {other:?}"),
    }
}

/// Tells the agent that its tunnel is registered, and waits until it knows.
async fn become_ready(tunnel: &Tunnel, session: &Session) {
    tell(tunnel, &ready(1));
    reach(session, Phase::Ready).await;
}

#[test]
fn drained_tunnel_ends_after_its_last_response() {
    let ended = with_session(async |tunnel, session, _stop| {
        become_ready(tunnel, session).await;
        let (_sender, receiver) = get(tunnel);
        tell(tunnel, &ToAgent::Drained);
        assert_eq!(read(&receiver).await, BODY);
    });
    ended.unwrap();
}

#[test]
fn stopping_agent_asks_for_the_end_of_its_tunnel() {
    let ended = with_session(async |tunnel, _session, stop| {
        let next = async || control::decode::<ToGateway>(&tunnel.message().await.unwrap()).unwrap();
        let statistics = ToGateway::Statistics {
            slots: 1,
            slots_in_use: 0,
            backend_connections: 0,
            backend: BackendHealth::Unknown,
            standby: false,
        };
        assert_eq!(next().await, statistics);
        let off = UpdateReport {
            state: UpdateState::Off,
            release_keys: None,
            version: None,
            error: None,
        };
        assert_eq!(next().await, ToGateway::Update(off));
        stop.send_replace(true);
        assert_eq!(next().await, ToGateway::Drain);
        tell(tunnel, &ToAgent::Drained);
    });
    ended.unwrap();
}

#[test]
fn requests_beyond_the_slots_are_refused() {
    let ended = with_session(async |tunnel, session, _stop| {
        let first = get(tunnel);
        let second = get(tunnel);
        let refusal = refusal(&second.1).await;
        assert_eq!(
            (&refusal.code[..], refusal.unsent),
            (AgentErrorCode::ConcurrencyLimit.as_str().as_bytes(), true)
        );
        assert_eq!(session.slots.in_use(), 1);
        tell(tunnel, &ToAgent::Drained);
        assert_eq!(read(&first.1).await, BODY);
    });
    ended.unwrap();
}

#[test]
fn a_tunnel_with_a_newer_one_of_another_process_is_a_reserve_until_the_gateway_uses_it_again() {
    let ended = with_session(async |tunnel, session, _stop| {
        become_ready(tunnel, session).await;
        let (_sender, receiver) = get(tunnel);
        for generation in 2..4 {
            tell(tunnel, &ToAgent::Replaced);
            reach(session, Phase::Reserve).await;
            assert!(session.displaced.get());
            tell(tunnel, &ready(generation));
            reach(session, Phase::Ready).await;
            assert!(!session.displaced.get());
        }
        tell(tunnel, &ToAgent::Replaced);
        reach(session, Phase::Reserve).await;
        // A running request ends as it would have, and the tunnel stays open.
        assert_eq!(read(&receiver).await, BODY);
        tell(tunnel, &ToAgent::Drain);
        reach(session, Phase::GatewayDrains).await;
        tell(tunnel, &ready(9));
        tell(tunnel, &ToAgent::Drained);
    });
    ended.unwrap();
}

#[test]
fn a_tunnel_that_its_own_process_or_its_successor_has_replaced_ends() {
    let to_replace: [fn(&Tunnel, &Session, &watch::Sender<bool>); 4] = [
        |_, session, _| session.agent.succession.set(Succession::Expected),
        |_, session, _| session.agent.succession.set(Succession::Done),
        |_, _, stop| {
            stop.send_replace(true);
        },
        |tunnel, _, _| tell(tunnel, &ToAgent::Drain),
    ];
    for prepare in to_replace {
        let ended = with_session(async |tunnel, session, stop| {
            tell(tunnel, &ready(1));
            prepare(tunnel, session, &stop);
            tell(tunnel, &ToAgent::Replaced);
            reach(session, Phase::Ended).await;
        });
        ended.unwrap();
    }
}

/// Changes that wait for the next regular report would take 7 seconds.
#[test]
fn changes_of_the_backends_health_are_reported_at_once() {
    let ended = with_session(async |tunnel, session, stop| {
        let reported = async || loop {
            if let ToGateway::Statistics { backend, .. } =
                control::decode(&tunnel.message().await.unwrap()).unwrap()
            {
                return backend;
            }
        };
        assert_eq!(reported().await, BackendHealth::Unknown);
        let begun = Instant::now();
        for _ in 0..4 {
            for health in [BackendHealth::Healthy, BackendHealth::Unhealthy] {
                session.pool.set_health(health);
                assert_eq!(reported().await, health);
            }
        }
        let elapsed = begun.elapsed();
        assert!(elapsed < Duration::from_secs(4), "{elapsed:?}");
        stop.send_replace(true);
        tell(tunnel, &ToAgent::Drained);
    });
    ended.unwrap();
}

#[test]
fn a_backend_that_does_not_answer_is_given_up_if_there_are_other_agents() {
    let ended = with_session_to(&silent_backend(), 2, async |tunnel, session, _stop| {
        // The request may wait for as long as its caller does.
        let patient = get(tunnel);
        while session.pool.states().all(|backend| backend.connects == 0) {
            runtime::yield_now().await;
        }
        let others = ToAgent::OtherTunnels {
            exist: true,
            retries: true,
        };
        tell(tunnel, &others);
        // A tunnel delivers its messages in their order, but not in the order of messages and
        // requests.
        become_ready(tunnel, session).await;
        let refusal = refusal(&get(tunnel).1).await;
        assert_eq!(refusal.code, AgentErrorCode::BackendUnreachable.as_str());
        assert!(refusal.unsent);
        let cx = &mut Context::from_waker(Waker::noop());
        assert!(patient.1.poll_receive(cx).is_pending());
        patient.0.reset();
        tell(tunnel, &ToAgent::Drained);
    });
    ended.unwrap();
}

#[test]
fn invalid_control_message_ends_the_tunnel() {
    let ended = with_session(async |tunnel, _session, _stop| {
        let invalid = Bytes::from_static(b"{}");
        tunnel.send_message(invalid, control::MESSAGE_MAX).unwrap();
        while tunnel.message().await.is_some() {}
    });
    assert!(ended.is_err());
}
