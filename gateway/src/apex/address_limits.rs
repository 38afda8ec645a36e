//! Limits of apex requests per client address. Exact over all workers: each address is owned by one of them.

use std::cell::RefCell;
use std::net::IpAddr;
use std::time::Instant;

use tokio::sync::oneshot;

use super::Apex;
use crate::error::Error;
use crate::rate::Rate;
use crate::rate_limit::{AddressKey, AddressLimits, Exhausted};

/// Endpoints that are limited separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Token,
    /// `/enroll`, `/enroll/status` and `/csr` together.
    Enrollment,
}

/// The buckets of the addresses that one worker owns.
pub(crate) struct AddressTables {
    token: RefCell<AddressLimits>,
    enrollment: RefCell<AddressLimits>,
}

/// Asks the owner of an address to take one request out of its bucket.
pub(crate) struct AddressCharge {
    endpoint: Endpoint,
    client: IpAddr,
    reply: oneshot::Sender<Result<(), Exhausted>>,
}

impl AddressTables {
    pub(crate) fn new(token: Rate, enrollment: Rate) -> Self {
        Self {
            token: RefCell::new(AddressLimits::new(token)),
            enrollment: RefCell::new(AddressLimits::new(enrollment)),
        }
    }

    fn take(&self, endpoint: Endpoint, client: IpAddr) -> Result<(), Exhausted> {
        let table = match endpoint {
            Endpoint::Token => &self.token,
            Endpoint::Enrollment => &self.enrollment,
        };
        table.borrow_mut().take(client, Instant::now())
    }

    /// Serves a charge that another worker posted.
    pub(crate) fn serve(&self, charge: AddressCharge) {
        // Fails when the caller has left.
        let _ = charge.reply.send(self.take(charge.endpoint, charge.client));
    }
}

impl Apex {
    /// Takes one request out of the bucket of `client` for `endpoint`.
    pub(super) async fn charge(&self, endpoint: Endpoint, client: IpAddr) -> Result<(), Error> {
        let owner = AddressKey::from(client).owner(self.workers);
        let taken = if owner == self.worker {
            self.addresses.take(endpoint, client)
        } else {
            let (reply, answer) = oneshot::channel();
            let charge = Box::new(AddressCharge { endpoint, client, reply });
            self.owners.post(owner, charge).map_err(|_| Error::Overloaded("overloaded"))?;
            answer.await.map_err(|_| Error::Overloaded("stopping"))?
        };
        // The time until the bucket is full, not until one request fits: a limited client should come back much later.
        taken.map_err(|exhausted| Error::AddressRateLimited { retry_after: exhausted.until_full })
    }
}
