use std::sync::Arc;
use std::time::Duration;

use gw_region::owners::ownership::WorkerId;
use gw_shared::runtime::Driver;

use super::*;
use crate::memory::sockets::SocketBudget;

#[test]
fn entries_are_limited_and_freed_on_drop() {
    with_socket(|socket| {
        let connections = connections(1);
        let first = connections.register(socket, Instant::now());
        assert!(first.is_some() && connections.register(socket, Instant::now()).is_none());
        drop(first);
        assert_eq!(connections.len(), 0);
        assert!(connections.register(socket, Instant::now()).is_some());
    });
}

#[test]
fn idle_connections_have_deadlines_and_running_requests_have_none() {
    with_socket(|socket| {
        let connections = connections(1);
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let guard = connections.register(socket, start + second).unwrap();
        connections.sweep(start);
        assert!(!guard.entry.stopping.get());
        guard.busy();
        connections.sweep(start + 100 * second);
        assert!(!guard.entry.stopping.get());
        guard.idle_until(start + 200 * second);
        connections.sweep(start + 199 * second);
        assert!(!guard.entry.stopping.get());
        connections.sweep(start + 201 * second);
        assert!(guard.entry.stopping.get());
        assert_eq!(
            guard.entry.deadline.get(),
            Some(start + 201 * second + limits::LINGER)
        );
    });
}

#[test]
fn a_drain_shortens_deadlines_of_idle_connections_and_wakes_goaway_tasks() {
    with_socket(|socket| {
        let connections = connections(3);
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let [idle, early, busy] = [75, 2, 75].map(|seconds| {
            connections
                .register(socket, start + seconds * second)
                .unwrap()
        });
        busy.busy();
        let mut cx = Context::from_waker(Waker::noop());
        assert!(busy.poll_leave(&mut cx).is_pending());
        connections.drain(start, 5 * second);
        assert!(busy.poll_leave(&mut cx).is_ready());
        assert_eq!(idle.entry.deadline.get(), Some(start + 5 * second));
        assert_eq!(early.entry.deadline.get(), Some(start + 2 * second));
        assert_eq!(busy.entry.deadline.get(), None);
        busy.idle_until(start + 75 * second);
        assert!(busy.entry.deadline.get().unwrap() < start + 75 * second);
    });
}

#[test]
fn a_drain_waits_for_requests_that_were_sent_before_it() {
    with_socket(|socket| {
        let connections = connections(4);
        let register = || {
            connections
                .register(socket, Instant::now() + limits::IDLE)
                .unwrap()
        };
        let idle = register();
        let busy = register();
        idle.idle_until(Instant::now() + limits::IDLE);
        busy.busy();
        let began = Instant::now();
        // Later than a request sent before the drain can arrive.
        let later = began + limits::DRAIN_IDLE;
        assert!(!connections.are_quiet(later), "no drain");
        connections.drain(began, limits::DRAIN_IDLE);
        assert!(!connections.are_quiet(later), "a request runs");
        drop(busy);
        assert!(!connections.are_quiet(began) && connections.are_quiet(later));
        idle.expect_by(later);
        assert!(!connections.are_quiet(later), "a head has begun");
        idle.idle_until(later + limits::IDLE);
        let fresh = register();
        assert!(!connections.are_quiet(later), "a handshake");
        drop(fresh);
        connections.end_quiet(began);
        assert!(!idle.entry.stopping.get());
        connections.end_quiet(later);
        assert!(idle.entry.stopping.get());
    });
}

#[test]
fn the_longest_idle_connections_are_evicted_and_running_requests_are_not() {
    with_socket(|socket| {
        let connections = connections(64);
        let now = Instant::now();
        let register = || connections.register(socket, now);
        let mut all: Vec<ConnectionGuard> = (0..62).map(|_| register().unwrap()).collect();
        all[0].busy();
        all[1].idle_until(now);
        assert_eq!(connections.evicted.value(), 0);
        all.push(register().unwrap());
        let evicted = |all: &[ConnectionGuard]| -> Vec<usize> {
            (0..all.len())
                .filter(|at| all[*at].entry.evicted.get())
                .collect()
        };
        assert_eq!(
            (connections.evicted.value(), evicted(&all)),
            (2, vec![2, 3])
        );
        all.push(register().unwrap());
        // Full, and two evicted connections are still present: evicts two more.
        assert!(register().is_none());
        assert_eq!(
            (connections.evicted.value(), evicted(&all)),
            (4, vec![2, 3, 4, 5])
        );
        drop(all.drain(2..6).collect::<Vec<_>>());
        assert_eq!((connections.evicting.get(), connections.len()), (0, 60));
        all.iter().for_each(ConnectionGuard::busy);
        while let Some(guard) = register() {
            guard.busy();
            all.push(guard);
        }
        assert_eq!((connections.evicted.value(), connections.len()), (4, 64));
    });
}

#[test]
fn a_peer_of_an_upgraded_connection_leaves_with_both_directions() {
    with_ends(|socket, peer| {
        let connections = connections(1);
        let now = Instant::now();
        let guard = connections.register(socket, now).unwrap();
        guard.busy();
        let mut cx = Context::from_waker(Waker::noop());
        peer.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(guard.poll_broken(&mut cx).is_pending());
        connections.sweep(now);
        assert!(guard.poll_broken(&mut cx).is_pending(), "it may receive");
        socket.shutdown_write();
        while !socket.closer().is_broken() {
            std::thread::yield_now();
        }
        connections.sweep(now);
        assert!(guard.poll_broken(&mut cx).is_ready());
    });
}

fn connections(limit: usize) -> Rc<Connections> {
    let budget = Arc::new(SocketBudget::new(usize::MAX, 1));
    Connections::new(limit, SocketMemory::new(WorkerId(0), budget))
}

fn with_socket(test: impl FnOnce(&Socket) + 'static) {
    with_ends(|socket, _| test(socket));
}

/// Runs `test` with a connection and its other end.
fn with_ends(test: impl FnOnce(&Socket, std::net::TcpStream) + 'static) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    Driver::choose()
        .unwrap()
        .block_on(async move {
            let socket = Socket::connect(address, None).await.unwrap();
            test(&socket, listener.accept().unwrap().0);
        })
        .unwrap();
}
