//! Workers: threads of the checker that run tasks.

use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use loom::sync::{Condvar, Mutex};

type Task<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// Tasks that were woken: one bit for each.
struct Woken {
    tasks: Mutex<usize>,
    changed: Condvar,
}

struct TaskWaker {
    task: usize,
    woken: Arc<Woken>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        *self.woken.tasks.lock().unwrap() |= 1 << self.task;
        self.woken.changed.notify_one();
    }
}

impl Woken {
    /// Waits for a task that was woken.
    fn wait(&self) -> usize {
        let mut tasks = self.tasks.lock().unwrap();
        while *tasks == 0 {
            tasks = self.changed.wait(tasks).unwrap();
        }
        std::mem::take(&mut *tasks)
    }
}

/// Runs a task to its end on the calling thread.
pub(crate) fn run<T>(main: impl Future<Output = T>) -> T {
    run_beside(std::future::pending(), main)
}

/// Runs `main` to its end on the calling thread, and another task meanwhile.
pub(crate) fn run_beside<T>(other: impl Future<Output = ()>, main: impl Future<Output = T>) -> T {
    let mut output = None;
    let main = async { output = Some(main.await) };
    run_tasks([Box::pin(other), Box::pin(main)]);
    output.unwrap()
}

/// Runs tasks on the calling thread until one of them ends. A task is polled after its own waker
/// was used, and not otherwise: a lost wake is a deadlock, which the checker reports.
fn run_tasks(tasks: [Task<'_>; 2]) {
    let woken = Arc::new(Woken {
        tasks: Mutex::new(0b11),
        changed: Condvar::new(),
    });
    let wakers = [0, 1].map(|task| {
        Waker::from(Arc::new(TaskWaker {
            task,
            woken: Arc::clone(&woken),
        }))
    });
    // Leaked at a panic: the checker does not survive the steps of a destructor then.
    let mut tasks = ManuallyDrop::new(tasks);
    loop {
        let turn = woken.wait();
        for (number, task) in tasks.iter_mut().enumerate() {
            let is_woken = turn & (1 << number) != 0;
            let mut cx = Context::from_waker(&wakers[number]);
            if is_woken && task.as_mut().poll(&mut cx) == Poll::Ready(()) {
                return drop(ManuallyDrop::into_inner(tasks));
            }
        }
    }
}
