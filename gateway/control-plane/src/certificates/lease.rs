//! The right of one process of the region to order certificates. It is in the record of the region's certificate.

use std::sync::Arc;
use std::time::Duration;

use gw_base::clock::Timestamp;
use gw_shared::id::random_base62;
use gw_store::{AcmeLease, AcmeRecord};

use crate::control::{Control, ControlError};
use crate::limits::CERTIFICATE_LEASE;

/// The lease as this process sees it. The only node of a region needs none.
#[derive(Clone)]
pub(super) struct Lease {
    holder: Arc<str>,
    is_needed: bool,
}

impl Lease {
    pub(super) fn new(control: &Control) -> Self {
        Self {
            holder: random_base62(16).into(),
            is_needed: control.postgres_source().is_some(),
        }
    }

    /// Time until the lease of another process ends; `None` without one.
    pub(super) fn of_another(&self, record: &AcmeRecord, now: Timestamp) -> Option<Duration> {
        let lease = record.lease.as_ref().filter(|_| self.is_needed)?;
        (*lease.holder != *self.holder && lease.until > now).then(|| lease.until.since(now))
    }

    /// Whether this process may order until its next step is stored.
    pub(super) fn is_held(&self, record: &AcmeRecord, now: Timestamp) -> bool {
        !self.is_needed
            || record.lease.as_ref().is_some_and(|lease| {
                *lease.holder == *self.holder && lease.until.since(now) > CERTIFICATE_LEASE / 2
            })
    }

    /// Refuses a step while another process has the lease.
    pub(super) fn check(&self, record: &AcmeRecord, now: Timestamp) -> Result<(), ControlError> {
        match self.of_another(record, now) {
            None => Ok(()),
            Some(_) => Err(ControlError::Conflict(
                "another node orders certificates now".to_owned(),
            )),
        }
    }

    /// Takes the lease, or extends it.
    pub(super) fn extend(&self, record: &mut AcmeRecord, now: Timestamp) {
        record.lease = self.is_needed.then(|| AcmeLease {
            holder: self.holder.as_ref().to_owned(),
            until: now.after(CERTIFICATE_LEASE),
        });
    }
}
