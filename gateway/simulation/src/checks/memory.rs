//! Memory: what is held is charged, and what is charged has a limit.

use super::resources::probes;
use super::{Checked, violated};
use crate::world::World;

/// Charges do not exceed the limit, and cover what the tunnels hold.
pub(super) fn charges_stay_within_limits(world: &World) -> Checked {
    for (name, probe) in probes(world) {
        if probe.relay_bytes > probe.relay_limit {
            let found = format!(
                "{name}: {} of {} bytes",
                probe.relay_bytes, probe.relay_limit
            );
            return violated("charged bytes stay within the limit", found);
        }
        let accounts: usize = probe.relay_bytes_of_accounts.values().sum();
        if accounts > probe.relay_bytes {
            let found = format!(
                "{name}: {accounts} bytes of accounts, {} in all",
                probe.relay_bytes
            );
            return violated("charges of accounts add up", found);
        }
    }
    Ok(())
}

/// All charges are given back.
pub(super) fn nothing_is_charged(world: &World) -> Checked {
    for (name, probe) in probes(world) {
        if probe.relay_bytes > 0 {
            return violated(
                "all memory is given back",
                format!("{name}: {} bytes", probe.relay_bytes),
            );
        }
    }
    Ok(())
}
