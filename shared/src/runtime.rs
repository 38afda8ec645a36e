//! The reactor: one monoio runtime per thread, on io_uring if the kernel allows it, else on epoll.
//!
//! monoio falls back to epoll only if io_uring is *absent*. If it is present but refused (seccomp
//! profiles of container engines, `kernel.io_uring_disabled`), monoio fails. This module therefore
//! builds a ring to decide.

use std::any::Any;
use std::cell::{Cell, OnceCell, RefCell};
use std::fmt;
use std::future::Future;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{CatchUnwind, Either, select};
use monoio::net::TcpStream;
use monoio::time::{Sleep, TimeDriver, Timeout};
use monoio::{IoUringDriver, LegacyDriver, Runtime, RuntimeBuilder};
use slab::Slab;
use tokio::sync::oneshot;

/// Submission queue entries of each ring: most operations that one turn of the loop submits with
/// one system call. Does not limit operations in flight.
const RING_ENTRIES: u32 = 1024;

/// Time for the kernel to complete the operations of dropped tasks.
const END_WITHIN: Duration = Duration::from_millis(50);
/// Attempts to drop all tasks, of which some panic.
const END_ATTEMPTS: usize = 8;

/// Kernel interface that the reactors of this process run on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Driver {
    IoUring(RingFlags),
    Epoll { reason: String },
}

/// Ring set-up flags that this kernel accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingFlags {
    /// `IORING_SETUP_COOP_TASKRUN` (Linux 5.19): completions do not interrupt a running thread.
    pub coop_taskrun: bool,
    /// `IORING_SETUP_SINGLE_ISSUER` (Linux 6.0): one thread submits, so the kernel skips locking.
    pub single_issuer: bool,
}

/// `GW_DRIVER` names no driver, or one that this kernel refuses.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error("GW_DRIVER is {0:?}; it must be \"io_uring\" or \"epoll\"")]
    Unknown(String),
    #[error("GW_DRIVER=io_uring, but this kernel refuses it: {0}; unset GW_DRIVER to run on epoll")]
    Refused(io::Error),
}

impl Driver {
    /// Chooses the driver: the one that `GW_DRIVER` names, else io_uring with the flags that this
    /// kernel accepts, else epoll.
    pub fn choose() -> Result<Self, DriverError> {
        match std::env::var("GW_DRIVER").as_deref() {
            Ok("epoll") => Ok(Self::Epoll {
                reason: "GW_DRIVER=epoll".to_owned(),
            }),
            Ok("io_uring") => probe_ring()
                .map(Self::IoUring)
                .map_err(DriverError::Refused),
            Ok("") | Err(_) => Ok(match probe_ring() {
                Ok(flags) => Self::IoUring(flags),
                Err(refusal) => Self::Epoll {
                    reason: format!("io_uring refused: {refusal}"),
                },
            }),
            Ok(other) => Err(DriverError::Unknown(other.to_owned())),
        }
    }

    /// Logs driver and kernel release.
    pub fn log(&self) {
        let kernel = rustix::system::uname()
            .release()
            .to_string_lossy()
            .into_owned();
        match self {
            Self::IoUring(_) => tracing::info!(driver = %self, kernel, "reactor"),
            Self::Epoll { .. } => {
                tracing::warn!(driver = %self, kernel, "reactor: slower than io_uring");
            }
        }
    }

    /// Runs `main` on a new reactor of the calling thread until it completes.
    ///
    /// The reactor is leaked on purpose: dropping a ring frees memory of operations that are still
    /// in flight in the kernel. Threads that run a reactor live as long as the process.
    pub fn block_on<F: Future>(&self, main: F) -> io::Result<F::Output> {
        Ok(match self {
            Self::IoUring(flags) => Reactor::on_ring(*flags)?.0.block_on(main),
            Self::Epoll { .. } => Reactor::on_epoll()?.0.block_on(main),
        })
    }

    /// As [`Self::block_on`], but ends when the reactor fails, too: by a panic of `main` or of an
    /// [essential task](spawn_essential), or by one outside of all tasks, such as in a destructor.
    /// Returns that panic after all tasks have been dropped, so that their sockets are closed.
    pub fn run<F>(&self, main: F) -> io::Result<std::thread::Result<F::Output>>
    where
        F: Future<Output: 'static> + 'static,
    {
        Ok(match self {
            Self::IoUring(flags) => Reactor::on_ring(*flags)?.run(main),
            Self::Epoll { .. } => Reactor::on_epoll()?.run(main),
        })
    }
}

/// The reactor of the calling thread. Leaked when it is dropped, also by a panic.
struct Reactor<D>(ManuallyDrop<Runtime<D>>);

