//! Tasks and threads of a process beside its workers: tasks on one tokio runtime, and a few
//! threads.
//!
//! Two threads run the tasks. While one computes, such as a page of the console, the other runs the
//! membership of the node, whose lease ends within seconds. Work that blocks has threads of its
//! own: those of `Tasks::blocking` for work that ends, and those of `Tasks::thread` for loops that
//! block most of the time, or that must not wait for one of the former, which requests to the admin
//! listener may use up.
//!
//! Workers never call these functions: a thread that a worker starts is pinned to its core. They
//! leave messages in channels.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_channel::RecvTimeoutError;
use futures_util::FutureExt;
use tokio::runtime::{Builder, EnterGuard, Handle, Runtime};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Threads that run tasks.
const THREADS: usize = 2;

static PANICS: AtomicU64 = AtomicU64::new(0);

/// The runtime. Cheap to clone; it ends with the last clone, and drops the tasks that still run.
#[derive(Debug, Clone)]
pub struct Background(Arc<Owned>);

#[derive(Debug)]
struct Owned {
    handle: Handle,
    /// `None` only while this is dropped.
    runtime: Option<Runtime>,
}

/// Tasks and threads that stop together. Cheap to clone; does not keep the runtime alive.
#[derive(Debug, Clone)]
pub struct Tasks {
    runtime: Handle,
    stopping: CancellationToken,
    tracker: TaskTracker,
    running: Running,
}

/// Names of the running tasks and threads.
#[derive(Debug, Clone, Default)]
struct Running(Arc<Mutex<Vec<&'static str>>>);

/// Removes a name on drop.
struct RunningName(&'static str, Running);

impl Background {
    /// Starts the threads of the runtime. They run on the cores that the calling thread may use.
    pub fn start() -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("gw-control")
            .enable_all()
            .build()?;
        let handle = runtime.handle().clone();
        Ok(Self(Arc::new(Owned {
            handle,
            runtime: Some(runtime),
        })))
    }

    /// A new set of tasks.
    pub fn tasks(&self) -> Tasks {
        Tasks::on(&self.0.handle)
    }

    /// Makes this the runtime of the calling thread until the drop.
    pub fn enter(&self) -> EnterGuard<'_> {
        self.0.handle.enter()
    }

    /// Runs `future` on the calling thread. Panics on a thread that runs tasks.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.0.handle.block_on(future)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Does not wait: the last clone may be dropped in a task, where waiting is not allowed.
            runtime.shutdown_background();
        }
    }
}

impl Tasks {
    fn on(runtime: &Handle) -> Self {
        Self {
            runtime: runtime.clone(),
            stopping: CancellationToken::new(),
            tracker: TaskTracker::new(),
            running: Running::default(),
        }
    }

    /// A new set of tasks on the same runtime.
    pub fn sibling(&self) -> Self {
        Self::on(&self.runtime)
    }

    /// Resolves when the tasks must end.
    pub fn stopping(&self) -> &CancellationToken {
        &self.stopping
    }

    /// Starts a task. A panic ends only this task. It is dropped when the runtime ends; one that
    /// has to end in its own way looks at [`Self::stopping`].
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let running = self.running.begin(name);
        let contained = async move {
            contained_task(name, task).await;
            drop(running);
        };
        self.tracker.spawn_on(contained, &self.runtime);
    }

    /// Starts a task that is dropped when the tasks stop.
    pub fn spawn_until_stopped(
        &self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let stopping = self.stopping.clone();
        self.spawn(name, async move {
            stopping.run_until_cancelled(task).await;
        });
    }

    /// Starts work that blocks. The calling thread starts no thread for it, and may be bound to
    /// other cores.
    pub fn spawn_blocking(&self, name: &'static str, work: impl FnOnce() + Send + 'static) {
        let tasks = self.clone();
        self.spawn(name, async move {
            tasks.blocking(name, work).await;
        });
    }

    /// Runs work that blocks, on a thread for that. `None` if it panicked, or the runtime has
    /// ended.
    pub async fn blocking<T: Send + 'static>(
        &self,
        name: &'static str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        // Tracked too: a task that is dropped does not end it.
        let running = self.running.begin(name);
        let token = self.tracker.token();
        let contained = move || {
            let result = contained(name, work);
            drop((running, token));
            result
        };
        self.runtime.spawn_blocking(contained).await.ok().flatten()
    }

    /// Starts a thread that ends when [`Self::stopping`] is cancelled.
    pub fn thread(
        &self,
        name: &'static str,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let running = self.running.begin(name);
        let token = self.tracker.token();
        let contained = move || {
            contained(name, run);
            drop((running, token));
        };
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(contained)?;
        Ok(())
    }

    /// Runs `future` on the calling thread. Panics on a thread that runs tasks.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// As [`Self::block_on`], until the tasks stop at the longest.
    pub fn block_until_stopped<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        self.block_on(self.stopping.run_until_cancelled(future))
    }

    /// Waits, until the tasks stop at the longest. Blocks: not for tasks.
    pub fn pause(&self, within: Duration) {
        self.block_on(async {
            let _ = timeout(within, self.stopping.cancelled()).await;
        });
    }

    /// Stops the tasks and threads, and waits for their end. Logs the names of those that have not
    /// ended `within` this time, and returns whether all have. Blocks: not for tasks.
    pub fn stop(&self, within: Duration) -> bool {
        self.stopping.cancel();
        self.tracker.close();
        let (waits, ended) = crossbeam_channel::bounded::<()>(0);
        let tracker = self.tracker.clone();
        self.runtime.spawn(async move {
            tracker.wait().await;
            drop(waits);
        });
        let has_ended = ended.recv_timeout(within) != Err(RecvTimeoutError::Timeout);
        if !has_ended {
            let running = self.running.lock().join(", ");
            let seconds = within.as_secs_f32();
            tracing::warn!("not stopped within {seconds} s, and abandoned: {running}");
        }
        has_ended
    }
}

