//! What a program sees of sockets, through the functions of the C library that `std::net` calls.

use std::io::ErrorKind;
use std::net::Shutdown;
use std::time::Duration;

use gw_simulated_kernel::scheduler::sleep;
use gw_simulated_kernel::{Host, network, sockets};

use crate::support::{Listener, Pair, Stream, machine, now, on, pair, run, server_address};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn bytes_come_back() {
    let (came_back, addresses) = run(1, async || {
        let Pair { client, server, .. } = pair().await;
        let addresses = (
            client.0.peer_addr().unwrap(),
            client.0.local_addr().unwrap(),
            server.0.peer_addr().unwrap(),
        );
        Host::WORLD.spawn(async move {
            let received = server.read_to_end().await.unwrap();
            server.write_all(&received).await.unwrap();
        });
        let sent: Vec<u8> = (0..300_000_u32).map(|number| number as u8).collect();
        client.write_all(&sent).await.unwrap();
        client.0.shutdown(Shutdown::Write).unwrap();
        (client.read_to_end().await.unwrap() == sent, addresses)
    });
    assert!(came_back);
    let (peer, own, seen) = addresses;
    assert_eq!(peer, server_address());
    assert_eq!((own.ip(), own), (machine(2), seen));
}

#[test]
fn a_close_is_the_end_of_the_stream() {
    let read = run(1, async || {
        let Pair { client, server, .. } = pair().await;
        server.write_all(b"last words").await.unwrap();
        drop(server);
        client.read_to_end().await.unwrap()
    });
    assert_eq!(read, b"last words");
}

#[test]
fn a_close_with_unread_bytes_is_a_reset() {
    let (read, write) = run(1, async || {
        let Pair { client, server, .. } = pair().await;
        client.write_all(b"unread").await.unwrap();
        sleep(SECOND).await;
        drop(server);
        sleep(SECOND).await;
        let read = client.read(&mut [0; 10]).await.unwrap_err().kind();
        let write = client.write_all(b"more").await.unwrap_err().kind();
        (read, write)
    });
    assert_eq!(read, ErrorKind::ConnectionReset);
    assert_eq!(write, ErrorKind::BrokenPipe);
}

#[test]
fn bytes_to_a_closed_socket_are_answered_with_a_reset() {
    let error = run(1, async || {
        let Pair { client, server, .. } = pair().await;
        drop(server);
        client.write_all(b"too late").await.unwrap();
        sleep(SECOND).await;
        client.write_all(b"more").await.unwrap_err().kind()
    });
    assert!(matches!(
        error,
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
    ));
}

#[test]
fn the_other_direction_stays_open_after_a_shutdown() {
    let (at_server, at_client) = run(1, async || {
        let Pair { client, server, .. } = pair().await;
        client.write_all(b"question").await.unwrap();
        client.0.shutdown(Shutdown::Write).unwrap();
        let question = server.read_to_end().await.unwrap();
        sleep(SECOND).await;
        server.write_all(b"answer").await.unwrap();
        drop(server);
        (question, client.read_to_end().await.unwrap())
    });
    assert_eq!(
        (&*at_server, &*at_client),
        (&b"question"[..], &b"answer"[..])
    );
}

#[test]
fn a_peer_that_does_not_read_stops_the_sender() {
    let (sent, bound, received) = run(1, async || {
        let Pair { client, server, .. } = pair().await;
        let mut sent = 0;
        // Until both buffers are full.
        for _ in 0..10 {
            sent += client.fill();
            sleep(SECOND).await;
        }
        let measure = sockets::measure(client.descriptor()).unwrap();
        let received = sockets::measure(server.descriptor()).unwrap();
        let bound = measure.send_limit + received.receive_limit;
        client.0.shutdown(Shutdown::Write).unwrap();
        (sent, bound, server.read_to_end().await.unwrap().len())
    });
    assert_eq!(sent, bound);
    assert_eq!(received, sent);
}

#[test]
fn a_limit_of_unsent_bytes_bounds_what_is_accepted() {
    const LIMIT: usize = 16 * 1024;
    let sent = run(1, async || {
        let Pair { client, server, .. } = pair().await;
        set(&client, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, LIMIT);
        let mut sent = 0;
        for _ in 0..10 {
            sent += client.fill();
            sleep(SECOND).await;
        }
        let unread = sockets::measure(server.descriptor()).unwrap().unread;
        sent - unread
    });
    // One more write is accepted below the limit.
    assert!((LIMIT..LIMIT + 4096).contains(&sent), "{sent}");
}

fn set(stream: &Stream, level: i32, name: i32, value: usize) {
    let value = i32::try_from(value).unwrap();
    #[expect(unsafe_code, reason = "std has no function for these options")]
    // SAFETY: the value is valid for its length.
    let result = unsafe {
        libc::setsockopt(
            stream.descriptor(),
            level,
            name,
            std::ptr::from_ref(&value).cast(),
            4,
        )
    };
    assert_eq!(result, 0);
}

