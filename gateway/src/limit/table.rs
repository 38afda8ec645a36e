//! The buckets of the services that one worker owns.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::Bucket;
use crate::auth::Authenticated;
use crate::error::Error;
use crate::store::Directory;

/// A request that was authenticated and then admitted by its service's bucket, on the service's owner.
pub(crate) struct Admitted(pub(crate) Authenticated);

/// Bounded by the number of services: only requests of existing ones come here.
#[derive(Default)]
pub(crate) struct Buckets(HashMap<Arc<str>, Bucket>);

impl Buckets {
    pub(crate) fn admit(&mut self, request: Authenticated, now: Instant) -> Result<Admitted, Error> {
        let service = &request.service;
        let bucket = match self.0.get_mut(&service.label) {
            Some(bucket) => bucket,
            None => self.0.entry(Arc::clone(&service.label)).or_insert_with(|| Bucket::new(service.rate, now)),
        };
        bucket.set_rate(service.rate, now);
        bucket.take(now).map_err(|retry_after| Error::RateLimited { retry_after })?;
        Ok(Admitted(request))
    }

    /// Forgets the buckets of services that are gone, and full ones: a new bucket would be no different.
    pub(crate) fn retain(&mut self, directory: &Directory, now: Instant) {
        self.0.retain(|label, bucket| directory.service(label).is_some() && !bucket.is_full(now));
    }
}
