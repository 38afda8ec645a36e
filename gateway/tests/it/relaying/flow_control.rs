//! Flow control: memory held by stalled callers and backends, and progress of other requests.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use gw_shared::tunnel::window::{FIRST, LEAST, TUNNEL_BUDGET};
use http::Method;

use super::{OK, assert_answered};
use crate::support::peers::backend;
use crate::support::peers::caller::Caller;
use crate::support::peers::http1_peer::Peer;
use crate::support::scene::Scene;
use crate::support::{eventually, turn};

const MIB: usize = 1024 * 1024;
/// Bytes of a race that the test ends itself.
const FOR_EVER: usize = usize::MAX / 2;

const BLOCK: &[u8] = &[0; 64 * 1024];

/// `/endless` sends until the connection ends. `/sink` reads its body and never answers. `/deaf`
/// does not read its body until the caller disconnects. Other requests are answered at once.
fn serve(mut peer: Peer<TcpStream>) {
    while let Ok(head) = peer.request_head() {
        match head.target.as_str() {
            "/endless" => {
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n");
                peer.stream.set_write_timeout(None).unwrap();
                while peer.try_send(BLOCK).is_ok() {}
                return;
            }
            "/sink" => {
                let mut block = vec![0; BLOCK.len()];
                while peer.stream.read(&mut block).is_ok_and(|read| read > 0) {}
                return;
            }
            "/deaf" => {
                peer.stream.set_read_timeout(None).unwrap();
                // The socket reports a hang-up once the agent closes it.
                use rustix::event::{PollFd, PollFlags, poll};
                let mut watched = [PollFd::new(&peer.stream, PollFlags::RDHUP)];
                poll(&mut watched, None).unwrap();
                return;
            }
            _ => peer.send(OK),
        }
    }
}

fn start(slots: u32) -> Scene {
    start_with(slots, "")
}

/// As [`start`], with further lines of configuration.
fn start_with(slots: u32, configuration: &str) -> Scene {
    Scene::service()
        .agent_to(backend::start(serve))
        .slots(slots)
        .workers(1)
        .configuration(configuration)
        .start()
}

/// Callers that have read the head of a response and read no further.
fn stalled_downloads(scene: &Scene, callers: usize) -> Vec<Caller> {
    (0..callers)
        .map(|_| {
            let mut caller = scene.connect();
            caller.send(scene.get("/endless"));
            assert_eq!(caller.response_head(&Method::GET).unwrap().status, 200);
            caller
        })
        .collect()
}

/// Waits until the streams of the callers are full: the held bytes have not changed for a while and
/// are `at_least` this many. Returns them.
fn held_once_full(scene: &Scene, at_least: usize) -> usize {
    let mut before = 0;
    let mut unchanged = 0;
    eventually("streams are full", || {
        let held = scene.tunnels()[0].held_bytes;
        unchanged = if held == before { unchanged + 1 } else { 0 };
        before = held;
        (held >= at_least && unchanged >= 20).then_some(held)
    })
}

/// Waits until the tunnel has smaller windows than at its start.
fn wait_for_smaller_windows(scene: &Scene) {
    eventually("the windows shrink", || {
        (scene.tunnels()[0].window < FIRST).then_some(())
    });
}

#[test]
fn stalled_callers_hold_at_most_the_budget_of_their_tunnel_and_give_it_back() {
    let _turn = turn();
    const CALLERS: usize = 300;
    let scene = start(512);
    let callers = stalled_downloads(&scene, CALLERS);
    wait_for_smaller_windows(&scene);
    let held = held_once_full(&scene, TUNNEL_BUDGET / 2);
    let most = TUNNEL_BUDGET + CALLERS * LEAST as usize;
    assert!(held <= most, "{} MiB", held / MIB);
    assert_answered(&scene);

    // Without the stalled callers, the other streams get their windows back.
    drop(callers);
    eventually("the windows grow again", || {
        assert_answered(&scene);
        let tunnel = &scene.tunnels()[0];
        (tunnel.window == FIRST && tunnel.held_bytes == 0).then_some(())
    });
}