impl Reactor<TimeDriver<IoUringDriver>> {
    fn on_ring(flags: RingFlags) -> io::Result<Self> {
        let builder =
            RuntimeBuilder::<TimeDriver<IoUringDriver>>::new().uring_builder(flags.builder());
        Ok(Self(ManuallyDrop::new(
            builder.with_entries(RING_ENTRIES).build()?,
        )))
    }
}

impl Reactor<TimeDriver<LegacyDriver>> {
    fn on_epoll() -> io::Result<Self> {
        let builder = RuntimeBuilder::<TimeDriver<LegacyDriver>>::new();
        Ok(Self(ManuallyDrop::new(
            builder.with_entries(RING_ENTRIES).build()?,
        )))
    }
}

impl<D: monoio::Driver> Reactor<D> {
    fn run<F>(mut self, main: F) -> std::thread::Result<F::Output>
    where
        F: Future<Output: 'static> + 'static,
    {
        let (done, completed) = oneshot::channel();
        let (failure, failed) = oneshot::channel();
        FAILURE.set(Some(failure));
        let runtime = &mut self.0;
        let ended = catch_unwind(AssertUnwindSafe(|| {
            runtime.block_on(async move {
                // The reactor may have failed: then the result is not used.
                spawn_essential(async move { drop(done.send(main.await)) });
                let panic = match select(completed, failed).await {
                    Either::Left((Ok(output), _)) => return Ok(output),
                    Either::Left((Err(_), failed)) => failed.await,
                    Either::Right((panic, _)) => panic,
                };
                Err(panic.unwrap_or_else(|_| Box::new("the main task was dropped")))
            })
        }));
        let panic = match ended {
            Ok(Ok(output)) => return Ok(output),
            Ok(Err(panic)) | Err(panic) => panic,
        };
        IS_ENDING.set(true);
        for _ in 0..END_ATTEMPTS {
            // A destructor may panic again. The other tasks are dropped in the next attempt.
            if catch_unwind(AssertUnwindSafe(|| runtime.block_on(end_tasks()))).is_ok() {
                break;
            }
        }
        IS_ENDING.set(false);
        Err(panic)
    }
}

impl<D> Drop for Reactor<D> {
    fn drop(&mut self) {
        drop(FAILURE.take());
        // Tasks belong to the reactor: their destructors need it.
        std::mem::forget(TASKS.take());
    }
}

/// Drops all tasks of this thread.
async fn end_tasks() {
    // Destructors can start tasks, which are dropped in the next round.
    for _ in 0..3 {
        TASKS.with_borrow(|tasks| tasks.iter().for_each(|(_, task)| task.wake_by_ref()));
        // Runs after all tasks that were woken before it.
        monoio::spawn(async {}).await;
    }
    // Descriptors of cancelled operations are closed once the kernel has completed these.
    sleep(END_WITHIN).await;
}

impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Epoll { reason } => write!(f, "epoll ({reason})"),
            Self::IoUring(flags) => {
                let names: Vec<&str> = [
                    ("coop_taskrun", flags.coop_taskrun),
                    ("single_issuer", flags.single_issuer),
                ]
                .into_iter()
                .filter_map(|(name, on)| on.then_some(name))
                .collect();
                let names = if names.is_empty() {
                    "no flags".to_owned()
                } else {
                    names.join(", ")
                };
                write!(f, "io_uring: {names}")
            }
        }
    }
}

impl RingFlags {
    fn builder(self) -> io_uring::Builder {
        let mut builder = io_uring::IoUring::builder();
        if self.coop_taskrun {
            builder.setup_coop_taskrun();
        }
        if self.single_issuer {
            builder.setup_single_issuer();
        }
        builder
    }
}

/// Builds a small ring with all flags that are useful here; on an error tries again without the
/// newest one.
fn probe_ring() -> io::Result<RingFlags> {
    let candidates = [(true, true), (true, false), (false, false)];
    let mut refusal = io::Error::from(io::ErrorKind::Unsupported);
    for (coop_taskrun, single_issuer) in candidates {
        let flags = RingFlags {
            coop_taskrun,
            single_issuer,
        };
        match flags.builder().build(8) {
            Ok(_) if monoio::utils::detect_uring() => return Ok(flags),
            Ok(_) => {
                return Err(io::Error::other(
                    "an operation that this program needs is missing (Linux 5.11 has it)",
                ));
            }
            Err(error) => refusal = error,
        }
    }
    Err(refusal)
}

