use std::io::IoSlice;
use std::net::{TcpListener, TcpStream};

use gw_shared::runtime::Driver;

use super::*;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

#[test]
fn an_account_may_hold_half_or_an_even_share() {
    assert_eq!(allowance(100, 1, 1, 0, 0), 50);
    assert_eq!(allowance(100, 1, 1, 60, 60), 50);
    // Another account holds 60, so 40 are left.
    assert_eq!(allowance(100, 1, 2, 60, 0), 50);
    assert_eq!(allowance(100, 1, 4, 70, 0), 30);
    assert_eq!(allowance(100, 1, 4, 100, 0), 25);
    // An account always has an even share of the part of its worker.
    assert_eq!(allowance(1600, 8, 1, 1600, 100), 100);
}

#[test]
fn more_connections_of_an_account_have_fewer_unsent_bytes_each() {
    let limit = |sockets| unsent_limit(240 * MIB, sockets) as usize;
    assert_eq!(limit(0), 128 * KIB);
    assert_eq!(
        (limit(120), limit(121), limit(241)),
        (128 * KIB, 64 * KIB, 32 * KIB)
    );
    assert_eq!(limit(100_000), 8 * KIB);
    // All connections stall with twice the limit that they were opened with.
    let held: usize = (1..=9000).map(|sockets| 2 * limit(sockets)).sum();
    assert!(held <= 240 * MIB, "{} MiB", held / MIB);
}

/// A worker's memory with its connections.
struct Site {
    memory: Rc<SocketMemory>,
    listener: TcpListener,
}

impl Site {
    fn run<F: Future<Output = ()>>(total: usize, test: impl FnOnce(Self) -> F + 'static) {
        let memory = move || SocketMemory::new(WorkerId(0), Arc::new(SocketBudget::new(total, 1)));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Driver::choose()
            .unwrap()
            .block_on(async move {
                test(Self {
                    memory: memory(),
                    listener,
                })
                .await;
            })
            .unwrap();
    }

    /// A connection for a service of `account`, and its peer, which reads nothing.
    async fn connect(&self, account: &str) -> (Socket, WatchedSocket, TcpStream) {
        let socket = Socket::connect(self.listener.local_addr().unwrap(), None)
            .await
            .unwrap();
        let peer = self.listener.accept().unwrap().0;
        socket2::SockRef::from(&peer)
            .set_recv_buffer_size(16 * KIB)
            .unwrap();
        let watched = self.memory.watch(&socket);
        watched.usage().serves(&account.parse().unwrap());
        (socket, watched, peer)
    }
}

/// Sends until the kernel accepts no more.
fn fill(socket: &Socket, watched: &WatchedSocket) {
    let data = vec![0; 64 * KIB];
    while socket.try_send(&[IoSlice::new(&data)]).is_ok() {
        watched.carried();
    }
}

#[test]
fn connections_count_while_their_peers_read_nothing() {
    Site::run(64 * MIB, |site| async move {
        let (socket, watched, mut peer) = site.connect("one").await;
        assert_eq!(site.memory.held(), 0);
        fill(&socket, &watched);
        site.memory.sweep().await;
        let held = site.memory.held();
        assert!((128 * KIB..MIB).contains(&held), "{held}");
        // The peer reads everything and closes, which acknowledges it.
        socket.shutdown_write();
        std::io::copy(&mut peer, &mut std::io::sink()).unwrap();
        drop(peer);
        site.memory.sweep().await;
        assert_eq!(
            (site.memory.held(), site.memory.accounts.borrow().len()),
            (0, 0)
        );
        assert!(!watched.usage().is_counted());
    });
}

#[test]
fn blocked_connections_are_found_and_later_ones_have_lower_limits() {
    Site::run(MIB, |site| async move {
        let (socket, _watched, _peer) = site.connect("one").await;
        while socket.try_send(&[IoSlice::new(&[0; 64 * KIB])]).is_ok() {}
        assert_eq!(site.memory.held(), 0, "not measured yet");
        site.memory.sweep().await;
        let first = site.memory.held();
        assert!(first > 24 * KIB, "{first}");
        // A sixteenth of the account's 512 KiB, for two connections.
        let (socket, watched, _peer) = site.connect("one").await;
        fill(&socket, &watched);
        site.memory.sweep().await;
        let second = site.memory.held() - first;
        assert!(second < first, "{second} after {first}");
    });
}

