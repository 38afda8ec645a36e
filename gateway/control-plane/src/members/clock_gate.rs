//! Holds a node back from owning services while its clock is wrong.

use gw_base::clock::{ClockDifference, DIFFERENCE_MAX};

/// Opens once, when the clock of the machine agrees with that of PostgreSQL. A node that owns
/// services keeps them when the clock is set to a wrong time later: it follows PostgreSQL's.
#[derive(Default)]
pub(super) struct ClockGate {
    is_open: bool,
    has_refused: bool,
}

impl ClockGate {
    /// Whether the gate opens now. `difference` is `None` until the clocks were compared.
    pub(super) fn opens(&mut self, difference: Option<ClockDifference>) -> bool {
        let Some(difference) = difference.filter(|_| !self.is_open) else {
            return false;
        };
        if difference.is_allowed() {
            if self.has_refused {
                tracing::info!("the clock of this machine is right: this node joins the region");
            }
            self.is_open = true;
        } else if !std::mem::replace(&mut self.has_refused, true) {
            tracing::error!(
                "this node does not join the region: {difference}; {} s are allowed. Set the clock \
                 that is wrong, and synchronise both with NTP: this node joins once they agree",
                DIFFERENCE_MAX.as_secs()
            );
        }
        self.is_open
    }
}
