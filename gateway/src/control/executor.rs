//! Where workers have the control plane do what blocks: one thread, one errand after another.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use gw_shared::allocator;
use tokio::sync::oneshot;

use super::{Control, ControlError};
use crate::clock::Timestamp;
use crate::error::Error;
use crate::limits;

/// How often the control plane looks what is due.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(60);
/// How often what was freed is returned to the kernel.
const GIVE_BACK_INTERVAL: Duration = Duration::from_secs(2);

enum Errand {
    Work(Box<dyn FnOnce(&Control) + Send>),
    Stop,
}

/// The way to the control plane. Cheap to clone; never blocks.
#[derive(Clone)]
pub(crate) struct Desk(Sender<Errand>);

/// The other end; served by a thread of its own.
pub(crate) struct Errands(Receiver<Errand>);

pub(crate) fn desk() -> (Desk, Errands) {
    let (sender, receiver) = crossbeam_channel::bounded(limits::ERRANDS);
    (Desk(sender), Errands(receiver))
}

impl Desk {
    /// Has `work` done and waits for what comes of it. Refuses at once when too much is waiting already.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Control) -> Result<T, ControlError> + Send + 'static,
    ) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        let work = Box::new(move |control: &Control| {
            // Whoever asked may have left.
            let _ = reply.send(work(control));
        });
        self.0.try_send(Errand::Work(work)).map_err(|_| Error::Overloaded("overloaded"))?;
        // Dropped unanswered: the work panicked, or the gateway stops.
        answer.await.map_err(|_| Error::Overloaded("not able to do this now"))?.map_err(refusal)
    }

    /// Ends the thread behind it, once what waits is done.
    pub(crate) fn close(&self) {
        // Fails only when it has ended.
        let _ = self.0.send(Errand::Stop);
    }
}

/// What an agent or caller is told of it.
fn refusal(error: ControlError) -> Error {
    match error {
        ControlError::Refused(error) => error,
        ControlError::HandedOver => Error::Overloaded("being replaced by a newer process"),
        error => {
            tracing::error!(%error, "the control plane failed");
            Error::Overloaded("not able to store this now")
        }
    }
}

impl Errands {
    /// Does errands, and what is due, until the desk is closed. Given back, to be served again: what is left there
    /// meanwhile waits.
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
                Ok(Errand::Work(work)) => {
                    if catch_unwind(AssertUnwindSafe(|| work(control))).is_err() {
                        tracing::error!("an errand of the control plane panicked");
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Errand::Stop) | Err(RecvTimeoutError::Disconnected) => return self,
            }
        }
    }
}
