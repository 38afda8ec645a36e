//! Gateway processes that take over from a running one, and a backend with requests that outlast the takeover.

use std::fs;
use std::net::SocketAddr;
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use super::process::{Log, send_signal};
use super::{SOON, backend, eventually};

/// A gateway started by its predecessor. It is not a child of this process.
pub(crate) struct Successor(pub(crate) u32);

impl Drop for Successor {
    fn drop(&mut self) {
        send_signal(self.0, "KILL");
    }
}

impl Successor {
    pub(crate) fn has_ended(&self) -> bool {
        // The process that adopts it may leave it a zombie.
        fs::read_to_string(format!("/proc/{}/stat", self.0)).map_or(true, |stat| stat.contains(") Z "))
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
        assert_ne!(line["message"], "not replaced: this process goes on", "{line}");
        Some(Successor(u32::try_from(line["successor"].as_u64()?).unwrap()))
    })
}

/// Starts a backend that answers `/held` once released, `/slow` after 40 ms, and other requests at once. Returns its
/// URL and the sender that releases.
pub(crate) fn start_backend() -> (String, mpsc::Sender<()>) {
    let (release, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    let url = backend::start(move |mut peer| {
        while let Ok((head, body, _)) = peer.request() {
            match head.target.path() {
                "/held" => held.lock().unwrap().recv_timeout(SOON).unwrap(),
                "/slow" => thread::sleep(Duration::from_millis(40)),
                _ => {}
            }
            peer.send(format!("HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{:08}", body.len()));
        }
    });
    (url, release)
}

/// Status and body of a GET for `path` on the admin listener.
pub(crate) fn admin(address: SocketAddr, path: &str) -> (u16, String) {
    let config = ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(SOON)).build();
    let mut response = ureq::Agent::from(config).get(format!("http://{address}{path}")).call().unwrap();
    (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
}