/// Operations that the programs use, and whether this kernel's io_uring has them.
pub fn ring_operations() -> io::Result<Vec<(&'static str, bool)>> {
    use io_uring::opcode::{Accept, AsyncCancel, Connect, PollAdd, Recv, SendMsg, SendZc, Timeout};
    let ring = io_uring::IoUring::new(8)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let operations = [
        ("poll", PollAdd::CODE),
        ("timeout", Timeout::CODE),
        ("accept", Accept::CODE),
        ("cancel", AsyncCancel::CODE),
        ("connect", Connect::CODE),
        ("recv", Recv::CODE),
        ("sendmsg", SendMsg::CODE),
        ("send_zc", SendZc::CODE),
    ];
    Ok(operations
        .into_iter()
        .map(|(name, code)| (name, probe.is_supported(code)))
        .collect())
}

type Panic = Box<dyn Any + Send>;

thread_local! {
    static PANICS: Cell<u64> = const { Cell::new(0) };
    /// Wakers of the tasks that have begun and not ended. They keep each task alive until it ends.
    static TASKS: RefCell<Slab<Waker>> = const { RefCell::new(Slab::new()) };
    /// Tasks end when they are polled.
    static IS_ENDING: Cell<bool> = const { Cell::new(false) };
    /// Receives the panic of an essential task.
    static FAILURE: RefCell<Option<oneshot::Sender<Panic>>> = const { RefCell::new(None) };
    static ALWAYS_READABLE: OnceCell<Rc<TcpStream>> = const { OnceCell::new() };
}

/// Panics that [`spawn`] has caught on the calling thread.
pub fn contained_panics() -> u64 {
    PANICS.get()
}

/// Whether the calling thread's reactor runs on epoll.
pub fn is_epoll() -> bool {
    monoio::utils::is_legacy()
}

/// Starts a task on this thread's reactor. A panic ends only the task: its values are dropped, so
/// its connection closes, and the panic is counted.
pub fn spawn(task: impl Future<Output = ()> + 'static) {
    start(Box::pin(task), false);
}

/// As [`spawn`], for a task without which the thread is of no use. A panic ends the reactor, see
/// [`Driver::run`].
pub fn spawn_essential(task: impl Future<Output = ()> + 'static) {
    start(Box::pin(task), true);
}

/// Boxed: monoio moves a future several times before it has its place, and that of a request has
/// kilobytes.
type BoxedFuture = Pin<Box<dyn Future<Output = ()>>>;

fn start(future: BoxedFuture, is_essential: bool) {
    drop(monoio::spawn(Task {
        future: AssertUnwindSafe(future).catch_unwind(),
        place: TaskKey(None),
        is_essential,
    }));
}

/// A task of [`spawn`].
struct Task {
    future: CatchUnwind<AssertUnwindSafe<BoxedFuture>>,
    place: TaskKey,
    is_essential: bool,
}

/// Key of a task in `TASKS`, once it has begun.
struct TaskKey(Option<usize>);

impl Future for Task {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if IS_ENDING.get() {
            return Poll::Ready(());
        }
        this.place
            .0
            .get_or_insert_with(|| TASKS.with_borrow_mut(|tasks| tasks.insert(cx.waker().clone())));
        if let Err(panic) = ready!(this.future.poll_unpin(cx)) {
            PANICS.set(PANICS.get() + 1);
            if !this.is_essential {
                tracing::error!("a task panicked; its connection is closed");
            } else if let Some(failure) = FAILURE.take() {
                // Fails if the reactor has ended.
                drop(failure.send(panic));
            } else {
                resume_unwind(panic);
            }
        }
        Poll::Ready(())
    }
}

impl Drop for TaskKey {
    fn drop(&mut self) {
        if let Some(key) = self.0 {
            // Fails at the end of the thread.
            let removed = TASKS.try_with(|tasks| tasks.borrow_mut().try_remove(key));
            drop(removed);
        }
    }
}

/// Waits for `duration`, with millisecond precision.
///
/// Boxed: monoio's timers are large and aligned to 128 bytes, and every future that may wait for
/// one, such as the task of each request, would contain room for it.
pub fn sleep(duration: Duration) -> Pin<Box<Sleep>> {
    Box::pin(monoio::time::sleep(duration))
}

/// Runs `future`, and drops it if it takes longer than `duration`.
pub fn timeout<F: Future>(duration: Duration, future: F) -> Pin<Box<Timeout<F>>> {
    Box::pin(monoio::time::timeout(duration, future))
}

/// Lets all other tasks of this thread run, and the ring's completions be processed, before the
/// caller continues.
///
/// monoio processes completions, timers and wakes of other threads only after its queue of tasks is
/// empty or has been run twice. Tasks that queue themselves again and again would delay all others.
/// This function therefore waits for the ring, with an operation that completes as soon as the
/// kernel sees it. On epoll there is no such operation: it waits for the shortest timer.
pub async fn yield_now() {
    if is_epoll() {
        return sleep(Duration::from_millis(1)).await;
    }
    let always = ALWAYS_READABLE.with(|kept| match kept.get() {
        Some(socket) => Some(Rc::clone(socket)),
        // Without a free descriptor now, the next call tries again.
        None => always_readable().inspect(|made| drop(kept.set(Rc::clone(made)))),
    });
    let turned = match always {
        Some(socket) => socket.readable(false).await.is_ok(),
        None => false,
    };
    if !turned {
        sleep(Duration::from_millis(1)).await;
    }
}

