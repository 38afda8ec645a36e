//! Runs blocking work of the workers on one control thread, in order.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use gw_shared::allocator;
use tokio::sync::oneshot;

use super::{Control, ControlError};
use crate::clock::Timestamp;
use crate::error::{Error, Overload};
use crate::limits;

/// Interval of the maintenance of the records.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(60);
/// Interval at which freed memory is returned to the kernel.
const GIVE_BACK_INTERVAL: Duration = Duration::from_secs(2);

enum Job {
    Work(Box<dyn FnOnce(&Control) + Send>),
    Stop,
}

/// Submits jobs to the control thread. Cheap to clone; submitting never blocks.
#[derive(Clone)]
pub(crate) struct Executor(Sender<Job>);

/// The queue of submitted jobs, served by the control thread.
pub(crate) struct JobQueue(Receiver<Job>);

pub(crate) fn executor() -> (Executor, JobQueue) {
    let (sender, receiver) = crossbeam_channel::bounded(limits::CONTROL_JOBS);
    (Executor(sender), JobQueue(receiver))
}

impl Executor {
    /// Runs `work` on the control thread and waits for its result. Fails at once when the queue is full.
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
            .try_send(Job::Work(work))
            .map_err(|_| Error::Overloaded(Overload::QueueFull))?;
        // The sender is dropped when the work panics or the gateway stops.
        answer
            .await
            .map_err(|_| Error::Overloaded(Overload::JobDropped))?
            .map_err(refusal)
    }

    /// Stops the control thread after the jobs that are already queued.
    pub(crate) fn close(&self) {
        // Fails only when the thread has ended.
        let _ = self.0.send(Job::Stop);
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
    /// Runs jobs and periodic maintenance until the executor is closed. Returns the queue, so that jobs submitted
    /// meanwhile wait until it is served again.
    pub(crate) fn serve(self, control: &Arc<Control>) -> Self {
        let mut next_maintenance = Instant::now() + MAINTENANCE_INTERVAL;
        let mut next_give_back = Instant::now() + GIVE_BACK_INTERVAL;
        loop {
            if Instant::now() >= next_give_back {
                allocator::give_back();
                next_give_back = Instant::now() + GIVE_BACK_INTERVAL;
            }
            if Instant::now() >= next_maintenance {
                if control.has_store()
                    && let Err(error) = control.maintain(Timestamp::now())
                {
                    tracing::error!(%error, "maintenance of the records failed; trying again in a minute");
                }
                next_maintenance = Instant::now() + MAINTENANCE_INTERVAL;
            }
            match self.0.recv_deadline(next_maintenance.min(next_give_back)) {
                Ok(Job::Work(work)) => {
                    if catch_unwind(AssertUnwindSafe(|| work(control))).is_err() {
                        tracing::error!("a job of the control plane panicked");
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Job::Stop) | Err(RecvTimeoutError::Disconnected) => return self,
            }
        }
    }
}
