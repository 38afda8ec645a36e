//! Limits of apex requests per client address. Exact over all workers: each address is owned by one of them. In a region of
//! several nodes it is also owned by one node (`other_nodes`).

use std::cell::RefCell;
use std::net::IpAddr;
use std::time::Instant;

use serde::Deserialize;
use tokio::sync::oneshot;

use super::Apex;
use crate::error::Error;
use crate::rate::Rate;
use crate::rate_limit::{AddressKey, ClientLimits, Exhausted};

/// Endpoints that are limited separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Endpoint {
    Token,
    /// `/enroll`, `/enroll/status` and `/csr` together.
    Enrollment,
}

impl Endpoint {
    /// Name in messages between nodes.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Token => "token",
            Self::Enrollment => "enrollment",
        }
    }
}

/// The buckets of the addresses that one worker owns.
pub(crate) struct AddressTables {
    token: RefCell<ClientLimits<AddressKey>>,
    enrollment: RefCell<ClientLimits<AddressKey>>,
}

/// Asks the owner of an address to take one request out of its bucket.
pub(crate) struct AddressCharge {
    pub(super) endpoint: Endpoint,
    pub(super) client: IpAddr,
    pub(super) reply: oneshot::Sender<Result<(), Exhausted>>,
}

impl AddressTables {
    pub(crate) fn new(token: Rate, enrollment: Rate) -> Self {
        Self {
            token: RefCell::new(ClientLimits::new(token)),
            enrollment: RefCell::new(ClientLimits::new(enrollment)),
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
    /// Takes one request out of the bucket of `client` for `endpoint`, at this node and at the node that owns the address.
    pub(super) async fn charge(&self, endpoint: Endpoint, client: IpAddr) -> Result<(), Error> {
        let mut taken = self.take_here(endpoint, client).await?;
        if taken.is_ok()
            && let Some(nodes) = &self.other_nodes
        {
            taken = nodes.take(endpoint, client).await;
        }
        // The time until the bucket is full, not until one request fits: a limited client should come back much later.
        taken.map_err(|exhausted| Error::AddressRateLimited { retry_after: exhausted.until_full })
    }

    /// Takes one request out of the bucket that a worker of this node has.
    async fn take_here(&self, endpoint: Endpoint, client: IpAddr) -> Result<Result<(), Exhausted>, Error> {
        let owner = AddressKey::from(client).owner(self.workers);
        if owner == self.worker {
            return Ok(self.addresses.take(endpoint, client));
        }
        let (reply, answer) = oneshot::channel();
        let charge = Box::new(AddressCharge { endpoint, client, reply });
        self.owners.post(owner, charge).map_err(|_| Error::Overloaded("overloaded"))?;
        answer.await.map_err(|_| Error::Overloaded("stopping"))
    }
}
