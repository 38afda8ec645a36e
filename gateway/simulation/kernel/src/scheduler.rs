//! Hosts and their tasks.
//!
//! A host stands for a thread with a reactor: its tasks run in the order in which they became
//! ready, as monoio runs them. The seed decides which host runs next, for how many tasks, and how
//! much time each of them takes. Time passes to the next event when no host can run.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::ThreadId;
use std::time::Duration;

use slab::Slab;

use crate::clock::{self, Nanos};
use crate::{entropy, events, network, random, sockets, trace};

/// Longest time that one poll of a task takes.
const POLL_MAX: Nanos = 20_000;
/// Most tasks that a host runs before another host may run.
const TURN_MAX: u64 = 16;
/// Rounds in which destructors of killed tasks may start tasks.
const KILL_ROUNDS: usize = 8;

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// A thread of the product, or a peer of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Host(usize);

struct HostState {
    name: Rc<str>,
    address: IpAddr,
    /// Keys and generations of tasks.
    ready: VecDeque<(usize, u64)>,
    /// Tasks that wait for the end of the host's turn.
    deferred: Vec<Waker>,
    is_frozen: bool,
    is_dead: bool,
}

struct Slot {
    /// `None` while it runs.
    task: Option<Task>,
    waker: Arc<TaskWaker>,
    host: Host,
}

struct TaskWaker {
    key: usize,
    /// The slot of the task is used again after its end.
    generation: u64,
    is_queued: AtomicBool,
    thread: ThreadId,
}

#[derive(Default)]
struct Scheduler {
    hosts: Vec<HostState>,
    tasks: Slab<Slot>,
    generation: u64,
    polls: u64,
}

thread_local! {
    static SCHEDULER: RefCell<Scheduler> = RefCell::default();
    static CURRENT: Cell<Host> = const { Cell::new(Host(0)) };
    /// Panic of a task of the world, which ends the simulation.
    static FAILURE: RefCell<Option<Box<dyn Any + Send>>> = const { RefCell::new(None) };
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        assert_eq!(
            self.thread,
            std::thread::current().id(),
            "a thread outside of the simulation woke a task: what it does depends on real time"
        );
        if self.is_queued.swap(true, Ordering::Relaxed) {
            return;
        }
        // Fails at the end of the thread.
        let _ = SCHEDULER.try_with(|scheduler| {
            let scheduler = &mut *scheduler.borrow_mut();
            if let Some(slot) = scheduler.tasks.get(self.key)
                && slot.waker.generation == self.generation
            {
                let ready = (self.key, self.generation);
                scheduler.hosts[slot.host.0].ready.push_back(ready);
            }
        });
    }
}

impl Host {
    /// The world itself: it drives the simulation.
    pub const WORLD: Self = Self(0);

    /// Adds a host on the machine of `address`.
    pub fn new(name: &str, address: IpAddr) -> Self {
        SCHEDULER.with_borrow_mut(|scheduler| {
            scheduler.hosts.push(HostState {
                name: name.into(),
                address,
                ready: VecDeque::new(),
                deferred: Vec::new(),
                is_frozen: false,
                is_dead: false,
            });
            Self(scheduler.hosts.len() - 1)
        })
    }

    /// The host whose task runs.
    pub fn current() -> Self {
        CURRENT.get()
    }

    /// Address of the host's machine. Its connections come from there.
    pub fn address(self) -> IpAddr {
        SCHEDULER.with_borrow(|scheduler| scheduler.hosts[self.0].address)
    }

    pub fn name(self) -> Rc<str> {
        SCHEDULER.with_borrow(|scheduler| {
            scheduler
                .hosts
                .get(self.0)
                .map_or_else(|| "".into(), |host| Rc::clone(&host.name))
        })
    }

    /// Starts a task of this host. Does nothing on a host that was killed.
    pub fn spawn(self, task: impl Future<Output = ()> + 'static) {
        let slot_waker = SCHEDULER.with_borrow_mut(|scheduler| {
            if scheduler.hosts[self.0].is_dead {
                return None;
            }
            scheduler.generation += 1;
            let generation = scheduler.generation;
            let entry = scheduler.tasks.vacant_entry();
            let waker = Arc::new(TaskWaker {
                key: entry.key(),
                generation,
                is_queued: AtomicBool::new(false),
                thread: std::thread::current().id(),
            });
            entry.insert(Slot {
                task: Some(Box::pin(task)),
                waker: Arc::clone(&waker),
                host: self,
            });
            Some(waker)
        });
        if let Some(waker) = slot_waker {
            waker.wake();
        }
    }

    /// Runs `call` as this host: sockets that it opens and tasks that it starts belong to the host.
    pub fn enter<R>(self, call: impl FnOnce() -> R) -> R {
        let before = CURRENT.replace(self);
        let result = call();
        CURRENT.set(before);
        result
    }

