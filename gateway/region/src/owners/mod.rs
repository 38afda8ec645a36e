//! Owners of services: which node and worker own a service, since when, and until when they may
//! admit requests.

pub(super) mod lease;
pub mod ownership;
pub(super) mod placement;
pub(super) mod succession;
pub(super) mod view;