#[test]
fn a_cut_path_loses_nothing_once_it_is_mended() {
    let (received, took) = run(1, async || {
        let Pair { client, server, .. } = pair().await;
        network::cut(machine(1), machine(2), true);
        client.write_all(b"patience").await.unwrap();
        client.0.shutdown(Shutdown::Write).unwrap();
        Host::WORLD.spawn(async {
            sleep(5 * SECOND).await;
            network::cut(machine(1), machine(2), false);
        });
        let began = now();
        (server.read_to_end().await.unwrap(), now() - began)
    });
    assert_eq!(received, b"patience");
    assert!(took >= 5 * SECOND && took < 6 * SECOND, "{took:?}");
}

#[test]
fn the_user_timeout_ends_a_connection_on_a_cut_path() {
    let (error, took) = run(1, async || {
        let Pair { client, server, .. } = pair().await;
        set(&client, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 10_000);
        network::cut(machine(1), machine(2), true);
        let began = now();
        client.write_all(b"lost").await.unwrap();
        let error = client.read(&mut [0; 10]).await.unwrap_err().kind();
        drop(server);
        (error, now() - began)
    });
    assert_eq!(error, ErrorKind::TimedOut);
    assert!(took >= 10 * SECOND && took < 11 * SECOND, "{took:?}");
}

#[test]
fn keep_alive_finds_a_peer_that_is_gone() {
    let (error, took) = run(1, async || {
        let Pair { client, server, .. } = pair().await;
        set(&client, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
        set(&client, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 5);
        set(&client, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3);
        set(&client, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 20);
        // An idle connection lives on as long as its peer answers.
        sleep(100 * SECOND).await;
        network::cut(machine(1), machine(2), true);
        let began = now();
        let error = client.read(&mut [0; 10]).await.unwrap_err().kind();
        drop(server);
        (error, now() - began)
    });
    assert_eq!(error, ErrorKind::TimedOut);
    // At most 20 seconds until the first probe, then 3 more.
    assert!(took >= 15 * SECOND && took <= 36 * SECOND, "{took:?}");
}

#[test]
fn a_port_without_a_listener_refuses() {
    let error = run(1, async || {
        let client = Host::new("client", machine(2));
        let connected = on(client, async || Stream::connect(server_address()).await);
        connected.await.map(|_| ()).unwrap_err().kind()
    });
    assert_eq!(error, ErrorKind::ConnectionRefused);
}

#[test]
fn the_end_of_a_listener_resets_what_it_has_not_accepted() {
    let error = run(1, async || {
        let server = Host::new("server", machine(1));
        let client = Host::new("client", machine(2));
        let listener = server.enter(|| Listener::bind(server_address())).unwrap();
        let waiting = on(client, async || {
            Stream::connect(server_address()).await.unwrap()
        })
        .await;
        drop(listener);
        waiting.read(&mut [0; 10]).await.unwrap_err().kind()
    });
    assert_eq!(error, ErrorKind::ConnectionReset);
}

#[test]
fn connections_are_spread_over_the_listeners_of_an_address() {
    const CONNECTIONS: usize = 200;
    let counts = run(1, async || {
        let hosts = [
            Host::new("server a", machine(1)),
            Host::new("server b", machine(1)),
        ];
        let listeners = hosts.map(|host| host.enter(|| Listener::bind(server_address())).unwrap());
        let client = Host::new("client", machine(2));
        let mut clients = Vec::new();
        for _ in 0..CONNECTIONS {
            let connected = on(client, async || Stream::connect(server_address()).await);
            clients.push(connected.await.unwrap());
        }
        let counts = std::rc::Rc::new(std::cell::RefCell::new([0; 2]));
        for (number, listener) in listeners.into_iter().enumerate() {
            let counts = std::rc::Rc::clone(&counts);
            hosts[number].spawn(async move {
                while listener.accept().await.is_ok() {
                    counts.borrow_mut()[number] += 1;
                }
            });
        }
        sleep(SECOND).await;
        drop(clients);
        *counts.borrow()
    });
    let [a, b] = counts;
    assert_eq!(a + b, CONNECTIONS);
    assert!(a > 50 && b > 50, "{a} and {b}");
}

#[test]
fn a_pair_of_unix_sockets_carries_bytes_and_ends_with_either_host() {
    let (read, end, option) = run(1, async || {
        let hosts = [1, 2].map(|number| Host::new("end", machine(number)));
        let [one, other] = sockets::pair(hosts).unwrap().map(Stream::of);
        for stream in [&one, &other] {
            stream.0.set_nonblocking(true).unwrap();
        }
        one.write_all(b"over").await.unwrap();
        let mut read = [0; 8];
        let length = other.read(&mut read).await.unwrap();
        let option = other.0.set_nodelay(true).unwrap_err().raw_os_error();
        hosts[0].kill();
        let end = other.read(&mut read[length..]).await.unwrap();
        std::mem::forget(one);
        (read[..length].to_vec(), end, option)
    });
    assert_eq!((&read[..], end), (&b"over"[..], 0));
    assert_eq!(option, Some(libc::EOPNOTSUPP));
}
