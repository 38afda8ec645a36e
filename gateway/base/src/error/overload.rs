//! Reasons for which the gateway has no room or no time for a request.

use gw_shared::error_code::ErrorCode;
use http::StatusCode;

/// What the response to a request says.
pub(super) struct Terms {
    pub(super) status: StatusCode,
    pub(super) code: ErrorCode,
    /// Also the text between nodes, which nodes of the previous version know.
    text: &'static str,
    /// Seconds of `Retry-After`.
    pub(super) retry_after: u64,
    /// Whether the owner of a service answers the node of the caller with this reason.
    is_of_owner: bool,
}

const fn unavailable(text: &'static str) -> Terms {
    let status = StatusCode::SERVICE_UNAVAILABLE;
    let code = ErrorCode::Overloaded;
    Terms {
        status,
        code,
        text,
        retry_after: 1,
        is_of_owner: false,
    }
}

const fn of_owner(text: &'static str) -> Terms {
    Terms {
        is_of_owner: true,
        ..unavailable(text)
    }
}

/// Defines [`Overload`] with the terms of each reason beside its name.
macro_rules! reasons {
    ($($(#[$attribute:meta])* $name:ident => $terms:expr,)*) => {
        /// Reason for which the gateway has no room or no time for a request.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Overload {
            $($(#[$attribute])* $name,)*
        }

        impl Overload {
            /// All reasons, in the order of their declaration.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            pub(super) const fn terms(self) -> Terms {
                match self {
                    $(Self::$name => $terms,)*
                }
            }
        }
    };
}

reasons! {
    /// A queue between workers, between nodes, or to the control plane is full.
    QueueFull => of_owner("overloaded"),
    /// The process drains and accepts no further requests.
    Draining => of_owner("draining"),
    /// Relayed requests of all accounts hold the memory that the worker has for them.
    RelayMemory => of_owner("at its limit of relayed requests"),
    /// Relayed requests of this account hold its share of that memory.
    AccountMemory => of_owner("at this account's limit of relayed requests"),
    /// The agent has not read the requests that were sent on its tunnel.
    AgentDoesNotRead => of_owner("waiting for the agent of this service to read requests"),
    /// The worker that decides has stopped.
    Stopping => unavailable("stopping"),
    /// A newer process has taken over the records.
    HandedOver => unavailable("being replaced by a newer process"),
    /// The control plane has dropped the job.
    JobDropped => unavailable("not able to do this now"),
    /// The control plane failed to do the job, for example because the store does not answer.
    NotStored => unavailable("not able to store this now"),
    /// The worker admits tunnels at the highest rate that it allows
    /// ([`crate::limits::ADMITTED_TUNNELS`]).
    Admissions => unavailable("admitting as many tunnels as it can"),
    /// The table of rates of new tunnels is full ([`crate::limits::TUNNEL_BUCKETS`]).
    Openings => unavailable("opening too many tunnels"),
    /// The worker sends the highest number of programs ([`crate::limits::PROGRAM_DOWNLOADS`]).
    Programs => unavailable("sending programs to other agents"),
    /// An agent gets 2 certificates a minute once its burst is used up.
    Certificates => Terms { retry_after: 30, ..unavailable("asked for certificates too often") },
}

impl Overload {
    /// Continues "the gateway is".
    pub const fn as_str(self) -> &'static str {
        self.terms().text
    }

    /// The reason with which the owner of a service answered. A reason of a later version counts as
    /// a full queue.
    pub fn from_owner(text: &str) -> Self {
        Self::of_owners()
            .find(|reason| reason.as_str() == text)
            .unwrap_or(Self::QueueFull)
    }

    /// Reasons that the owner of a service can have.
    pub fn of_owners() -> impl Iterator<Item = Self> {
        Self::ALL
            .iter()
            .copied()
            .filter(|reason| reason.terms().is_of_owner)
    }
}

impl std::fmt::Display for Overload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_texts_between_nodes_stay_what_the_previous_version_knows() {
        let texts: Vec<_> = Overload::of_owners().map(Overload::as_str).collect();
        let previous = [
            "overloaded",
            "draining",
            "at its limit of relayed requests",
            "at this account's limit of relayed requests",
            "waiting for the agent of this service to read requests",
        ];
        assert!(
            previous.iter().all(|text| texts.contains(text)),
            "{texts:?}"
        );
        assert_eq!(
            Overload::from_owner("a reason of a later version"),
            Overload::QueueFull
        );
        assert_eq!(
            Overload::from_owner(Overload::Openings.as_str()),
            Overload::QueueFull,
            "no reason of an owner"
        );
    }

    #[test]
    fn every_text_is_unique() {
        let texts: HashSet<_> = Overload::ALL.iter().map(|reason| reason.as_str()).collect();
        assert_eq!(texts.len(), Overload::ALL.len());
    }
}
