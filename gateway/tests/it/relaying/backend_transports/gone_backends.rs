//! Backends whose machine is gone or does not answer, and live ones that do not read.

use std::future::poll_fn;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::future::{Either, select};
use gw_shared::net::Socket;
use http::{Method, Response};
use socket2::{SockFilter, SockRef};

use crate::relaying::response_with;
use crate::support::SOON;
use crate::support::peers::caller::Caller;
use crate::support::peers::http1_peer::Peer;
use crate::support::peers::http2_caller::{data, on_a_reactor};
use crate::support::peers::{backend, http2_backend, http2_caller};
use crate::support::scene::Scene;

const PAUSED: usize = 24 * 1024 * 1024;

/// The connections that a backend has accepted.
#[derive(Clone, Default)]
struct Accepted(Arc<Mutex<Vec<OwnedFd>>>);

impl Accepted {
    fn add(&self, socket: &impl AsFd) {
        let copy = socket.as_fd().try_clone_to_owned().unwrap();
        self.0.lock().unwrap().push(copy);
    }

    /// Drops all packets to the connections, as if their machine was gone: nothing that the agent
    /// sends is acknowledged. What the backend has sent is acknowledged before: it would send it
    /// again.
    async fn silence(&self) {
        const RETURN: u16 = 6;
        let sockets = std::mem::take(&mut *self.0.lock().unwrap());
        for socket in sockets {
            let socket = Socket::from_fd(socket).unwrap();
            socket.acknowledged().await;
            let nothing = SockFilter::new(RETURN, 0, 0, 0);
            SockRef::from(&socket).attach_filter(&[nothing]).unwrap();
        }
    }
}

/// Serves a request by its target, on a connection of its own.
fn serve(mut peer: Peer<TcpStream>, accepted: &Accepted, begun: &Sender<()>, paused: &Resumed) {
    let head = peer.request_head().unwrap();
    if head.target != "/paused" {
        accepted.add(&peer.stream);
    }
    match head.target.as_str() {
        "/events" => {
            peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nevent\r\n");
        }
        "/upgrade" => peer.send(
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: other\r\n\r\n\
             event",
        ),
        "/paused" => {
            begun.send(()).unwrap();
            paused.lock().unwrap().recv().unwrap();
            let length = peer.body(head.framing).unwrap().0.len();
            return peer.send(response_with(&length.to_string()));
        }
        _ => {}
    }
    begun.send(()).unwrap();
    // Ends with the agent's connection.
    peer.stream.set_read_timeout(Some(4 * SOON)).unwrap();
    let _ = peer.bytes(1 << 20);
}

type Resumed = Mutex<Receiver<()>>;

fn begin(scene: &Scene, head: String) -> Caller {
    let mut caller = scene.connect();
    let socket = &caller.stream.sock;
    socket.set_read_timeout(Some(4 * SOON)).unwrap();
    socket.set_write_timeout(Some(4 * SOON)).unwrap();
    caller.send(head);
    caller
}

#[test]
fn connections_end_once_nothing_is_acknowledged_and_live_ones_that_are_not_read_go_on() {
    let accepted = Accepted::default();
    let (begun, begins) = mpsc::channel();
    let (resume, resumed) = mpsc::channel();
    let resumed = Mutex::new(resumed);
    let of_backend = accepted.clone();
    let backend = backend::start(move |peer| serve(peer, &of_backend, &begun, &resumed));
    let scene = Scene::service().agent_to(backend).start();

    // Its connection to the backend has a closed window until the others have ended.
    let head = format!("Content-Length: {PAUSED}\r\n\r\n");
    let mut paused = begin(&scene, scene.request("POST /paused", &head));
    let upload = std::thread::spawn(move || {
        paused.send(vec![b'x'; PAUSED]);
        paused
    });
    let mut events = begin(&scene, scene.get("/events"));
    let upgrade = "Connection: Upgrade\r\nUpgrade: other\r\n\r\n";
    let mut upgraded = begin(&scene, scene.request("GET /upgrade", upgrade));
    let mut unanswered = begin(&scene, scene.request("POST /", "Content-Length: 5\r\n\r\n"));
    (0..4).for_each(|_| begins.recv_timeout(SOON).unwrap());
    for stream in [&mut events, &mut upgraded] {
        stream.response_head(&Method::GET).unwrap();
    }
    assert_eq!(events.bytes(10).unwrap(), b"5\r\nevent\r\n");
    assert_eq!(upgraded.bytes(5).unwrap(), b"event");

    on_a_reactor(accepted.silence());
    unanswered.send("bytes");
    let response = unanswered.response();
    assert_eq!(response.status, 502);
    assert_eq!(response.code(), "GW_BACKEND_RESET");
    let error = &response.json()["error"];
    let message = error["message"].as_str().unwrap();
    let reason = "nothing that was sent to it is acknowledged";
    assert!(message.contains(reason), "{message}");
    let more = events.bytes(1);
    assert!(more.is_err(), "the end of the chunked body is missing");
    assert!(upgraded.is_closed());

    resume.send(()).unwrap();
    let response = upload.join().unwrap().response();
    assert_eq!(response.body, PAUSED.to_string().into_bytes());
}

#[test]
fn http2_connections_end_once_nothing_is_acknowledged() {
    let accepted = Accepted::default();
    let of_backend = accepted.clone();
    let backend = http2_backend::start_noting(
        async |request, mut respond| {
            if request.uri().path() == "/events" {
                let mut stream = respond.send_response(Response::new(()), false).unwrap();
                stream
                    .send_data(Bytes::from_static(b"event"), false)
                    .unwrap();
                std::future::pending::<()>().await;
            }
            respond.send_response(Response::new(()), true).unwrap();
        },
        move |socket| of_backend.add(socket),
    );
    let scene = Scene::service().agent_to(backend).start();
    on_a_reactor(async {
        let connection = http2_caller::connect(&scene).await;
        let events = connection.request(&Method::GET, "/events");
        let (response, _) = connection.begin(events, true).await;
        let mut events = response.await.unwrap().into_body();
        assert_eq!(data(&mut events).await.unwrap(), "event");

        accepted.silence().await;
        let refused = connection.fetch(connection.request(&Method::POST, "/"));
        let moved = connection.fetch(connection.request(&Method::GET, "/"));
        // The GET has a PING that is not answered behind it, and a new connection.
        let (moved, refused) = match select(pin!(moved), pin!(refused)).await {
            Either::Left((moved, refused)) => (moved, refused.await),
            Either::Right(_) => panic!("the POST ended before the GET"),
        };
        assert_eq!(moved.status, 200);
        assert_eq!(refused.status, 502);
        assert_eq!(refused.json()["error"]["code"], "GW_BACKEND_RESET");
        let more = poll_fn(|cx| events.poll_data(cx)).await;
        assert!(more.unwrap().is_err());
    });
}
