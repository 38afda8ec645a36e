//! Gateway processes that take over from a running one.

use std::net::SocketAddr;

use super::process::{Log, has_ended, send_signal};
use crate::support::{SOON, eventually};

/// A gateway started by its predecessor. It is not a child of this process.
pub(crate) struct Successor(pub(crate) u32);

impl Drop for Successor {
    fn drop(&mut self) {
        send_signal(self.0, "KILL");
    }
}

impl Successor {
    pub(crate) fn has_ended(&self) -> bool {
        has_ended(self.0)
    }

    pub(crate) fn stop(self) {
        assert!(send_signal(self.0, "TERM"));
        eventually("the successor has ended", || self.has_ended().then_some(()));
    }
}

/// Makes a gateway start its successor; returns once the successor serves.
pub(crate) fn replace(id: u32, log: &Log) -> Successor {
    assert!(send_signal(id, "USR2"));
    log.find(|line| {
        assert_ne!(
            line["message"], "not replaced: this process goes on",
            "{line}"
        );
        Some(Successor(
            u32::try_from(line["successor"].as_u64()?).unwrap(),
        ))
    })
}

/// Status and body of a GET for `path` on the admin listener.
pub(crate) fn admin(address: SocketAddr, path: &str) -> (u16, String) {
    let config = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(SOON))
        .build();
    let mut response = ureq::Agent::from(config)
        .get(format!("http://{address}{path}"))
        .call()
        .unwrap();
    (
        response.status().as_u16(),
        response.body_mut().read_to_string().unwrap(),
    )
}
