//! The right of one node of the region to order certificates. It is in the record of the region's
//! certificate.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use gw_base::clock::Timestamp;
use gw_region::{Member, View};
use gw_store::{AcmeLease, AcmeRecord};

use crate::admin::Admin;
use crate::cluster::LocalNode;
use crate::control::ControlError;
use crate::limits::CERTIFICATE_LEASE;

/// The lease as this process sees it. Its holder is a member of the region, by slot and session: a
/// process that replaces another one has both, and goes on. The lease ends with the membership, and
/// at the latest at its own end.
#[derive(Clone)]
pub(super) struct Lease {
    /// `None` without other nodes: no lease is needed.
    node: Option<Arc<LocalNode>>,
}

impl Lease {
    pub(super) fn new(admin: &Admin) -> Self {
        let node = admin.control.local_node();
        let node = admin.region.as_ref().map(|_| Arc::clone(node));
        Self { node }
    }

    /// Whether this node must not order: another member has the lease, or this node is no member.
    pub(super) fn is_elsewhere(&self, record: &AcmeRecord, now: Timestamp) -> bool {
        let Some((own, view)) = self.own() else {
            return self.node.is_some();
        };
        record.lease.as_ref().is_some_and(|lease| {
            let mut members = view.placement().members().iter().map(holder);
            lease.until > now && lease.holder != own && members.any(|it| it == lease.holder)
        })
    }

    /// Whether this node may order until its next step is stored.
    pub(super) fn is_held(&self, record: &AcmeRecord, now: Timestamp) -> bool {
        let lease = record.lease.as_ref().zip(self.own());
        let is_own = lease.is_some_and(|(lease, (own, _))| {
            lease.holder == own && lease.until.since(now) > CERTIFICATE_LEASE / 2
        });
        is_own || self.node.is_none()
    }

    /// This node as a holder, and the region as it knows it; `None` if it is no member.
    fn own(&self) -> Option<(String, Arc<View>)> {
        let view = self.node.as_ref()?.view()?;
        let own = view.placement().member(view.placement().here());
        let own = holder(own.filter(|_| view.is_member())?);
        Some((own, view))
    }

    /// Refuses a step while this node must not order.
    pub(super) fn check(&self, record: &AcmeRecord, now: Timestamp) -> Result<(), ControlError> {
        match self.is_elsewhere(record, now) {
            false => Ok(()),
            true => Err(ControlError::Conflict(
                "another node orders certificates now".to_owned(),
            )),
        }
    }

    /// Takes the lease, or extends it.
    pub(super) fn extend(&self, record: &mut AcmeRecord, now: Timestamp) {
        record.lease = self.own().map(|(holder, _)| AcmeLease {
            holder,
            until: now.after(CERTIFICATE_LEASE),
        });
    }
}

fn holder(member: &Member) -> String {
    format!("{}-{:032x}", member.slot.get(), member.session)
}