#[test]
fn new_connections_between_two_sweeps_stay_within_the_allowance() {
    Site::run(32 * MIB, |site| async move {
        let mut connections = Vec::new();
        for _ in 0..300 {
            connections.push(site.connect("one").await);
        }
        for (socket, ..) in &connections {
            while socket.try_send(&[IoSlice::new(&[0; 64 * 1024])]).is_ok() {}
        }
        site.memory.sweep().await;
        let held = site.memory.held();
        assert!((2 * MIB..16 * MIB).contains(&held), "{held}");
        assert_eq!(site.memory.shed.value(), 0);
    });
}

#[test]
fn unread_bytes_are_found_without_carried_bytes() {
    Site::run(64 * MIB, |site| async move {
        let (_socket, _watched, mut peer) = site.connect("one").await;
        std::io::Write::write_all(&mut peer, &[0; 32 * KIB]).unwrap();
        for _ in 0..=ROUNDS_UNTIL_MEASURED {
            site.memory.sweep().await;
        }
        assert!(site.memory.held() >= 32 * KIB, "{}", site.memory.held());
    });
}

#[test]
fn unread_responses_count_once_their_requests_have_ended() {
    Site::run(64 * MIB, |site| async move {
        let (socket, watched, _peer) = site.connect("one").await;
        // More than the receive buffer of the peer, less than is measured while a request runs.
        let answer = vec![0; 48 * KIB];
        assert_eq!(
            socket.try_send(&[IoSlice::new(&answer)]).unwrap(),
            answer.len()
        );
        watched.carried();
        assert_eq!(site.memory.held(), 0);
        watched.rests();
        assert!(site.memory.held() > 16 * KIB, "{}", site.memory.held());
    });
}

#[test]
fn an_ended_connection_does_not_count() {
    Site::run(64 * MIB, |site| async move {
        let (socket, watched, _peer) = site.connect("one").await;
        fill(&socket, &watched);
        assert!(site.memory.held() > 0);
        drop(watched);
        assert_eq!(
            (site.memory.held(), site.memory.sockets.borrow().len()),
            (0, 0)
        );
    });
}

#[test]
fn only_stalled_connections_of_an_account_beyond_its_share_are_reset() {
    Site::run(4 * MIB, |site| async move {
        let mut connections = vec![site.connect("modest").await];
        for _ in 0..200 {
            connections.push(site.connect("greedy").await);
        }
        for (socket, watched, _) in &connections {
            fill(socket, watched);
        }
        site.memory.sweep().await;
        site.memory.sweep().await;
        let ended = |socket: &Socket| {
            socket
                .try_send(&[IoSlice::new(b"x")])
                .is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock)
        };
        let (shed, kept): (Vec<_>, Vec<_>) = connections
            .drain(1..)
            .partition(|(socket, ..)| ended(socket));
        assert!(
            !shed.is_empty() && !kept.is_empty(),
            "{} of 200",
            shed.len()
        );
        assert_eq!(site.memory.shed.value(), shed.len() as u64);
        assert!(
            !ended(&connections[0].0),
            "the other account keeps its connection"
        );
        // The reset connections end; the others are within the share.
        drop(shed);
        site.memory.sweep().await;
        assert!(
            site.memory.held() <= 2 * MIB + 512 * KIB,
            "{}",
            site.memory.held()
        );
    });
}

#[test]
fn pressure_on_the_machine_frees_an_eighth_of_the_largest_account() {
    Site::run(8 * MIB, |site| async move {
        let mut connections = Vec::new();
        for account in [
            "small", "large", "large", "large", "large", "large", "large", "large", "large",
        ] {
            connections.push(site.connect(account).await);
        }
        for (socket, watched, _) in &connections {
            fill(socket, watched);
        }
        site.memory.sweep().await;
        assert_eq!(site.memory.shed.value(), 0);
        site.memory.budget.is_pressed.store(true, Ordering::Relaxed);
        site.memory.sweep().await;
        assert!(
            (1..=3).contains(&site.memory.shed.value()),
            "{}",
            site.memory.shed.value()
        );
        let (socket, ..) = &connections[0];
        let error = socket.try_send(&[IoSlice::new(b"x")]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    });
}
