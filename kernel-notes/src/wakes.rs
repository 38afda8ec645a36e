//! Messages from one thread to a reactor on another, with one wake per message or one wake until
//! the reactor reads.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread::sleep;
use std::time::{Duration, Instant};

use atomic_waker::AtomicWaker;
use crossbeam_channel::{Receiver, Sender, bounded};
use gw_shared::runtime::Driver;

use crate::load::PATIENCE;
use crate::measure::{self, Stamp, median, micros, thread_cpu};

const ROUNDS: usize = 7;
/// Length of a burst and number of bursts. The receiver falls asleep after each burst.
const BURSTS: [(usize, usize); 4] = [(1, 2000), (8, 1000), (64, 500), (1000, 100)];
/// Pause after which the receiver sleeps again.
const REST: Duration = Duration::from_micros(200);
const CAPACITY: usize = 16 * 1024;

#[derive(Clone, Copy, Debug)]
enum Bell {
    /// Uses monoio's waker for each message.
    EachMessage,
    /// Uses the waker only if no wake is pending, as the gateway's mailbox does.
    Coalesced,
}

struct Mail {
    bell: Bell,
    rung: AtomicBool,
    coalesced: AtomicWaker,
    each: OnceLock<Waker>,
    handled: AtomicUsize,
}

pub(crate) fn probe() {
    measure::print_machine();
    println!(
        "median of {ROUNDS}; CPU per message, µs; delay: from post to receipt by a sleeping \
         reactor, median, µs\n"
    );
    println!(
        "{:>6}  {:12} {:>8} {:>9} {:>7} {:>7}",
        "burst", "wake", "sender", "receiver", "both", "delay"
    );
    for (burst, repeats) in BURSTS {
        let mut rows = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            rows[0].push(run(Bell::EachMessage, burst, repeats));
            rows[1].push(run(Bell::Coalesced, burst, repeats));
        }
        for (bell, row) in [Bell::EachMessage, Bell::Coalesced].into_iter().zip(rows) {
            let of = |pick: fn(&Outcome) -> f64| median(row.iter().map(pick).collect());
            let both = of(|outcome| outcome.poster + outcome.receiver);
            let wake = if burst == 1 {
                format!("{:.1}", of(|outcome| outcome.wake))
            } else {
                "–".to_owned()
            };
            let poster = of(|outcome| outcome.poster);
            let receiver = of(|outcome| outcome.receiver);
            println!(
                "{burst:>6}  {:12} {poster:>8.3} {receiver:>9.3} {both:>7.3} {wake:>7}",
                format!("{bell:?}")
            );
        }
    }
}

/// Results in µs.
struct Outcome {
    poster: f64,
    receiver: f64,
    wake: f64,
}

fn run(bell: Bell, burst: usize, repeats: usize) -> Outcome {
    let (sender, receiver) = bounded(CAPACITY);
    let mail = Arc::new(Mail {
        bell,
        rung: AtomicBool::new(false),
        coalesced: AtomicWaker::new(),
        each: OnceLock::new(),
        handled: AtomicUsize::new(0),
    });
    let theirs = Arc::clone(&mail);
    let reading = std::thread::spawn(move || read_all(receiver, theirs));
    let posting = std::thread::spawn(move || {
        let spent = post_all(&sender, &mail, burst, repeats);
        drop(sender);
        mail.ring();
        spent
    });
    let messages = (burst * repeats) as f64;
    let poster = micros(posting.join().unwrap()) / messages;
    let (cpu, waits) = reading.join().unwrap();
    Outcome {
        poster,
        receiver: micros(cpu) / messages,
        wake: median(waits),
    }
}

/// Returns the CPU time of posting alone.
fn post_all(sender: &Sender<Instant>, mail: &Mail, burst: usize, repeats: usize) -> Duration {
    measure::pin(measure::DRIVING_CORE);
    let mut posting = Duration::ZERO;
    for number in 1..=repeats {
        sleep(REST);
        let before = thread_cpu();
        for _ in 0..burst {
            sender.try_send(Instant::now()).unwrap();
            mail.ring();
        }
        posting += thread_cpu() - before;
        let since = Instant::now();
        while mail.handled.load(Ordering::Acquire) < number * burst {
            assert!(since.elapsed() < PATIENCE, "the receiver is stuck");
            std::hint::spin_loop();
        }
    }
    posting.saturating_sub(cost_of_the_clock() * u32::try_from(repeats).unwrap())
}

/// CPU time of a pair of readings of the CPU clock.
fn cost_of_the_clock() -> Duration {
    const READINGS: u32 = 10_000;
    let start = thread_cpu();
    for _ in 0..READINGS {
        std::hint::black_box(thread_cpu());
    }
    (thread_cpu() - start) / READINGS
}

/// Returns the CPU time of the thread, including falling asleep and waking, and the delay of each
/// message.
fn read_all(receiver: Receiver<Instant>, mail: Arc<Mail>) -> (Duration, Vec<f64>) {
    measure::pin(measure::MEASURED_CORE);
    let driver = Driver::choose().unwrap();
    let waits = Rc::new(RefCell::new(Vec::new()));
    let seen = Rc::clone(&waits);
    let spent = driver
        .block_on(async move {
            // A task, as in the gateway, because the reactor wakes its main future differently.
            let reader = monoio::spawn(async move {
                let start = Stamp::thread();
                std::future::poll_fn(|cx| mail.poll_read(cx, &receiver, &mut seen.borrow_mut()))
                    .await;
                start.until(Stamp::thread()).cpu
            });
            reader.await
        })
        .unwrap();
    (spent, waits.take())
}

impl Mail {
    fn ring(&self) {
        match self.bell {
            Bell::EachMessage => {
                if let Some(waker) = self.each.get() {
                    waker.wake_by_ref();
                }
            }
            Bell::Coalesced => {
                if !self.rung.swap(true, Ordering::AcqRel) {
                    self.coalesced.wake();
                }
            }
        }
    }

    /// Receives messages until the sender is dropped.
    fn poll_read(
        &self,
        cx: &Context<'_>,
        receiver: &Receiver<Instant>,
        waits: &mut Vec<f64>,
    ) -> Poll<()> {
        self.each.get_or_init(|| cx.waker().clone());
        self.coalesced.register(cx.waker());
        // Cleared before the messages are read, so that later messages ring again.
        self.rung.swap(false, Ordering::AcqRel);
        loop {
            match receiver.try_recv() {
                Ok(posted) => {
                    waits.push(micros(posted.elapsed()));
                    self.handled.fetch_add(1, Ordering::Release);
                }
                Err(crossbeam_channel::TryRecvError::Empty) => return Poll::Pending,
                Err(crossbeam_channel::TryRecvError::Disconnected) => return Poll::Ready(()),
            }
        }
    }
}
