//! How much an address may ask of the apex. Exact over all workers: each address has one owner, as each service has.

use std::cell::RefCell;
use std::net::IpAddr;
use std::time::Instant;

use tokio::sync::oneshot;

use crate::error::Error;
use crate::limit::{AddressKey, AddressLimits, Exhausted, Rate};
use crate::mailbox::Message;
use crate::worker::Core;

/// What is counted separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Token,
    /// `/enroll`, `/enroll/status` and `/csr` together.
    Enrollment,
}

/// The buckets of the addresses that one worker owns, and its own count of failed authentications.
pub(crate) struct AddressTables {
    token: RefCell<AddressLimits>,
    enrollment: RefCell<AddressLimits>,
    /// Of requests on tenant hosts. Each worker counts those it answers: a request must not cross for it.
    pub(crate) failures: RefCell<AddressLimits>,
    /// Of tokens whose signature was wrong: the failures that cost us something.
    pub(crate) forgeries: RefCell<AddressLimits>,
}

/// Asks the owner of an address for one request's worth.
pub(crate) struct Charge {
    endpoint: Endpoint,
    client: IpAddr,
    reply: oneshot::Sender<Result<(), Exhausted>>,
}

impl AddressTables {
    pub(crate) fn new(token: Rate, enrollment: Rate, failures: Rate) -> Self {
        let table = |rate| RefCell::new(AddressLimits::new(rate));
        Self {
            token: table(token),
            enrollment: table(enrollment),
            failures: table(failures),
            forgeries: table(failures),
        }
    }

    fn take(&self, endpoint: Endpoint, client: IpAddr) -> Result<(), Exhausted> {
        let table = match endpoint {
            Endpoint::Token => &self.token,
            Endpoint::Enrollment => &self.enrollment,
        };
        table.borrow_mut().take(client, Instant::now())
    }

    /// The owner's part.
    pub(crate) fn serve(&self, charge: Charge) {
        // The caller may have left.
        let _ = charge.reply.send(self.take(charge.endpoint, charge.client));
    }
}

/// Takes one request out of what `client` may ask of `endpoint`.
pub(super) async fn charge(core: &Core, endpoint: Endpoint, client: IpAddr) -> Result<(), Error> {
    let owner = AddressKey::from(client).owner(core.workers());
    let taken = if owner == core.id {
        core.addresses.take(endpoint, client)
    } else {
        let (reply, answer) = oneshot::channel();
        let charge = Box::new(Charge { endpoint, client, reply });
        core.mailbox(owner).post(Message::Charge(charge)).map_err(|_| Error::Overloaded("overloaded"))?;
        answer.await.map_err(|_| Error::Overloaded("stopping"))?
    };
    // Not until one more is admitted but until all are: who is limited here should come back much later, not soon.
    taken.map_err(|exhausted| Error::AddressRateLimited { retry_after: exhausted.until_full })
}
