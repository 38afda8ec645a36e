//! Requests that one process admits by the buckets of another while it is replaced.

use std::sync::Arc;
use std::time::Duration;

use crate::limits;
use gw_base::error::{Error, Overload};
use tokio::sync::mpsc::{Receiver, Sender};
use tokio::sync::{mpsc, oneshot};

/// The buckets of the process that took over from this one. Cheap to clone.
#[derive(Clone)]
pub struct SuccessorBuckets(Sender<SuccessorCharge>);

/// A request that the successor is asked to admit.
pub struct SuccessorCharge {
    /// Label of the service.
    pub service: Arc<str>,
    /// Receives `None` once the request is admitted, or the time until it can be.
    pub reply: oneshot::Sender<Option<Duration>>,
}

/// A request that the predecessor asks this process to admit.
#[derive(Debug)]
pub struct PredecessorCharge {
    /// Label of the service.
    pub service: String,
    /// Number of the request, which its answer carries.
    pub number: u64,
    /// Queue of the answers to the predecessor.
    pub answers: Sender<ChargeAnswer>,
}

/// Answer to the request of this number.
#[derive(Debug)]
pub struct ChargeAnswer {
    /// Number of the request.
    pub number: u64,
    /// `None` once the request is admitted, or the time until it can be.
    pub wait: Option<Duration>,
}

impl PredecessorCharge {
    /// Sends the answer: `None` if the request is admitted, or the time until it can be. Never
    /// blocks; without room in the queue the answer is dropped.
    pub fn answer(&self, wait: Option<Duration>) {
        let number = self.number;
        // Fails if the predecessor has ended.
        let _ = self.answers.try_send(ChargeAnswer { number, wait });
    }
}

impl SuccessorBuckets {
    /// The buckets, and the queue of the requests that are to be charged to them.
    pub fn new() -> (Self, Receiver<SuccessorCharge>) {
        let (sender, receiver) = mpsc::channel(limits::CHARGES);
        (Self(sender), receiver)
    }

    /// Takes one request out of the bucket of `service`. `None` if the exchange with the successor
    /// has ended.
    pub async fn take(&self, service: &Arc<str>) -> Option<Result<(), Error>> {
        let (reply, answer) = oneshot::channel();
        let service = Arc::clone(service);
        let sent = self.0.try_send(SuccessorCharge { service, reply });
        let answer = if sent.is_ok() {
            answer.await.ok()
        } else {
            None
        };
        match answer {
            Some(None) => Some(Ok(())),
            Some(Some(retry_after)) => Some(Err(Error::RateLimited { retry_after })),
            None if self.0.is_closed() => None,
            // Too many requests wait.
            None => Some(Err(Error::Overloaded(Overload::Draining))),
        }
    }
}
