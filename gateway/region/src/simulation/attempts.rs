//! Attempts of the modelled ingress.

/// Attempts of an ingress node to reach the owner of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OwnerAttempts {
    retries_left: u8,
}

/// What the ingress does after another node answered that it is not the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Retry {
    /// The other node knows a later epoch: report it as `MembershipEvent::Hint`, decide again once
    /// the view has it.
    AfterEpoch(u64),
    /// The other node has an earlier view: decide again after a short pause.
    AfterPause,
    /// Answer the caller 503 with `Retry-After`.
    GiveUp,
}

impl OwnerAttempts {
    /// Most attempts after the first.
    pub(super) const RETRIES_MAX: u8 = 2;

    /// Attempts with [`Self::RETRIES_MAX`] retries left.
    pub(super) fn new() -> Self {
        Self {
            retries_left: Self::RETRIES_MAX,
        }
    }

    /// Another node answered that it is not the owner at `theirs`; the request was forwarded at
    /// epoch `ours`.
    pub(super) fn not_owner(&mut self, ours: u64, theirs: u64) -> Retry {
        let Some(left) = self.retries_left.checked_sub(1) else {
            return Retry::GiveUp;
        };
        self.retries_left = left;
        if theirs > ours {
            Retry::AfterEpoch(theirs)
        } else {
            Retry::AfterPause
        }
    }
}