/// Callers that have sent more than a window of a body that the backend does not read.
fn stalled_uploads(scene: &Scene, callers: usize) -> Vec<Caller> {
    let connect = || {
        let mut caller = scene.connect();
        caller.send(scene.request("PUT /deaf", "Content-Length: 1000000000\r\n\r\n"));
        caller.stream.sock.set_nonblocking(true).unwrap();
        caller
    };
    let mut callers: Vec<Caller> = std::iter::repeat_with(connect).take(callers).collect();
    for caller in &mut callers {
        // Bytes that cannot be sent at once are never sent.
        let _ = (0..64).try_for_each(|_| caller.stream.write_all(BLOCK));
    }
    callers
}

#[test]
fn a_small_request_passes_while_all_other_streams_are_full() {
    let _turn = turn();
    let scene = start(200);
    let _down = stalled_downloads(&scene, 99);
    let _up = stalled_uploads(&scene, 100);
    held_once_full(&scene, 8 * MIB);
    for _ in 0..10 {
        assert_answered(&scene);
    }
}

/// Opens downloads that stall until one is refused for want of memory. Returns the callers of the
/// others; asserts that these are no more than `most`.
fn stalled_until_refused(scene: &Scene, most: usize) -> Vec<Caller> {
    let mut callers = Vec::new();
    loop {
        let mut caller = scene.connect();
        caller.send(scene.get("/endless"));
        let head = caller.response_head(&Method::GET).unwrap();
        if head.status != 200 {
            assert_eq!(head.status, 503);
            assert_eq!(head.headers["x-gw-status"], "Overloaded");
            return callers;
        }
        callers.push(caller);
        assert!(callers.len() <= most, "one account has more than its share");
    }
}

#[test]
fn the_memory_limit_of_a_worker_shrinks_windows_before_it_refuses_requests() {
    let _turn = turn();
    const STREAMS: usize = 64;
    const MEMORY: usize = 40 * MIB;
    // One account may hold half of it, or a quarter while kernel memory of its callers takes the
    // most that it may. The first streams have large windows, and the others the least.
    const _: () = assert!(MEMORY == 10 * STREAMS * LEAST as usize);
    let scene = start_with(8 * STREAMS as u32, "relay_memory_mib = 40\n");
    let mut callers = stalled_downloads(&scene, STREAMS);
    // How far depends on the time at which each stream began.
    wait_for_smaller_windows(&scene);
    // Each stream got at most its share at its start, and the shares of the first streams were
    // larger.
    let held = held_once_full(&scene, MIB);
    assert!(held <= MEMORY, "{} KiB", held / 1024);

    // Half of the memory, if the kernel holds little for its callers yet, in streams with the least
    // windows.
    let most = 5 * STREAMS;
    // Bytes still move on into the callers' sockets: a refusal need not be the last one.
    let mut late = loop {
        callers.extend(stalled_until_refused(&scene, most - callers.len()));
        let mut late = scene.connect();
        let response = late.ask(scene.get("/"));
        if response.status != 200 {
            assert_eq!(response.code(), "GW_OVERLOADED");
            break late;
        }
    };
    let tunnel = &scene.tunnels()[0];
    assert!(tunnel.window < FIRST);
    let held = tunnel.held_bytes;
    assert!(held <= MEMORY, "{} KiB", held / 1024);
    callers.pop();
    eventually("a request is admitted again", || {
        (late.ask(scene.get("/")).status == 200).then_some(())
    });
}

#[test]
fn kernel_memory_of_stalled_callers_is_bounded_counted_and_released() {
    let _turn = turn();
    // Far below the share of the account before the gateway has measured any connection, however
    // slow the machine is: each socket starts with at most 128 KiB of unsent bytes and can hold
    // twice that.
    const CALLERS: usize = 100;
    let scene = start_with(512, "relay_memory_mib = 512\n");
    let kernel_bytes = || scene.metrics().count("gw_connections_kernel_bytes") as usize;
    let callers = stalled_downloads(&scene, CALLERS);
    let held = eventually("the memory of every caller is counted", || {
        let held = kernel_bytes();
        (held > CALLERS * 8 * 1024).then_some(held)
    });
    let metrics = scene.metrics();
    let limit = metrics.count("gw_connections_kernel_limit_bytes") as usize;
    assert!(limit <= 256 * MIB && held <= limit / 2, "{held} of {limit}");
    let ended = metrics.count_with("gw_connections_ended_early_total", "memory");
    assert_eq!(ended, 0, "the account is within its share");
    assert_answered(&scene);
    drop(callers);
    eventually("no memory is counted", || {
        (kernel_bytes() == 0).then_some(())
    });
}

