//! The service of systemd, which may do more than the user that runs `doctor`.

use std::process::{Command, Stdio};

const UNIT: &str = "gw-gateway.service";

/// Whether the unit lets the gateway bind ports below 1024. `false` where systemd does not run.
pub(super) fn may_bind_low_ports() -> bool {
    let asked = Command::new("systemctl")
        .args(["show", "--property=AmbientCapabilities", UNIT])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    asked.is_ok_and(|answer| grants_low_ports(&String::from_utf8_lossy(&answer.stdout)))
}

/// Whether an answer of `systemctl show` has the capability. The answer for a unit that does not exist has none.
fn grants_low_ports(answer: &str) -> bool {
    answer
        .lines()
        .filter_map(|line| line.strip_prefix("AmbientCapabilities="))
        .any(|granted| {
            granted
                .split_whitespace()
                .any(|capability| capability.eq_ignore_ascii_case("cap_net_bind_service"))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_capability_is_found_in_the_answer_of_systemctl() {
        for (answer, expected) in [
            ("AmbientCapabilities=cap_net_bind_service\n", true),
            ("AmbientCapabilities=cap_chown cap_net_bind_service\n", true),
            ("AmbientCapabilities=\n", false),
            ("CapabilityBoundingSet=cap_net_bind_service\n", false),
            ("", false),
        ] {
            assert_eq!(grants_low_ports(answer), expected, "{answer}");
        }
    }
}
