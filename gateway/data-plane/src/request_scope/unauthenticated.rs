//! Rates of the records of requests that did not authenticate. Anyone can send such requests, so
//! they must not fill the request log.

use std::sync::Arc;
use std::time::Instant;

use gw_interface::rate_limit::{Bucket, ClientLimits};

use crate::limits;

/// Buckets of one worker. The record of an authenticated request takes nothing from them.
pub(crate) struct UnauthenticatedRecords {
    all: Bucket,
    by_service: ClientLimits<Arc<str>>,
}

impl UnauthenticatedRecords {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            all: Bucket::new(limits::UNAUTHENTICATED_RECORDS, now),
            by_service: ClientLimits::new(limits::UNAUTHENTICATED_RECORDS_PER_SERVICE),
        }
    }

    /// Takes one record of the service `label` from both buckets. Returns whether there was one.
    pub(super) fn take(&mut self, label: Arc<str>, now: Instant) -> bool {
        // Without a record for all services, the bucket of this one keeps its own.
        self.all.until_one(now).is_zero()
            && self.by_service.take(label, now).is_ok()
            && self.all.take(now).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_service_gets_its_rate_and_all_services_share_another() {
        let start = Instant::now();
        let mut records = UnauthenticatedRecords::new(start);
        let mut taken = |label: &str, now| {
            let take = |_: &u32| records.take(label.into(), now);
            (0..2000).filter(take).count()
        };
        let of_one = limits::UNAUTHENTICATED_RECORDS_PER_SERVICE;
        let burst = of_one.burst() as usize;
        let all = limits::UNAUTHENTICATED_RECORDS.burst() as usize;
        assert_eq!(taken("acme--api", start), burst);
        assert_eq!(taken("acme--other", start), burst);
        assert_eq!(taken("", start), all - 2 * burst);
        assert_eq!(taken("more--api", start), 0);
        let later = start + Duration::from_secs(10);
        assert_eq!(taken("acme--api", later), 20);
        assert_eq!(taken("more--api", later), 30);
    }
}
