//! Buckets of the services that one worker owns. During a takeover one of the two processes has the
//! buckets, and requests of both are charged there.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gw_base::error::Error;
use gw_region::owners::ownership::WorkerId;
use gw_shared::runtime;
use gw_store::{Directory, Service};
use tokio::sync::watch;

use super::{Bucket, Level, PredecessorCharge, SuccessorBuckets};
use crate::auth::Authenticated;

/// A request that was authenticated, and admitted by the bucket of its service on the owner of the
/// service.
pub struct Admitted(pub Authenticated);

/// Bounded by the number of services: requests of unknown services are refused before admission.
pub struct Buckets {
    by_label: HashMap<Arc<str>, Bucket>,
    location: BucketLocation,
}

/// The process that has the buckets.
enum BucketLocation {
    Here,
    /// This process, once the predecessor has sent their levels.
    Coming(watch::Sender<()>),
    /// The process that took over from this one.
    AtSuccessor(SuccessorBuckets),
}

impl Buckets {
    /// Full buckets except those in `levels`.
    pub fn new(levels: &[Level], directory: &Directory, worker: WorkerId, now: Instant) -> Self {
        let mut buckets = Self {
            by_label: HashMap::new(),
            location: BucketLocation::Here,
        };
        buckets.take_over(levels, directory, worker, now);
        buckets
    }

    /// Empty table; requests wait until [`Self::take_over`] fills it.
    pub fn awaited() -> Self {
        Self {
            by_label: HashMap::new(),
            location: BucketLocation::Coming(watch::Sender::new(())),
        }
    }

    /// Continues the levels of the services that `worker` owns. Has no effect once another process
    /// has taken over.
    pub fn take_over(
        &mut self,
        levels: &[Level],
        directory: &Directory,
        worker: WorkerId,
        now: Instant,
    ) {
        if !matches!(self.location, BucketLocation::AtSuccessor(_)) {
            self.by_label.extend(owned(levels, directory, worker, now));
            // Dropping the sender wakes the waiting requests.
            self.location = BucketLocation::Here;
        }
    }

    /// Leaves the buckets to the process that takes over; returns the levels of those that are not
    /// full.
    pub fn hand_over(&mut self, successor: SuccessorBuckets, now: Instant) -> Vec<Level> {
        let levels = self.levels(now);
        self.location = BucketLocation::AtSuccessor(successor);
        self.by_label.clear();
        levels
    }

    /// The levels of the buckets that are not full.
    pub fn levels(&self, now: Instant) -> Vec<Level> {
        self.by_label
            .iter()
            .filter_map(|(label, bucket)| level(label, bucket, now))
            .collect()
    }

    /// Removes the buckets of services that `has_left`; returns the levels of those that are not
    /// full.
    pub fn leave(
        &mut self,
        directory: &Directory,
        has_left: impl Fn(&Service) -> bool,
        now: Instant,
    ) -> Vec<Level> {
        let is_leaving = |label: &Arc<str>| {
            directory
                .service(label)
                .is_some_and(|service| has_left(service))
        };
        let leaving = self.by_label.extract_if(|label, _| is_leaving(label));
        leaving
            .filter_map(|(label, bucket)| level(&label, &bucket, now))
            .collect()
    }

    /// Continues the levels of services that came from another node, and that `worker` owns. The
    /// lower one counts if a bucket exists already.
    pub fn receive(
        &mut self,
        levels: &[Level],
        directory: &Directory,
        worker: WorkerId,
        now: Instant,
    ) {
        for (label, bucket) in owned(levels, directory, worker, now) {
            let until_full = bucket.until_full(now);
            if self
                .by_label
                .get(&label)
                .is_none_or(|known| known.until_full(now) < until_full)
            {
                self.by_label.insert(label, bucket);
            }
        }
    }

    /// Whether [`Self::charge`] can decide. Otherwise use [`charge_or_wait`].
    pub fn are_here(&self) -> bool {
        matches!(self.location, BucketLocation::Here)
    }