/// Starts downloads that read until they have `total` bytes together. Returns the shared byte count
/// and the threads, whose results are their own byte counts.
fn race(
    scene: &Scene,
    downloads: usize,
    total: usize,
) -> (Arc<AtomicUsize>, Vec<thread::JoinHandle<usize>>) {
    let all = Arc::new(AtomicUsize::new(0));
    let start = Arc::new(Barrier::new(downloads));
    let racers = stalled_downloads(scene, downloads)
        .into_iter()
        .map(|mut caller| {
            let all = Arc::clone(&all);
            let start = Arc::clone(&start);
            thread::spawn(move || {
                start.wait();
                let mut own = 0;
                while all.load(Ordering::Relaxed) < total {
                    own += caller.bytes(16 * 1024).unwrap().len();
                    all.fetch_add(16 * 1024, Ordering::Relaxed);
                }
                own
            })
        })
        .collect();
    (all, racers)
}

#[test]
fn streams_of_one_tunnel_share_it_evenly() {
    let _turn = turn();
    let scene = start(128);
    let mut callers = stalled_downloads(&scene, 8);
    let mut shares = vec![0; callers.len()];
    let mut chunk = vec![0; 16 * 1024];
    for caller in &callers {
        caller.stream.sock.set_nonblocking(true).unwrap();
    }
    // One thread reads from all connections in turn, so that the shares do not depend on the
    // scheduling of threads of the test.
    while shares.iter().sum::<usize>() < 128 * MIB {
        let before = shares.clone();
        for (caller, share) in callers.iter_mut().zip(&mut shares) {
            match caller.stream.read(&mut chunk) {
                Ok(0) => panic!("a download has ended"),
                Ok(read) => *share += read,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
        if shares == before {
            thread::yield_now();
        }
    }
    let least = shares.iter().min().unwrap();
    let most = shares.iter().max().unwrap();
    assert!(least * 2 >= *most, "{shares:?}");
}

#[test]
fn a_small_request_does_not_wait_for_bulk_transfers() {
    let _turn = turn();
    let scene = start(128);
    let (all, racers) = race(&scene, 8, FOR_EVER);
    let mut caller = scene.connect();
    let mut beside = Vec::new();
    while beside.len() < 20 || all.load(Ordering::Relaxed) < 128 * MIB {
        let before = all.load(Ordering::Relaxed);
        assert_eq!(caller.ask(scene.get("/")).body, b"ok");
        beside.push(all.load(Ordering::Relaxed) - before);
    }
    all.store(FOR_EVER, Ordering::Relaxed);
    assert!(racers.into_iter().all(|racer| racer.join().unwrap() > 0));
    beside.sort_unstable();
    // Queued behind the bulk transfers, the request would wait for most of their bytes.
    assert!(beside[beside.len() / 2] < 16 * MIB, "{beside:?}");
}

#[test]
fn windows_adjust_while_both_directions_are_full() {
    let _turn = turn();
    let scene = start(512);
    let (all, racers) = race(&scene, 2, FOR_EVER);
    let uploads: Vec<_> = (0..2)
        .map(|_| {
            let mut caller = scene.connect();
            caller.send(scene.request("PUT /sink", "Content-Length: 1000000000000\r\n\r\n"));
            let all = Arc::clone(&all);
            thread::spawn(move || {
                while all.load(Ordering::Relaxed) < FOR_EVER {
                    caller.stream.write_all(BLOCK).unwrap();
                }
            })
        })
        .collect();
    for _ in 0..2 {
        // Four busy streams on a short path share 1 MiB, and have 512 KiB each on a long one.
        let stalled = stalled_downloads(&scene, 300);
        eventually("the windows shrink", || {
            (scene.tunnels()[0].window < FIRST / 2).then_some(())
        });
        drop(stalled);
        eventually("the windows grow", || {
            (scene.tunnels()[0].window >= FIRST / 2).then_some(())
        });
    }
    all.store(FOR_EVER, Ordering::Relaxed);
    uploads
        .into_iter()
        .for_each(|upload| upload.join().unwrap());
    assert!(racers.into_iter().all(|racer| racer.join().unwrap() > 0));
}
