//! Hosts and time.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::ErrorKind;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime};

use gw_simulated_kernel::scheduler::sleep;
use gw_simulated_kernel::{Ended, Host, clock, simulate, trace};

use crate::support::{Pair, machine, now, pair, run};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn time_passes_only_as_tasks_wait() {
    let (virtual_time, real_time) = run(1, async || {
        let real = real_time();
        let (began, instant) = (now(), Instant::now());
        sleep(3600 * SECOND).await;
        assert!(instant.elapsed() >= 3600 * SECOND);
        (now() - began, real_time() - real)
    });
    assert!(virtual_time >= 3600 * SECOND && virtual_time < 3601 * SECOND);
    assert!(real_time < 60 * SECOND, "{real_time:?}");
}

/// Time of the real kernel, which other threads than those of simulations see.
fn real_time() -> Duration {
    let since = || SystemTime::UNIX_EPOCH.elapsed().unwrap();
    std::thread::spawn(since).join().unwrap()
}

#[test]
fn timers_fire_in_their_order() {
    let order = run(7, async || {
        let order: Rc<RefCell<Vec<u64>>> = Rc::default();
        for seconds in [3, 1, 2, 5, 4] {
            let order = Rc::clone(&order);
            Host::WORLD.spawn(async move {
                sleep(seconds * SECOND).await;
                order.borrow_mut().push(u64::from(seconds));
            });
        }
        sleep(10 * SECOND).await;
        order.borrow().clone()
    });
    assert_eq!(order, [1, 2, 3, 4, 5]);
}

#[test]
fn the_wall_clock_jumps_and_the_monotonic_clock_does_not() {
    run(1, async || {
        let (wall, monotonic) = (SystemTime::now(), Instant::now());
        clock::jump_wall_clock(3600 * SECOND, false);
        assert!(SystemTime::now() < wall);
        clock::jump_wall_clock(7200 * SECOND, true);
        assert!(wall.elapsed().unwrap() >= 3600 * SECOND);
        assert!(monotonic.elapsed() < SECOND);
    });
}

#[test]
fn a_killed_host_runs_no_more_and_its_connections_end() {
    let (ticks, read) = run(1, async || {
        let Pair {
            client_host,
            server_host,
            client,
            server,
        } = pair().await;
        let ticks = count_seconds(server_host);
        server_host.spawn(async move {
            sleep(100 * SECOND).await;
            drop(server);
        });
        sleep(5 * SECOND + SECOND / 2).await;
        server_host.kill();
        assert!(server_host.is_dead() && !client_host.is_dead());
        assert_eq!(server_host.tasks(), 0);
        // Nothing starts on it again.
        server_host.spawn(async { unreachable!() });
        let read = client.read(&mut [0; 10]).await;
        sleep(5 * SECOND).await;
        (ticks.get(), read.map_err(|error| error.kind()))
    });
    assert_eq!(ticks, 5);
    assert!(
        matches!(read, Ok(0) | Err(ErrorKind::ConnectionReset)),
        "{read:?}"
    );
}

/// Counts seconds in a task of `host`.
fn count_seconds(host: Host) -> Rc<Cell<u32>> {
    let ticks: Rc<Cell<u32>> = Rc::default();
    let counted = Rc::clone(&ticks);
    host.spawn(async move {
        loop {
            sleep(SECOND).await;
            counted.set(counted.get() + 1);
        }
    });
    ticks
}

#[test]
fn a_frozen_host_stands_still_and_its_kernel_receives() {
    let (ticks, unread) = run(1, async || {
        let Pair {
            server_host,
            client,
            server,
            ..
        } = pair().await;
        let ticks = count_seconds(server_host);
        server_host.freeze(true);
        client.write_all(b"kept").await.unwrap();
        sleep(10 * SECOND).await;
        assert_eq!(ticks.get(), 0);
        server_host.freeze(false);
        sleep(SECOND * 5 / 2).await;
        let mut buffer = [0; 10];
        (ticks.get(), server.read(&mut buffer).await.unwrap())
    });
    // The timer that was due, and those since then.
    assert!((2..=3).contains(&ticks), "{ticks}");
    assert_eq!(unread, 4);
}

#[test]
fn a_simulation_without_events_is_stuck() {
    let ended = simulate(1, false, async || std::future::pending::<()>().await);
    assert!(matches!(ended, Ended::Stuck), "{ended:?}");
}

#[test]
fn a_panic_of_a_task_ends_the_simulation() {
    let ended = simulate(1, false, async || {
        Host::new("other", machine(1)).spawn(async { panic!("as planned") });
        sleep(SECOND).await;
    });
    assert!(matches!(&ended, Ended::Panicked(message) if message == "as planned"));
}

#[test]
fn a_seed_decides_the_order_of_tasks() {
    let order = |seed| {
        run(seed, async || {
            let order: Rc<RefCell<Vec<u8>>> = Rc::default();
            for number in 0..10 {
                let order = Rc::clone(&order);
                let host = Host::new("racer", machine(number));
                host.spawn(async move {
                    sleep(SECOND).await;
                    order.borrow_mut().push(number);
                });
            }
            sleep(2 * SECOND).await;
            (order.borrow().clone(), trace::fingerprint())
        })
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1).0, order(2).0);
}

#[test]
fn a_task_in_the_place_of_an_ended_one_runs_on_its_own_host() {
    struct StartsOn(Host, Rc<Cell<Option<Host>>>);
    impl Drop for StartsOn {
        fn drop(&mut self) {
            let seen = Rc::clone(&self.1);
            self.0.spawn(async move { seen.set(Some(Host::current())) });
        }
    }
    run(1, async || {
        let (first, second) = (Host::new("a", machine(1)), Host::new("b", machine(2)));
        let seen = Rc::default();
        let at_the_end = StartsOn(second, Rc::clone(&seen));
        first.spawn(poll_fn(move |cx| {
            let _ = &at_the_end;
            // It is ready again and ends.
            cx.waker().wake_by_ref();
            Poll::Ready(())
        }));
        sleep(SECOND).await;
        assert_eq!(seen.get(), Some(second));
    });
}