/// A socket whose other end is closed, so that it is always readable. `None` if no descriptor is
/// free.
fn always_readable() -> Option<Rc<TcpStream>> {
    let (ours, _) = std::os::unix::net::UnixStream::pair().ok()?;
    // Not a TCP socket, but only its readiness is used, which monoio reports for any socket.
    TcpStream::from_std(std::net::TcpStream::from(OwnedFd::from(ours)))
        .ok()
        .map(Rc::new)
}

/// Raises the soft limit of open files to the hard limit. Returns the limit in force.
pub fn raise_open_file_limit() -> u64 {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Only a policy of the host refuses this; the old soft limit then stays in force.
    let _ = setrlimit(Resource::Nofile, limit);
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{block_on, drivers};

    #[test]
    fn a_panicking_task_is_counted_and_the_reactor_continues() {
        for driver in drivers() {
            let before = contained_panics();
            let value = driver
                .block_on(async {
                    spawn(async { panic!("injected") });
                    yield_now().await;
                    7
                })
                .unwrap();
            assert_eq!((value, contained_panics() - before), (7, 1), "{driver}");
        }
    }

    /// Sets a flag when it is dropped, and may panic then.
    struct Dropped(Rc<Cell<bool>>, bool);

    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.set(true);
            assert!(!self.1, "injected");
        }
    }

    #[test]
    fn a_failed_reactor_drops_all_tasks_and_closes_their_sockets() {
        use std::io::Read;
        let essential = 0;
        let in_destructor = 1;
        let of_main = 2;
        for driver in drivers() {
            for kind in [essential, in_destructor, of_main] {
                let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
                let idle = Rc::new(Cell::new(false));
                let dropped = Dropped(Rc::clone(&idle), false);
                let ended = driver.run(async move {
                    let ours = std::net::TcpStream::from(OwnedFd::from(ours));
                    let socket = TcpStream::from_std(ours).unwrap();
                    // Two tasks that would wait for ever: for the kernel, and for nothing.
                    spawn(async move { drop(socket.readable(false).await) });
                    spawn(async move {
                        let _dropped = dropped;
                        std::future::pending::<()>().await;
                    });
                    yield_now().await;
                    if kind == essential {
                        spawn_essential(async { panic!("injected") });
                    } else if kind == in_destructor {
                        let bomb = Dropped(Rc::default(), true);
                        spawn(futures_util::future::poll_fn(move |_| {
                            let _owned = &bomb;
                            Poll::Ready(())
                        }));
                    } else {
                        panic!("injected");
                    }
                    std::future::pending::<()>().await;
                });
                assert!(ended.unwrap().is_err(), "{driver} {kind}");
                assert!(idle.get(), "{driver} {kind}");
                let time_limit = Some(Duration::from_secs(10));
                theirs.set_read_timeout(time_limit).unwrap();
                assert_eq!((&theirs).read(&mut [0]).unwrap(), 0, "{driver} {kind}");
            }
            // Another reactor of the thread works.
            assert_eq!(driver.run(async { 7 }).unwrap().unwrap(), 7);
        }
    }

    #[test]
    fn tasks_that_yield_in_turns_do_not_delay_completions() {
        let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
        let turns = block_on(async move {
            let turns = Rc::new(Cell::new(0));
            for _ in 0..10 {
                let turns = Rc::clone(&turns);
                spawn(async move {
                    loop {
                        turns.set(turns.get() + 1);
                        yield_now().await;
                    }
                });
            }
            let a = std::net::TcpStream::from(OwnedFd::from(a));
            let socket = TcpStream::from_std(a).unwrap();
            yield_now().await;
            drop(b);
            let before = turns.get();
            socket.readable(false).await.unwrap();
            let turns = turns.get() - before;
            // Timers are processed too.
            sleep(Duration::from_millis(1)).await;
            turns
        });
        assert!(
            turns <= 20,
            "each of ten tasks had {turns} turns in all before a completion was seen"
        );
    }

    #[test]
    fn other_tasks_run_before_a_task_that_yields() {
        let order = block_on(async {
            let order = Rc::new(RefCell::new(Vec::new()));
            let other = Rc::clone(&order);
            spawn(async move { other.borrow_mut().push("other") });
            yield_now().await;
            order.borrow_mut().push("yielder");
            order.take()
        });
        assert_eq!(order, ["other", "yielder"]);
    }
}
