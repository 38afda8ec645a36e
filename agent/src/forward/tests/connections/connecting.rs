//! How long an attempt to connect takes, and how old a connection gets.

use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketType};

use super::*;

#[test]
fn an_attempt_to_connect_ends_at_its_time_limit_and_names_what_it_waited_for() {
    // The kernel accepts connections, and the backend does nothing.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    for (url, awaited) in [
        (
            format!("h2c://{address}"),
            "has not sent its HTTP/2 settings",
        ),
        (
            format!("https://{address}"),
            "has not completed the TLS handshake",
        ),
    ] {
        let table = format!("urls = '{url}'\nconnect_timeout_seconds = 1");
        with_tunnel_to(&backends(&table), |gateway| async move {
            let exchanges = [(); 2].map(|()| gateway.send(get("/")));
            for exchange in exchanges {
                let (_, refusal) = exchange.error().await;
                let expected = format!("no connection within 1s: {address} {awaited}");
                assert!(refusal.contains(&expected), "{refusal}");
            }
        });
    }
}

#[test]
fn an_attempt_to_connect_to_a_unix_socket_with_a_full_queue_ends_at_its_time_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let address = SocketAddrUnix::new(&path).unwrap();
    let socket = || net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let listener = socket();
    net::bind(&listener, &address).unwrap();
    net::listen(&listener, 0).unwrap();
    // The only place of the queue.
    let first = socket();
    net::connect(&first, &address).unwrap();
    let url = format!("unix:{}", path.display());
    let table = format!("urls = '{url}'\nconnect_timeout_seconds = 1");
    with_tunnel_to(&backends(&table), |gateway| async move {
        let (_, refusal) = gateway.send(get("/")).error().await;
        let expected = "no connection within 1s: the queue of the socket is full";
        assert!(refusal.contains(expected), "{refusal}");
    });
}

#[test]
fn a_connection_gets_no_requests_beyond_its_greatest_age() {
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    let http1 = http1_answers(move |_, number| {
        counted.fetch_max(number + 1, Ordering::Relaxed);
        "HTTP/1.1 204 No Content\r\n\r\n"
    });
    let counted = Arc::clone(&connections);
    let http2 = http2_backend(move |_, mut respond, connection| {
        counted.fetch_max(connection + 1, Ordering::Relaxed);
        async move {
            respond.send_response(Response::new(()), true).unwrap();
        }
    });
    for urls in [http1, http2] {
        let table = format!("urls = '{}'\nconnection_max_age_seconds = 1", urls[0]);
        connections.store(0, Ordering::Relaxed);
        with_tunnel_to(&backends(&table), |gateway| async {
            let gateway = gateway;
            for number in 1..3 {
                gateway.send(get("/")).response().await;
                assert_eq!(connections.load(Ordering::Relaxed), number);
                runtime::sleep(Duration::from_millis(1100)).await;
                gateway.pool.look();
            }
        });
    }
}
