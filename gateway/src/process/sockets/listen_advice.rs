//! Advice for an address that cannot be bound.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;

use gw_shared::doctor::holder::Holder;

/// First port that every user may bind, unless net.ipv4.ip_unprivileged_port_start says otherwise.
const UNPRIVILEGED: u16 = 1024;

/// What to do when `address` cannot be bound because of `error`.
pub(crate) fn advice(address: SocketAddr, error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::AddrInUse => in_use(address.port(), Holder::of_port(address)),
        ErrorKind::PermissionDenied if address.port() < UNPRIVILEGED => {
            let program = std::env::current_exe().unwrap_or_default();
            format!(
                "user {} may not bind ports below {UNPRIVILEGED}: set \
                 AmbientCapabilities=CAP_NET_BIND_SERVICE in the unit, run `setcap \
                 cap_net_bind_service=+ep {}`, or configure a port from {UNPRIVILEGED} on",
                rustix::process::geteuid().as_raw(),
                program.display()
            )
        }
        ErrorKind::AddrNotAvailable => {
            "configure an address of this machine (`ip address` lists them), or 0.0.0.0 for all"
                .to_owned()
        }
        _ => "configure another address".to_owned(),
    }
}

fn in_use(port: u16, holder: Option<Holder>) -> String {
    match holder {
        Some(holder) if holder.is_this_process() => {
            "another listener of this configuration has the port: give each its own".to_owned()
        }
        Some(holder) => {
            format!("{holder} listens on port {port}: stop it, or configure another port")
        }
        None => {
            format!(
                "find the process with `ss -ltnp 'sport = :{port}'` as root and stop it, or \
                 configure another port"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_port_is_named_if_it_can_be_seen() {
        let other = Holder {
            id: 1,
            name: "init".to_owned(),
        };
        assert_eq!(
            in_use(443, Some(other)),
            "process 1 (init) listens on port 443: stop it, or configure another port"
        );
        let this = Holder {
            id: std::process::id(),
            name: "gw".to_owned(),
        };
        assert!(in_use(443, Some(this)).starts_with("another listener of this configuration"));
        assert!(in_use(443, None).contains("`ss -ltnp 'sport = :443'`"));
    }

    #[test]
    fn low_ports_need_a_capability() {
        let denied = io::Error::from(ErrorKind::PermissionDenied);
        let low = advice("0.0.0.0:443".parse().unwrap(), &denied);
        assert!(
            low.contains("AmbientCapabilities=CAP_NET_BIND_SERVICE") && low.contains("setcap"),
            "{low}"
        );
        assert_eq!(
            advice("0.0.0.0:8443".parse().unwrap(), &denied),
            "configure another address"
        );
    }
}
