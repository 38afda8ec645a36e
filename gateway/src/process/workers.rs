//! The worker threads: a thread starts them, and starts a worker again after a panic.
//!
//! A worker that panics loses its connections, tunnels and buckets; they are closed before it
//! starts again. Its listening sockets stay open here, and its mailbox outlives it.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use crate::limits;
use crossbeam_channel::{Receiver, Sender, bounded};
use gw_base::mailbox::Inbox;
use gw_base::process::background::Tasks;
use gw_control_plane::control::Control;
use gw_data_plane::worker::{self, Setup, WorkerHandles, WorkerMessage};
use gw_region::owners::ownership::WorkerId;
use gw_shared::runtime::Driver;
use tokio::sync::Notify;

/// The workers of a process. They end by [`WorkerMessage::Stop`].
pub(super) struct Workers {
    events: Sender<WorkerEvent>,
    tasks: Tasks,
}

enum WorkerEvent {
    /// The thread of a worker has ended.
    Ended { worker: WorkerId, has_failed: bool },
    /// The process drains: workers do not start again, and the listening sockets are closed here.
    Draining,
    /// The workers stop.
    Stopping,
}

/// What a worker starts again with: its listening sockets and its mailbox stay open here.
struct Seed {
    setup: Setup,
    inbox: Inbox<WorkerMessage>,
}

struct WorkerSupervisor {
    control: Arc<Control>,
    handles: Arc<WorkerHandles>,
    driver: Driver,
    /// By number of the worker; `None` for one that does not start again. Without a thread, its
    /// mailbox is closed then, so that other threads do not wait for it.
    seeds: Vec<Option<Seed>>,
    threads: Vec<Option<JoinHandle<()>>>,
    events: Sender<WorkerEvent>,
    panics: RecentPanics,
    is_stopping: bool,
    failed: Arc<Notify>,
}

/// Times of the last panics.
#[derive(Default)]
struct RecentPanics(VecDeque<Instant>);

impl RecentPanics {
    /// Counts a panic. Returns whether there are too many.
    fn add(&mut self, now: Instant) -> bool {
        self.0.push_back(now);
        self.0
            .retain(|at| now.saturating_duration_since(*at) < limits::WORKER_PANICS_WITHIN);
        self.0.len() >= limits::WORKER_PANICS
    }
}

impl Workers {
    /// Starts the workers, and returns the number of those that accept connections. `failed` is
    /// notified when they panic too often.
    pub(super) fn start(
        tasks: Tasks,
        control: &Arc<Control>,
        handles: &Arc<WorkerHandles>,
        setups: Vec<Setup>,
        inboxes: Vec<Inbox<WorkerMessage>>,
        driver: &Driver,
        failed: Arc<Notify>,
    ) -> io::Result<(Self, usize)> {
        // Room for the end of each worker, and for the two events of a drain.
        let (events, ended) = bounded(setups.len() + 2);
        let (up, ups) = bounded(setups.len());
        let mut supervisor = WorkerSupervisor {
            control: Arc::clone(control),
            handles: Arc::clone(handles),
            driver: driver.clone(),
            seeds: Vec::new(),
            threads: Vec::new(),
            events: events.clone(),
            panics: RecentPanics::default(),
            is_stopping: false,
            failed,
        };
        for (setup, inbox) in setups.into_iter().zip(inboxes) {
            // Without the directory: the kept one would hold records that are deleted later.
            let again = setup.again(Arc::default())?;
            supervisor.seeds.push(Some(Seed {
                setup: again,
                inbox: inbox.clone(),
            }));
            let thread = supervisor.spawn(setup, inbox, up.clone(), true)?;
            supervisor.threads.push(Some(thread));
        }
        drop(up);
        tasks.thread("gw-workers", move || supervisor.run(&ended))?;
        // The channel ends when every worker has started or failed.
        Ok((Self { events, tasks }, ups.iter().count()))
    }

    /// Closes the listening sockets here. A worker that panics from now on does not start again.
    pub(super) fn drain(&self) {
        // Fails if all workers have ended.
        let _ = self.events.send(WorkerEvent::Draining);
    }

    /// Called before the workers are told to stop.
    pub(super) fn stopping(&self) {
        let _ = self.events.send(WorkerEvent::Stopping);
    }

    /// Waits for the end of the workers, within a time.
    pub(super) fn join(&self) {
        self.tasks.stop(limits::WORKERS_END);
    }
}

