//! Client and server over loopback connections.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::routing::{get, post};
use axum::{Extension, Router};
use bytes::{Bytes, BytesMut};
use gw_base::service::hostname::Region;
use gw_base::tls::node::NodeTls;
use gw_base::tls::pki::{Authority, NodeIdentity};
use gw_interface::node_connections::{NodeConnection, channel};
use gw_interface::rate_limit::Claimant;
use gw_region::{Member, NodeSlot};
use http::{Request, StatusCode};
use rustls::ClientConnection;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use super::*;

/// Long enough to never pass in a test.
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(50);

/// A region whose node 0 serves its control plane.
struct World {
    _folder: tempfile::TempDir,
    authority: Authority,
    address: SocketAddr,
    /// TCP connections to node 0.
    connections: Arc<AtomicUsize>,
    _stop: oneshot::Sender<()>,
}

fn region() -> Region {
    Region::new("eu1", "example.com")
}

fn slot(slot: u16) -> NodeSlot {
    NodeSlot::new(slot).unwrap()
}

impl World {
    async fn start(limits: ServerLimits) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::load_or_create(folder.path(), "ca", "CA").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (stop, stopped) = oneshot::channel();
        let connections = Arc::<AtomicUsize>::default();
        let world = Self {
            _folder: folder,
            authority,
            address: listener.local_addr().unwrap(),
            connections: Arc::clone(&connections),
            _stop: stop,
        };
        let (given, mut waiting) = channel();
        tokio::spawn(async move {
            while let Ok((mut socket, from)) = listener.accept().await {
                connections.fetch_add(1, Ordering::Relaxed);
                let given = given.clone();
                tokio::spawn(async move {
                    let mut received = BytesMut::with_capacity(16 * 1024);
                    socket.read_buf(&mut received).await?;
                    let socket = socket.into_std()?.into();
                    let claimant = Claimant::Address(from.ip().into());
                    given.give(NodeConnection {
                        socket,
                        received: received.freeze(),
                        from,
                        claimant,
                    });
                    io::Result::Ok(())
                });
            }
        });
        let caller = |Extension(node): Extension<NodeIdentity>| async move {
            format!("{} {}", node.slot.get(), node.session)
        };
        let requests = Arc::<AtomicUsize>::default();
        let unlucky = move || async move {
            let number = requests.fetch_add(1, Ordering::Relaxed);
            assert!(number % 2 == 0, "the connection breaks off");
            number.to_string()
        };
        let router = Router::new()
            .route("/caller", get(caller))
            .route(
                "/length",
                post(|body: Bytes| async move { body.len().to_string() }),
            )
            .route("/refused", get(|| async { StatusCode::FORBIDDEN }))
            .route("/never", get(std::future::pending::<()>))
            .route("/unlucky", get(unlucky.clone()).post(unlucky));
        let node = world.local_node(0, 100);
        tokio::spawn(async move {
            serve(&mut waiting, node, router, limits, async {
                drop(stopped.await);
            })
            .await;
        });
        world
    }

    fn local_node(&self, number: u16, session: u128) -> Arc<LocalNode> {
        let node = LocalNode::new(region());
        self.certify(&node, number, session);
        node
    }

    /// Gives a node the certificate of a session, as when it joins again.
    fn certify(&self, node: &LocalNode, number: u16, session: u128) {
        let issued = self
            .authority
            .issue_node(
                &region(),
                NodeIdentity {
                    slot: slot(number),
                    session,
                },
            )
            .unwrap();
        let authority =
            CertificateDer::from_pem_slice(self.authority.certificate_pem().as_bytes()).unwrap();
        node.use_tls(Arc::new(NodeTls::new(&[authority], &issued).unwrap()));
    }

    fn client(&self) -> NodeClient {
        NodeClient::new(self.local_node(1, 101))
    }

    /// Node 0.
    fn member(&self) -> Member {
        Member {
            slot: slot(0),
            session: 100,
            peer_address: self.address,
        }
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

fn get_request(path: &str) -> Request<Bytes> {
    Request::get(path).body(Bytes::new()).unwrap()
}

async fn text(client: &NodeClient, to: &Member, request: Request<Bytes>) -> (StatusCode, String) {
    let response = client.send(to, request, LONG).await.unwrap();
    (
        response.status(),
        String::from_utf8(response.body().to_vec()).unwrap(),
    )
}

#[tokio::test]
async fn a_connection_whose_request_was_refused_is_not_used_again() {
    let world = World::start(ServerLimits::default()).await;
    let client = world.client();
    let to = world.member();
    assert_eq!(
        text(&client, &to, get_request("/refused")).await.0,
        StatusCode::FORBIDDEN
    );
    assert!(!client.has_idle());
    assert_eq!(
        text(&client, &to, get_request("/caller")).await.0,
        StatusCode::OK
    );
    assert_eq!(world.connections(), 2);
}

#[tokio::test]
async fn requests_share_connections_and_tell_the_node() {
    let world = World::start(ServerLimits::default()).await;
    let client = world.client();
    let to = world.member();
    for _ in 0..3 {
        assert_eq!(
            text(&client, &to, get_request("/caller")).await,
            (StatusCode::OK, "1 101".to_owned())
        );
    }
    assert_eq!(
        text(&client, &to, get_request("/other")).await.0,
        StatusCode::NOT_FOUND
    );
    assert_eq!(world.connections(), 1);
    let (one, two) = tokio::join!(
        text(&client, &to, get_request("/caller")),
        text(&client, &to, get_request("/caller"))
    );
    assert_eq!(one, two);
    assert_eq!(world.connections(), 2);
}

#[tokio::test]
async fn a_probe_has_a_connection_of_its_own() {
    let world = World::start(ServerLimits::default()).await;
    let client = world.client();
    let to = world.member();
    for count in [1, 2] {
        let response = client
            .send_on_new_connection(&to, get_request("/caller"), LONG)
            .await
            .unwrap();
        assert_eq!(
            (response.status(), world.connections(), client.has_idle()),
            (StatusCode::OK, count, false)
        );
    }
    text(&client, &to, get_request("/caller")).await;
    assert!(client.has_idle());
    client
        .send_on_new_connection(&to, get_request("/caller"), LONG)
        .await
        .unwrap();
    assert_eq!(world.connections(), 4);
}

#[tokio::test]
async fn only_the_process_that_is_meant_gets_a_request() {
    let world = World::start(ServerLimits::default()).await;
    let client = world.client();
    for to in [
        Member {
            session: 99,
            ..world.member()
        },
        Member {
            slot: slot(2),
            ..world.member()
        },
    ] {
        let error = client
            .send(&to, get_request("/caller"), LONG)
            .await
            .unwrap_err();
        assert!(matches!(error, NodeCallError::OtherProcess(_)), "{error:?}");
    }
}

#[tokio::test]
async fn failures_are_told_apart() {
    let world = World::start(ServerLimits::default()).await;
    let client = world.client();
    let to = world.member();
    let error = client
        .send(&to, get_request("/never"), SHORT)
        .await
        .unwrap_err();
    assert!(matches!(error, NodeCallError::TimedOut), "{error:?}");
    let error = NodeClient::new(LocalNode::new(region()))
        .send(&to, get_request("/caller"), LONG)
        .await
        .unwrap_err();
    assert!(matches!(error, NodeCallError::NoCertificate), "{error:?}");
    let free = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    let nowhere = Member {
        peer_address: free,
        ..to.clone()
    };
    let error = client
        .send(&nowhere, get_request("/caller"), LONG)
        .await
        .unwrap_err();
    assert!(matches!(error, NodeCallError::Refused), "{error:?}");
    // A node of another region's authority.
    let stranger = World::start(ServerLimits::default()).await.client();
    let error = stranger
        .send(&to, get_request("/caller"), LONG)
        .await
        .unwrap_err();
    assert!(matches!(error, NodeCallError::Io(_)), "{error:?}");
}

#[tokio::test]
async fn a_node_that_has_joined_again_opens_new_connections() {
    let world = World::start(ServerLimits::default()).await;
    let client = world.client();
    let to = world.member();
    for session in [101, 102, 103] {
        world.certify(client.local_node(), 1, session);
        for _ in 0..2 {
            assert_eq!(
                text(&client, &to, get_request("/caller")).await.1,
                format!("1 {session}")
            );
        }
    }
    assert_eq!(world.connections(), 3);
}

#[tokio::test]
async fn a_connection_that_the_other_end_has_closed_is_replaced() {
    let world = World::start(ServerLimits {
        idle: SHORT,
        ..ServerLimits::default()
    })
    .await;
    let client = world.client();
    let to = world.member();
    for count in 1..=3 {
        let post = Request::post("/length")
            .body(Bytes::from_static(b"abc"))
            .unwrap();
        assert_eq!(
            text(&client, &to, post).await,
            (StatusCode::OK, "3".to_owned())
        );
        assert_eq!(world.connections(), count);
        while client.has_idle() {
            tokio::time::sleep(SHORT / 10).await;
        }
    }
}

#[tokio::test]
async fn only_safe_requests_are_repeated() {
    let world = World::start(ServerLimits::default()).await;
    let client = world.client();
    let to = world.member();
    assert_eq!(text(&client, &to, get_request("/unlucky")).await.1, "0");
    assert_eq!(text(&client, &to, get_request("/unlucky")).await.1, "2");
    assert_eq!(world.connections(), 2);
    let post = Request::post("/unlucky").body(Bytes::new()).unwrap();
    let error = client.send(&to, post, LONG).await.unwrap_err();
    assert!(matches!(error, NodeCallError::Http(_)), "{error:?}");
    // Request 4 is the first of a new connection, and request 5 too: it is not repeated.
    assert_eq!(text(&client, &to, get_request("/unlucky")).await.1, "4");
    let error = world
        .client()
        .send(&to, get_request("/unlucky"), LONG)
        .await
        .unwrap_err();
    assert!(matches!(error, NodeCallError::Http(_)), "{error:?}");
    assert_eq!(world.connections(), 4);
}

#[tokio::test]
async fn bodies_are_bounded() {
    let world = World::start(ServerLimits {
        body: 1000,
        ..ServerLimits::default()
    })
    .await;
    let client = world.client();
    let to = world.member();
    for (length, status) in [
        (0, StatusCode::OK),
        (1000, StatusCode::OK),
        (1001, StatusCode::PAYLOAD_TOO_LARGE),
    ] {
        let request = Request::post("/length")
            .body(vec![0; length].into())
            .unwrap();
        assert_eq!(text(&client, &to, request).await.0, status, "{length}");
    }
    let request = Request::get("/caller")
        .header("x-long", "a".repeat(20_000))
        .body(Bytes::new())
        .unwrap();
    assert_eq!(
        text(&client, &to, request).await.0,
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE
    );
}

/// Sends bytes over TLS to node 0 and returns all that it answers until it closes the connection.
async fn answer_to(world: &World, bytes: &str) -> String {
    let node = world.local_node(1, 101);
    let mut stream = transport::connect(&world.member(), &node).await.unwrap();
    stream.write_all(bytes.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // The server may close without a close_notify.
    let _ = tokio::time::timeout(LONG, stream.read_to_end(&mut answer))
        .await
        .unwrap();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn slow_peers_are_cut_off() {
    let short = ServerLimits {
        handshake_within: SHORT,
        idle: SHORT,
        body_within: SHORT,
        ..ServerLimits::default()
    };
    let world = World::start(short).await;
    let mut socket = stalled(&world).await;
    let _ = tokio::time::timeout(LONG, socket.read_to_end(&mut Vec::new()))
        .await
        .unwrap();
    answer_to(&world, "").await;
    answer_to(&world, "GET /caller HTTP/1.1\r\n").await;
    let late = answer_to(
        &world,
        "POST /length HTTP/1.1\r\ncontent-length: 9\r\n\r\nhalf",
    )
    .await;
    assert!(late.starts_with("HTTP/1.1 400 "), "{late}");
}

#[tokio::test]
async fn connections_beyond_the_limit_are_refused() {
    let world = World::start(ServerLimits {
        connections: 1,
        ..ServerLimits::default()
    })
    .await;
    let first = world.client();
    let second = world.client();
    let to = world.member();
    assert_eq!(
        text(&first, &to, get_request("/caller")).await.0,
        StatusCode::OK
    );
    second
        .send(&to, get_request("/caller"), LONG)
        .await
        .unwrap_err();
    drop(first);
    while second
        .send(&to, get_request("/caller"), LONG)
        .await
        .is_err()
    {
        tokio::task::yield_now().await;
    }
}

/// A connection to node 0 with the beginning of a handshake.
async fn stalled(world: &World) -> TcpStream {
    let tls = world.local_node(1, 101).tls().unwrap();
    let mut hello = Vec::new();
    ClientConnection::new(Arc::clone(&tls.control_client), world.address.ip().into())
        .unwrap()
        .write_tls(&mut hello)
        .unwrap();
    let mut socket = TcpStream::connect(world.address).await.unwrap();
    socket.write_all(&hello).await.unwrap();
    // The handshake has begun.
    socket.readable().await.unwrap();
    socket
}

#[tokio::test]
async fn the_oldest_handshake_of_an_address_with_its_share_gives_way() {
    let limits = ServerLimits {
        handshakes: 4,
        handshakes_per_address: 2,
        ..ServerLimits::default()
    };
    let world = World::start(limits).await;
    let [mut first, _second, _third] = [
        stalled(&world).await,
        stalled(&world).await,
        stalled(&world).await,
    ];
    let _ = tokio::time::timeout(LONG, first.read_to_end(&mut Vec::new()))
        .await
        .unwrap();
    assert_eq!(
        text(&world.client(), &world.member(), get_request("/caller"))
            .await
            .0,
        StatusCode::OK
    );
}