/// Panics of tasks and threads since the process began.
pub fn panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

/// Runs `work`, and logs and counts a panic of it.
pub fn contained<T>(name: &str, work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work))
        .map_err(|panic| note_panic(name, &panic))
        .ok()
}

/// Runs a task, and logs and counts a panic of it.
pub async fn contained_task<T>(name: &str, task: impl Future<Output = T>) -> Option<T> {
    let ended = AssertUnwindSafe(task).catch_unwind().await;
    ended.map_err(|panic| note_panic(name, &panic)).ok()
}

fn note_panic(name: &str, panic: &Box<dyn Any + Send>) {
    PANICS.fetch_add(1, Ordering::Relaxed);
    let message = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or_default();
    tracing::error!(panic = message, "{name} panicked; please report it");
}

impl Running {
    fn begin(&self, name: &'static str) -> RunningName {
        self.lock().push(name);
        RunningName(name, self.clone())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<&'static str>> {
        // Every change is of one name.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RunningName {
    fn drop(&mut self) {
        let Self(name, running) = self;
        let mut names = running.lock();
        if let Some(index) = names.iter().position(|other| other == name) {
            names.swap_remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn stop_waits_for_tasks_threads_and_their_work() {
        let background = Background::start().unwrap();
        let tasks = background.tasks();
        let (ended, ends) = crossbeam_channel::unbounded();
        let end = |name: &'static str| {
            let ended = ended.clone();
            move || ended.send(name).unwrap()
        };
        let by_task = end("task");
        let by_thread = end("thread");
        let of_task = tasks.clone();
        tasks.spawn("task", async move {
            of_task.stopping().cancelled().await;
            of_task.blocking("work", by_task).await;
        });
        let stopping = tasks.stopping().clone();
        let on_runtime = background.clone();
        tasks
            .thread("thread", move || {
                on_runtime.block_on(stopping.cancelled());
                by_thread();
            })
            .unwrap();
        assert!(tasks.stop(LONG));
        let mut names: Vec<_> = ends.try_iter().collect();
        names.sort_unstable();
        assert_eq!(names, ["task", "thread"]);
        assert!(tasks.running.lock().is_empty());
    }

    #[test]
    fn what_does_not_stop_is_abandoned() {
        let background = Background::start().unwrap();
        let tasks = background.tasks();
        let (release, released) = crossbeam_channel::bounded::<()>(0);
        tasks
            .thread("stuck", move || {
                let _ = released.recv();
            })
            .unwrap();
        assert!(!tasks.stop(Duration::from_millis(1)));
        assert_eq!(*tasks.running.lock(), ["stuck"]);
        drop(release);
        assert!(tasks.stop(LONG));
    }

    #[test]
    fn a_panic_ends_one_task_and_is_counted() {
        let background = Background::start().unwrap();
        let tasks = background.tasks();
        let before = panics();
        tasks.spawn("task", async { panic!("a test") });
        tasks.thread("thread", || panic!("a test")).unwrap();
        let result = background.block_on(tasks.blocking("work", || -> u8 { panic!("a test") }));
        assert_eq!(result, None);
        assert!(tasks.stop(LONG));
        // Other tests may panic meanwhile.
        assert!(panics() >= before + 3);
        let result = background.block_on(tasks.blocking("work", || 7));
        assert_eq!(result, Some(7));
    }

    #[test]
    fn the_last_clone_can_be_dropped_in_a_task() {
        let background = Background::start().unwrap();
        let tasks = background.tasks();
        let (ended, ends) = crossbeam_channel::bounded(1);
        tasks.spawn("task", async move {
            drop(background);
            ended.send(()).unwrap();
        });
        ends.recv_timeout(LONG).unwrap();
        // The runtime is gone: there is nothing to wait for.
        assert!(tasks.stop(LONG));
    }
}