    /// Kills the host as SIGKILL does a process: the kernel closes its sockets, and its tasks are
    /// gone. Tasks cannot be started on it again; a new process is a new host.
    pub fn kill(self) {
        trace::line(|line| line.push_str(&format!("{} is killed", self.name())));
        SCHEDULER.with_borrow_mut(|scheduler| scheduler.hosts[self.0].is_dead = true);
        sockets::close_all_of(self);
        self.drop_tasks();
    }

    /// Ends the host like a thread that panics: drops its tasks and all that they own. Sockets that
    /// it has accepted and passed to another thread stay open.
    pub fn unwind(self) {
        trace::line(|line| line.push_str(&format!("{} unwinds", self.name())));
        SCHEDULER.with_borrow_mut(|scheduler| scheduler.hosts[self.0].is_dead = true);
        self.drop_tasks();
    }

    fn drop_tasks(self) {
        for _ in 0..KILL_ROUNDS {
            let killed: Vec<Slot> = SCHEDULER.with_borrow_mut(|scheduler| {
                let of_host = |(key, slot): (usize, &Slot)| {
                    (slot.host == self && slot.task.is_some()).then_some(key)
                };
                let keys: Vec<usize> = scheduler.tasks.iter().filter_map(of_host).collect();
                let removed = keys.into_iter().map(|key| scheduler.tasks.remove(key));
                removed.collect()
            });
            if killed.is_empty() {
                break;
            }
            self.enter(|| drop(killed));
        }
        SCHEDULER.with_borrow_mut(|scheduler| {
            scheduler.hosts[self.0].ready.clear();
            std::mem::take(&mut scheduler.hosts[self.0].deferred)
        });
    }

    /// Stops the host as SIGSTOP does, or lets it continue. The kernel goes on to receive for it.
    pub fn freeze(self, is_frozen: bool) {
        trace::line(|line| {
            let what = if is_frozen { "frozen" } else { "continued" };
            line.push_str(&format!("{} is {what}", self.name()));
        });
        SCHEDULER.with_borrow_mut(|scheduler| scheduler.hosts[self.0].is_frozen = is_frozen);
    }

    /// Whether the host was killed.
    pub fn is_dead(self) -> bool {
        SCHEDULER.with_borrow(|scheduler| scheduler.hosts[self.0].is_dead)
    }

    /// Number of the host's tasks.
    pub fn tasks(self) -> usize {
        SCHEDULER.with_borrow(|scheduler| {
            let of_host = scheduler.tasks.iter();
            of_host.filter(|(_, slot)| slot.host == self).count()
        })
    }
}

/// Wakes `waker` once all other ready tasks of the current host have run.
pub fn wake_after_turn(waker: &Waker) {
    let host = Host::current();
    SCHEDULER.with_borrow_mut(|scheduler| {
        scheduler.hosts[host.0].deferred.push(waker.clone());
    });
}

/// Waits for `duration`.
pub fn sleep(duration: Duration) -> Sleep {
    let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX / 4);
    Sleep {
        deadline: clock::elapsed().saturating_add(nanos),
        timer: None,
    }
}

/// Future of [`sleep`].
pub struct Sleep {
    deadline: Nanos,
    timer: Option<Rc<RefCell<Option<Waker>>>>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if clock::elapsed() >= self.deadline {
            self.timer = None;
            return Poll::Ready(());
        }
        if let Some(timer) = &self.timer {
            *timer.borrow_mut() = Some(cx.waker().clone());
        } else {
            let timer = Rc::new(RefCell::new(Some(cx.waker().clone())));
            let weak = Rc::downgrade(&timer);
            events::at(self.deadline, move || {
                let waker = weak.upgrade().and_then(|timer| timer.borrow_mut().take());
                if let Some(waker) = waker {
                    waker.wake();
                }
            });
            self.timer = Some(timer);
        }
        Poll::Pending
    }
}

/// How a simulation ended.
#[derive(Debug)]
pub enum Ended<T> {
    /// The main task completed.
    Completed(T),
    /// A task of the world, or an essential task of the product, panicked with this message.
    Panicked(String),
    /// Nothing can happen any more and the main task waits.
    Stuck,
    /// The limit of polls was reached.
    Endless,
}

/// Most polls of a simulation.
const POLLS_MAX: u64 = 50_000_000;

/// Number of polls of tasks so far.
pub fn polls() -> u64 {
    SCHEDULER.with_borrow(|scheduler| scheduler.polls)
}

