//! Limits of apex requests per client address and per agent. Exact over all workers: each address
//! and agent is owned by one of them. In a region of several nodes it is also owned by one node
//! (`other_nodes`).

use std::cell::RefCell;
use std::net::IpAddr;
use std::time::Instant;

use crate::limits;
use gw_base::error::{Error, Overload};
use gw_base::service::rate::Rate;
use gw_interface::rate_limit::{AddressKey, ClientLimits, Exhausted};
use gw_region::owners::ownership;
use gw_region::owners::ownership::WorkerId;
use gw_shared::id::AgentId;
use tokio::sync::oneshot;

use super::Apex;

/// The bucket that a request is charged to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApexBucket {
    /// The bucket of an address for the token endpoint.
    Token(IpAddr),
    /// The bucket of an address for `/enroll`, `/enroll/status` and `/csr` together.
    Enrollment(IpAddr),
    /// The bucket of an agent that has proved its enrollment, for `/enroll/status` and `/csr`
    /// together. Agents behind one address do not share it.
    Agent(AgentId),
}

impl ApexBucket {
    /// The worker out of `workers` (at least one) that has the bucket.
    pub fn owner(&self, workers: usize) -> WorkerId {
        match self {
            Self::Token(client) | Self::Enrollment(client) => {
                AddressKey::from(*client).owner(workers)
            }
            Self::Agent(agent) => ownership::owner(agent.as_str(), workers),
        }
    }

    /// Index of the node, out of the slots of the members, that has it for the whole region; `None`
    /// without members.
    pub(super) fn owner_node(&self, slots: impl Iterator<Item = u64>) -> Option<usize> {
        match self {
            Self::Token(client) | Self::Enrollment(client) => {
                AddressKey::from(*client).owner_node(slots)
            }
            Self::Agent(agent) => ownership::owner_node(agent.as_str(), slots),
        }
    }

    /// Names of the kind and of the client in messages between nodes.
    pub(super) fn names(&self) -> (&'static str, String) {
        match self {
            Self::Token(client) => ("token", client.to_string()),
            Self::Enrollment(client) => ("enrollment", client.to_string()),
            Self::Agent(agent) => ("agent", agent.to_string()),
        }
    }

    /// The opposite of `names`.
    pub fn parse(kind: &str, client: &str) -> Option<Self> {
        match kind {
            "token" => client.parse().ok().map(Self::Token),
            "enrollment" => client.parse().ok().map(Self::Enrollment),
            "agent" => client.parse().ok().map(Self::Agent),
            _ => None,
        }
    }
}

/// The buckets that one worker owns.
pub(crate) struct ApexLimits {
    token: RefCell<ClientLimits<AddressKey>>,
    enrollment: RefCell<ClientLimits<AddressKey>>,
    agents: RefCell<ClientLimits<AgentId>>,
}

/// Asks the owner of a bucket to take one request out of it.
pub struct ApexCharge {
    /// Bucket to take the request out of.
    pub bucket: ApexBucket,
    /// Receives whether the request was taken.
    pub reply: oneshot::Sender<Result<(), Exhausted>>,
}

impl ApexLimits {
    /// `token` and `enrollment` are the rates of an address.
    pub(crate) fn new(token: Rate, enrollment: Rate) -> Self {
        Self {
            token: RefCell::new(ClientLimits::new(token)),
            enrollment: RefCell::new(ClientLimits::new(enrollment)),
            agents: RefCell::new(ClientLimits::new(limits::ENROLLED_REQUESTS)),
        }
    }

    pub(super) fn take(&self, bucket: ApexBucket, now: Instant) -> Result<(), Exhausted> {
        match bucket {
            ApexBucket::Token(client) => self.token.borrow_mut().take(client, now),
            ApexBucket::Enrollment(client) => self.enrollment.borrow_mut().take(client, now),
            ApexBucket::Agent(agent) => self.agents.borrow_mut().take(agent, now),
        }
    }

    /// Serves a charge that another worker posted.
    pub(crate) fn serve(&self, ApexCharge { bucket, reply }: ApexCharge) {
        // Fails when the caller has left.
        let _ = reply.send(self.take(bucket, Instant::now()));
    }
}

impl Apex {
    /// Takes one request out of a bucket, at this node and at the node that owns it.
    pub(super) async fn charge(&self, bucket: ApexBucket) -> Result<(), Error> {
        let mut taken = self.take_here(bucket.clone()).await?;
        if taken.is_ok()
            && let Some(nodes) = &self.other_nodes
        {
            taken = nodes.take(&bucket).await;
        }
        // The time until the bucket is full, not until one request fits: a limited client should
        // come back much later.
        let (client, rate) = match bucket {
            ApexBucket::Token(_) => ("address", self.limits.token.borrow().rate()),
            ApexBucket::Enrollment(_) => ("address", self.limits.enrollment.borrow().rate()),
            ApexBucket::Agent(_) => ("agent", limits::ENROLLED_REQUESTS),
        };
        taken.map_err(|exhausted| Error::ApexRateLimited {
            rate,
            client,
            retry_after: exhausted.until_full,
        })
    }

    /// Takes one request out of the bucket that a worker of this node has.
    async fn take_here(&self, bucket: ApexBucket) -> Result<Result<(), Exhausted>, Error> {
        let owner = bucket.owner(self.workers);
        if owner == self.worker {
            return Ok(self.limits.take(bucket, Instant::now()));
        }
        let (reply, answer) = oneshot::channel();
        let charge = Box::new(ApexCharge { bucket, reply });
        self.mailboxes
            .post(owner, charge)
            .map_err(|_| Error::Overloaded(Overload::QueueFull))?;
        answer
            .await
            .map_err(|_| Error::Overloaded(Overload::Stopping))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_nodes_are_asked_for_the_same_bucket() {
        let client: IpAddr = "2001:db8::7".parse().unwrap();
        let agent = AgentId::random();
        for bucket in [
            ApexBucket::Token(client),
            ApexBucket::Enrollment(client),
            ApexBucket::Agent(agent),
        ] {
            let (kind, name) = bucket.names();
            assert_eq!(ApexBucket::parse(kind, &name), Some(bucket));
        }
        for (kind, name) in [
            ("token", "ag_0123456789abcdefghij"),
            ("agent", "192.0.2.1"),
            ("other", "192.0.2.1"),
        ] {
            assert_eq!(ApexBucket::parse(kind, name), None, "{kind} {name}");
        }
    }
}
