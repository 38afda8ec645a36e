//! Requests that one process admits by the buckets of another while it is replaced.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{Receiver, Sender};
use tokio::sync::{mpsc, oneshot};

use crate::error::{Error, Overload};
use crate::limits;

/// The buckets of the process that took over from this one. Cheap to clone.
#[derive(Clone)]
pub(crate) struct SuccessorBuckets(Sender<SuccessorCharge>);

/// A request that the successor is asked to admit.
pub(crate) struct SuccessorCharge {
    /// Label of the service.
    pub(crate) service: Arc<str>,
    /// Receives `None` once the request is admitted, or the time until it can be.
    pub(crate) reply: oneshot::Sender<Option<Duration>>,
}

/// A request that the predecessor asks this process to admit.
#[derive(Debug)]
pub(crate) struct PredecessorCharge {
    /// Label of the service.
    pub(crate) service: String,
    pub(crate) number: u64,
    pub(crate) answers: Sender<ChargeAnswer>,
}

/// Answer to the request of this number.
#[derive(Debug)]
pub(crate) struct ChargeAnswer {
    pub(crate) number: u64,
    /// `None` once the request is admitted, or the time until it can be.
    pub(crate) wait: Option<Duration>,
}

impl PredecessorCharge {
    pub(crate) fn answer(&self, wait: Option<Duration>) {
        let number = self.number;
        // Fails if the predecessor has ended.
        let _ = self.answers.try_send(ChargeAnswer { number, wait });
    }
}

impl SuccessorBuckets {
    /// The buckets, and the queue of the requests that are to be charged to them.
    pub(crate) fn new() -> (Self, Receiver<SuccessorCharge>) {
        let (sender, receiver) = mpsc::channel(limits::CHARGES);
        (Self(sender), receiver)
    }

    /// Takes one request out of the bucket of `service`.
    pub(crate) async fn take(&self, service: &Arc<str>) -> Result<(), Error> {
        const DRAINING: Error = Error::Overloaded(Overload::Draining);
        let (reply, answer) = oneshot::channel();
        self.0
            .try_send(SuccessorCharge {
                service: Arc::clone(service),
                reply,
            })
            .map_err(|_| DRAINING)?;
        match answer.await {
            Ok(None) => Ok(()),
            Ok(Some(retry_after)) => Err(Error::RateLimited { retry_after }),
            // The successor has ended.
            Err(_) => Err(DRAINING),
        }
    }
}