/// Runs `main` as [`Host::WORLD`] in a simulation of `seed`, on the calling thread, which must be
/// new: values of thread-locals are a part of the state.
pub fn simulate<T: 'static>(
    seed: u64,
    with_text: bool,
    main: impl AsyncFnOnce() -> T + 'static,
) -> Ended<T> {
    random::start(seed);
    entropy::read_by_getrandom();
    trace::start(with_text);
    clock::start();
    Host::new("world", Ipv4Addr::new(10, 0, 0, 100).into());
    let result: Rc<RefCell<Option<T>>> = Rc::default();
    let kept = Rc::clone(&result);
    Host::WORLD.spawn(async move {
        let value = main().await;
        *kept.borrow_mut() = Some(value);
    });
    let ended = loop {
        if let Some(value) = result.take() {
            break Ended::Completed(value);
        }
        if let Some(panic) = FAILURE.take() {
            break Ended::Panicked(message(&*panic));
        }
        events::run_due();
        if let Some(host) = next_host() {
            run_turn(host);
        } else if let Some(time) = events::next() {
            clock::advance_to(time);
        } else {
            break Ended::Stuck;
        }
        if SCHEDULER.with_borrow(|scheduler| scheduler.polls) > POLLS_MAX {
            break Ended::Endless;
        }
    };
    end();
    ended
}

/// Drops all that is left.
fn end() {
    let count = SCHEDULER.with_borrow(|scheduler| scheduler.hosts.len());
    for host in (0..count).rev() {
        // A destructor may panic. The result of the simulation is known.
        let _ = catch_unwind(|| Host(host).kill());
    }
    events::clear();
    network::clear();
    sockets::clear();
    drop(FAILURE.take());
    SCHEDULER.with_borrow_mut(|scheduler| *scheduler = Scheduler::default());
    clock::stop();
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

/// A host that can run. Queues its deferred tasks if no other of its tasks is ready.
fn next_host() -> Option<Host> {
    let hosts = SCHEDULER.with_borrow_mut(|scheduler| {
        let can_run = |host: &HostState| {
            !host.is_frozen && (!host.ready.is_empty() || !host.deferred.is_empty())
        };
        let count = scheduler.hosts.iter().filter(|host| can_run(host)).count();
        (count > 0).then(|| {
            let chosen = random::below(count);
            let mut runnable = scheduler.hosts.iter().enumerate();
            runnable
                .by_ref()
                .filter(|(_, host)| can_run(host))
                .nth(chosen)
                .map(|(index, _)| Host(index))
        })?
    })?;
    let deferred = SCHEDULER.with_borrow_mut(|scheduler| {
        let host = &mut scheduler.hosts[hosts.0];
        if host.ready.is_empty() {
            std::mem::take(&mut host.deferred)
        } else {
            Vec::new()
        }
    });
    deferred.iter().for_each(Waker::wake_by_ref);
    Some(hosts)
}

/// Runs ready tasks of `host`.
fn run_turn(host: Host) {
    let tasks = random::between(1..=TURN_MAX);
    for _ in 0..tasks {
        let next = SCHEDULER.with_borrow_mut(|scheduler| {
            let state = &mut scheduler.hosts[host.0];
            if state.is_frozen {
                return None;
            }
            let (key, generation) = state.ready.pop_front()?;
            scheduler.polls += 1;
            let slot = scheduler.tasks.get_mut(key)?;
            // Otherwise, the task has ended, and another one, perhaps of another host, has its
            // slot.
            if slot.waker.generation != generation {
                return None;
            }
            slot.waker.is_queued.store(false, Ordering::Relaxed);
            let waker = Waker::from(Arc::clone(&slot.waker));
            Some((key, slot.task.take()?, waker, generation))
        });
        let Some((key, mut task, waker, generation)) = next else {
            if SCHEDULER.with_borrow(|scheduler| scheduler.hosts[host.0].ready.is_empty()) {
                return;
            }
            continue;
        };
        trace::mix(key as u64);
        let polled = host.enter(|| {
            catch_unwind(AssertUnwindSafe(|| {
                task.as_mut().poll(&mut Context::from_waker(&waker))
            }))
        });
        clock::advance_to(clock::elapsed() + random::between(100..=POLL_MAX));
        let is_pending = match polled {
            Ok(Poll::Pending) => true,
            Ok(Poll::Ready(())) => false,
            Err(panic) => {
                FAILURE.set(Some(panic));
                false
            }
        };
        let ended = SCHEDULER.with_borrow_mut(|scheduler| {
            let slot = scheduler.tasks.get_mut(key)?;
            if slot.waker.generation != generation {
                return None;
            }
            if is_pending && !scheduler.hosts[host.0].is_dead {
                slot.task = Some(task);
                return None;
            }
            slot.task = Some(task);
            Some(scheduler.tasks.remove(key))
        });
        host.enter(|| drop(ended));
        events::run_due();
    }
}