    /// Admits a request by the bucket of its service, while this process has the buckets.
    pub fn charge(&mut self, request: Authenticated, now: Instant) -> Result<Admitted, Error> {
        debug_assert!(self.are_here(), "the buckets are in another process");
        if request.waited.is_none() {
            self.take(&request.service, now)
                .map_err(|retry_after| Error::RateLimited { retry_after })?;
        }
        Ok(Admitted(request))
    }

    fn take(&mut self, service: &Service, now: Instant) -> Result<(), Duration> {
        let bucket = match self.by_label.get_mut(&service.label) {
            Some(bucket) => bucket,
            None => self
                .by_label
                .entry(Arc::clone(&service.label))
                .or_insert_with(|| Bucket::new(service.settings.rate, now)),
        };
        bucket.set_rate(service.settings.rate, now);
        bucket.take(now)
    }

    /// Removes the buckets of deleted services, and full buckets: they are equal to new ones.
    pub fn retain(&mut self, directory: &Directory, now: Instant) {
        self.by_label
            .retain(|label, bucket| directory.service(label).is_some() && !bucket.is_full(now));
    }
}

/// The level of a bucket that is not full.
fn level(label: &Arc<str>, bucket: &Bucket, now: Instant) -> Option<Level> {
    (!bucket.is_full(now)).then(|| Level {
        service: label.to_string(),
        rate: bucket.rate(),
        until_full_ms: u64::try_from(bucket.until_full(now).as_micros().div_ceil(1000))
            .unwrap_or(u64::MAX),
    })
}

/// The buckets of services that `worker` owns, at these levels.
fn owned(
    levels: &[Level],
    directory: &Directory,
    worker: WorkerId,
    now: Instant,
) -> impl Iterator<Item = (Arc<str>, Bucket)> {
    levels.iter().filter_map(move |level| {
        let service = directory
            .service(&level.service)
            .filter(|service| service.owner == worker)?;
        let until_full = Duration::from_millis(level.until_full_ms);
        Some((
            Arc::clone(&service.label),
            Bucket::filling(level.rate, until_full, now),
        ))
    })
}

/// Admits a request by the bucket of its service; waits while the bucket is or goes to another
/// process.
pub async fn charge_or_wait(
    buckets: &RefCell<Buckets>,
    request: Authenticated,
) -> Result<Admitted, Error> {
    if request.waited.is_none() {
        take(buckets, &request.service).await?;
    }
    Ok(Admitted(request))
}

async fn take(buckets: &RefCell<Buckets>, service: &Service) -> Result<(), Error> {
    loop {
        let (mut coming, at_successor) = match &buckets.borrow().location {
            BucketLocation::Here => (None, None),
            BucketLocation::Coming(levels) => (Some(levels.subscribe()), None),
            BucketLocation::AtSuccessor(successor) => (None, Some(successor.clone())),
        };
        if let Some(levels) = &mut coming {
            // A dropped sender ends the wait, too.
            let _ = levels.changed().await;
        } else if let Some(successor) = at_successor {
            if let Some(taken) = successor.take(&service.label).await {
                return taken;
            }
            // Full buckets, as after a crash.
            buckets.borrow_mut().location = BucketLocation::Here;
        } else {
            let taken = buckets.borrow_mut().take(service, Instant::now());
            return taken.map_err(|retry_after| Error::RateLimited { retry_after });
        }
    }
}

/// Admits a request of the predecessor by the bucket of its service.
pub fn charge_for_predecessor(
    buckets: &Rc<RefCell<Buckets>>,
    directory: &Directory,
    request: PredecessorCharge,
) {
    let Some(service) = directory.service(&request.service).cloned() else {
        // The service was deleted: it has no bucket, and no tunnel will take the request.
        return request.answer(None);
    };
    if buckets.borrow().are_here() {
        let taken = buckets.borrow_mut().take(&service, Instant::now());
        return request.answer(taken.err());
    }
    let buckets = Rc::clone(buckets);
    runtime::spawn(async move {
        match take(&buckets, &service).await {
            Ok(()) => request.answer(None),
            Err(Error::RateLimited { retry_after }) => request.answer(Some(retry_after)),
            // The predecessor will see the end of this process.
            Err(_) => request.answer(Some(Duration::from_secs(1))),
        }
    });
}
