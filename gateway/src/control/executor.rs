//! Runs blocking work of the workers one after the other, and the maintenance of the records.

use std::sync::Arc;
use std::time::Duration;

use gw_shared::allocator;
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;

use super::{Control, ControlError};
use crate::background::Tasks;
use crate::clock::Timestamp;
use crate::error::{Error, Overload};
use crate::limits;

/// Interval of the maintenance of the records.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(60);
/// Interval at which freed memory is returned to the kernel.
const GIVE_BACK_INTERVAL: Duration = Duration::from_secs(2);

type Job = Box<dyn FnOnce(&Control) + Send>;

/// Submits jobs. Cheap to clone; submitting never blocks.
#[derive(Clone)]
pub(crate) struct Executor(mpsc::Sender<Job>);

/// The queue of submitted jobs.
pub(crate) struct JobQueue(mpsc::Receiver<Job>);

pub(crate) fn executor() -> (Executor, JobQueue) {
    let (sender, receiver) = mpsc::channel(limits::CONTROL_JOBS);
    (Executor(sender), JobQueue(receiver))
}

impl Executor {
    /// Runs `work` and waits for its result. Fails at once when the queue is full.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Control) -> Result<T, ControlError> + Send + 'static,
    ) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        let work = Box::new(move |control: &Control| {
            // The task that waits may have been cancelled.
            let _ = reply.send(work(control));
        });
        self.0
            .try_send(work)
            .map_err(|_| Error::Overloaded(Overload::QueueFull))?;
        // The sender is dropped when the work panics or the gateway stops.
        answer
            .await
            .map_err(|_| Error::Overloaded(Overload::JobDropped))?
            .map_err(refusal)
    }
}

/// The error that an agent or caller gets; other errors are logged here.
fn refusal(error: ControlError) -> Error {
    match error {
        ControlError::Refused(error) => error,
        ControlError::HandedOver => Error::Overloaded(Overload::HandedOver),
        error => {
            tracing::error!(%error, "a job of the control plane failed");
            Error::Overloaded(Overload::NotStored)
        }
    }
}

impl JobQueue {
    /// Runs jobs until the tasks stop, then those that wait at that time. Later ones wait until this is called again.
    pub(crate) async fn serve(&mut self, control: &Arc<Control>, tasks: &Tasks) {
        while let Some(Some(job)) = tasks.stopping().run_until_cancelled(self.0.recv()).await {
            run(job, control, tasks).await;
        }
        for _ in 0..self.0.len() {
            if let Ok(job) = self.0.try_recv() {
                run(job, control, tasks).await;
            }
        }
    }
}

/// Runs a job. If it panics, its reply is dropped.
async fn run(job: Job, control: &Arc<Control>, tasks: &Tasks) {
    let control = Arc::clone(control);
    tasks
        .blocking("a job of the control plane", move || job(&control))
        .await;
}

/// Starts the periodic maintenance of the records, and the return of freed memory to the kernel.
pub(crate) fn maintain(control: &Arc<Control>, tasks: &Tasks) {
    let of_control = Arc::clone(control);
    repeat(
        tasks,
        "the maintenance of the records",
        MAINTENANCE_INTERVAL,
        move || {
            if of_control.has_store()
                && let Err(error) = of_control.maintain(Timestamp::now())
            {
                tracing::error!(%error, "maintenance of the records failed; trying again in a minute");
            }
        },
    );
    repeat(
        tasks,
        "the return of freed memory",
        GIVE_BACK_INTERVAL,
        allocator::give_back,
    );
}

/// Starts to do blocking work again and again, the first time after `interval`.
fn repeat(
    tasks: &Tasks,
    name: &'static str,
    interval: Duration,
    work: impl Fn() + Clone + Send + 'static,
) {
    let of_task = tasks.clone();
    tasks.spawn_until_stopped(name, async move {
        loop {
            sleep(interval).await;
            of_task.blocking(name, work.clone()).await;
        }
    });
}
