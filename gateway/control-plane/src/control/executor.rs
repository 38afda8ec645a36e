//! Runs blocking work of the workers one after the other, and the maintenance of the records.

use std::sync::Arc;
use std::time::Duration;

use gw_base::clock::Timestamp;
use gw_base::error::{Error, Overload};
use gw_base::process::background::Tasks;
use gw_interface::control_plane::{AgentProof, ControlPlane, Job};
use gw_shared::id::AgentId;
use gw_shared::identity::enrollment::{CertificateReply, EnrollReply, EnrollRequest, StatusReply};
use gw_shared::identity::secret::Secret;
use gw_shared::process::allocator;
use gw_store::{Position, PublicKeyHash};
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::identity::{certificate, enrollment};
use super::{Control, ControlError};

/// Interval of the maintenance of the records.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(60);
/// Interval at which freed memory is returned to the kernel.
const GIVE_BACK_INTERVAL: Duration = Duration::from_secs(2);

/// The queue of the workers' jobs.
pub struct JobQueue(mpsc::Receiver<Job>);

impl ControlPlane for Control {
    fn enroll(&self, request: &EnrollRequest) -> Result<EnrollReply, Error> {
        enrollment::enroll(self, request).map_err(refusal)
    }

    fn enrollment_status(&self, id: &str, secret: &Secret) -> Result<StatusReply, Error> {
        enrollment::status(self, id, secret).map_err(refusal)
    }

    fn sign(&self, proof: &AgentProof, csr: &str) -> Result<CertificateReply, Error> {
        certificate::sign(self, proof, csr).map_err(refusal)
    }

    fn forget_replaced_key(&self, agent: &AgentId, key: &PublicKeyHash) -> Result<(), Error> {
        certificate::forget_replaced_key(self, agent, key).map_err(refusal)
    }

    fn position(&self) -> Position {
        self.position()
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
    /// Creates the queue from the receiving end of the executor.
    pub fn new(jobs: mpsc::Receiver<Job>) -> Self {
        Self(jobs)
    }

    /// Runs jobs until the tasks stop, then those that wait at that time. Later ones wait until
    /// this is called again.
    pub async fn serve(&mut self, control: &Arc<Control>, tasks: &Tasks) {
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
        .blocking("a job of the control plane", move || job(control.as_ref()))
        .await;
}

/// Starts the periodic maintenance of the records, and the return of freed memory to the kernel.
pub fn maintain(control: &Arc<Control>, tasks: &Tasks) {
    let of_control = Arc::clone(control);
    repeat(
        tasks,
        "the maintenance of the records",
        MAINTENANCE_INTERVAL,
        move || {
            if of_control.has_store()
                && let Err(error) = of_control.maintain(Timestamp::now())
            {
                tracing::error!(%error,
                    "maintenance of the records failed; trying again in a minute");
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
pub(super) fn repeat(
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