impl WorkerSupervisor {
    fn run(mut self, events: &Receiver<WorkerEvent>) {
        let mut running = self.threads.len();
        while running > 0 {
            match events.recv() {
                Ok(WorkerEvent::Ended { worker, has_failed }) => {
                    let ended = self.threads[worker.0].take().map(JoinHandle::join);
                    if ended.is_some_and(|ended| ended.is_err()) {
                        tracing::error!(worker = worker.0, "a worker panicked at its end");
                    }
                    running -= 1;
                    let seed = self.seeds[worker.0].take();
                    if has_failed && !self.is_stopping && self.restart(worker, seed) {
                        running += 1;
                    }
                }
                Ok(WorkerEvent::Draining) => {
                    self.seeds.fill_with(|| None);
                }
                Ok(WorkerEvent::Stopping) => self.is_stopping = true,
                Err(_) => return,
            }
        }
    }

    /// Starts a worker again, unless the process drains or workers panic too often. Returns whether
    /// it did.
    fn restart(&mut self, worker: WorkerId, seed: Option<Seed>) -> bool {
        let number = worker.0;
        let Some(seed) = seed else {
            let meaning = "its connections are lost; please report it";
            tracing::error!(worker = number, "a worker panicked in the drain: {meaning}");
            self.handles.lost.fetch_add(1, Ordering::Relaxed);
            return false;
        };
        if self.panics.add(Instant::now()) {
            let within = limits::WORKER_PANICS_WITHIN.as_secs();
            let times = limits::WORKER_PANICS;
            tracing::error!(
                worker = number,
                "workers panicked {times} times within {within} s: the process ends"
            );
            return self.give_up();
        }
        let meaning = "its connections are lost, and it starts again; please report it";
        tracing::error!(worker = number, "a worker panicked: {meaning}");
        self.handles.restarts[number].fetch_add(1, Ordering::Relaxed);
        match self.start_again(&seed) {
            Ok(thread) => {
                (self.threads[number], self.seeds[number]) = (Some(thread), Some(seed));
                self.handles.link_again(worker);
                true
            }
            Err(error) => {
                tracing::error!(worker = number, %error,
                    "cannot start a worker again: the process ends");
                self.give_up()
            }
        }
    }

    fn give_up(&self) -> bool {
        self.handles.lost.fetch_add(1, Ordering::Relaxed);
        self.failed.notify_one();
        false
    }

    fn start_again(&self, seed: &Seed) -> io::Result<JoinHandle<()>> {
        // The worker itself looks at what was published.
        let setup = seed.setup.again(Arc::new(self.control.directory()))?;
        self.spawn(setup, seed.inbox.clone(), bounded(1).0, false)
    }

    fn spawn(
        &self,
        setup: Setup,
        inbox: Inbox<WorkerMessage>,
        up: Sender<()>,
        is_first: bool,
    ) -> io::Result<JoinHandle<()>> {
        let worker = setup.id;
        let driver = self.driver.clone();
        let events = self.events.clone();
        let run = move || {
            let has_failed =
                match catch_unwind(AssertUnwindSafe(|| worker::run(setup, inbox, up, &driver))) {
                    Ok(Ok(())) => false,
                    Ok(Err(error)) => {
                        tracing::error!(worker = worker.0, %error, "worker did not start");
                        // At the first start the process gives up.
                        !is_first
                    }
                    Err(_) => true,
                };
            // Fails if the supervisor has ended.
            let _ = events.send(WorkerEvent::Ended { worker, has_failed });
        };
        let name = format!("gw-worker-{}", worker.0);
        Builder::new().name(name).spawn(run)
    }
}

// Panics can be injected in debug builds.
#[cfg(debug_assertions)]
#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use gw_control_plane::control::Actor;
    use gw_control_plane::control::records::service;
    use gw_data_plane::relay::PANICKING_PATH;
    use gw_interface::config::{Config, HandOver};
    use gw_region::owners::ownership;

    use super::*;
    use crate::demo::tests::{HOST, ask, connect, eventually, is_served, reports};
    use crate::demo::{Demo, Options};

    #[test]
    fn three_panics_within_a_minute_are_too_many() {
        let mut panics = RecentPanics::default();
        let begin = Instant::now();
        let mut after = |seconds| panics.add(begin + Duration::from_secs(seconds));
        assert!(!after(0) && !after(30) && !after(60) && !after(90));
        assert!(after(119));
        assert!(!after(300));
    }

    #[test]
    fn a_panic_costs_its_connection_and_nothing_else() {
        let demo = Demo::start(&Options::default()).unwrap();
        // Those of the enrollment may not have been forgotten yet.
        eventually("the worker has no connections", || {
            reports(&demo).iter().any(|report| report.connections == 0)
        });
        let mut bystander = connect(&demo);
        let mut victim = connect(&demo);
        assert!(is_served(&demo, &mut bystander));
        assert_eq!(ask(&demo, &mut victim, PANICKING_PATH), "");
        assert!(is_served(&demo, &mut bystander));
        let report = reports(&demo).pop().unwrap();
        assert_eq!(
            (
                report.totals["task_panics"],
                report.connections,
                report.tunnels.len()
            ),
            (1, 1, 1)
        );
        demo.stop();
    }

    #[test]
    fn a_worker_that_starts_again_serves_the_next_links_of_the_predecessor() {
        let demo = Demo::start(&Options::default()).unwrap();
        let handles = &demo.gateway().handles;
        let [first, second, of_other] = [(); 3].map(|()| UnixStream::pair().unwrap());
        let kept = [(0, first.1), (0, second.1), (1, of_other.1)];
        handles.keep_links(kept.map(|(of, link)| (of, link.into())).into());
        let greets = |link: &UnixStream| {
            link.set_nonblocking(true).unwrap();
            (&*link).read(&mut [0; 64]).is_ok_and(|read| read > 0)
        };
        handles.tell(WorkerId(0), WorkerMessage::Panic);
        eventually("the next links are served", || greets(&first.0));
        eventually("the next links are served", || greets(&of_other.0));
        assert!(!greets(&second.0));
        handles.tell(WorkerId(0), WorkerMessage::Panic);
        eventually("the last link is served", || greets(&second.0));
        demo.stop();
    }

    #[test]
    fn a_worker_that_panics_starts_again_and_the_others_notice_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let options = Options {
            workers: 2,
            ..Options::default()
        };
        let config = Config {
            hand_over: HandOver::Always,
            ..options.config(folder.path().to_owned())
        };
        let demo = Demo::start_with(&config, &options).unwrap();
        let owner = ownership::owner(HOST, 2);
        let mut caller = connect(&demo);
        assert!(is_served(&demo, &mut caller));
        // The worker that owns the service has the connection and the tunnel.
        demo.gateway().handles.tell(owner, WorkerMessage::Panic);
        eventually("its connections are closed", || {
            ask(&demo, &mut caller, "/").is_empty()
        });
        eventually("it has started again", || {
            reports(&demo)
                .iter()
                .map(|report| report.restarts)
                .sum::<u32>()
                == 1
        });
        assert_eq!(reports(&demo).len(), 2);
        eventually("the agent has connected again", || {
            is_served(&demo, &mut connect(&demo))
        });
        // The other one panics while a caller uses the first one.
        let mut bystander = connect(&demo);
        assert!(is_served(&demo, &mut bystander));
        demo.gateway()
            .handles
            .tell(WorkerId(1 - owner.0), WorkerMessage::Panic);
        eventually("both have started again", || {
            let reports = reports(&demo);
            reports.len() == 2 && reports.iter().all(|report| report.restarts == 1)
        });
        for _ in 0..10 {
            assert!(is_served(&demo, &mut bystander));
            // The kernel spreads connections over the sockets of both.
            assert!(is_served(&demo, &mut connect(&demo)));
        }
        // A change reaches the new workers.
        service::delete(demo.gateway().control(), &Actor::Admin, "demo", "echo").unwrap();
        eventually("the service is gone", || {
            ask(&demo, &mut connect(&demo), "/").contains("GW_SERVICE_NOT_FOUND")
        });
        demo.stop();
    }

    #[test]
    fn the_third_panic_in_a_minute_ends_the_process() {
        let demo = Demo::start(&Options {
            workers: 2,
            ..Options::default()
        })
        .unwrap();
        for restarts in 0..limits::WORKER_PANICS {
            eventually("the worker answers", || {
                reports(&demo)
                    .iter()
                    .any(|report| report.worker.0 == 1 && report.restarts as usize == restarts)
            });
            demo.gateway()
                .handles
                .tell(WorkerId(1), WorkerMessage::Panic);
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(demo.gateway().workers_failed.notified());
        // Other threads do not wait for the worker.
        let mailbox = &demo.gateway().handles.mailboxes[1];
        eventually("its mailbox is closed", || {
            mailbox.post(WorkerMessage::Stop).is_err()
        });
        assert_eq!(reports(&demo).len(), 1);
        demo.stop();
    }
}
