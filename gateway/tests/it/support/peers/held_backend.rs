//! A backend that holds requests until the test releases them.

use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::backend;
use crate::support::SOON;

/// A backend that answers `/held` once released, `/slow` after 40 ms, and other requests at once. The body of a response
/// is the length of the request body in eight digits.
pub(crate) struct HeldBackend {
    pub(crate) url: String,
    arrivals: Receiver<()>,
    releases: Sender<()>,
}

impl HeldBackend {
    pub(crate) fn start() -> Self {
        let (arrived, arrivals) = mpsc::channel();
        let (releases, released) = mpsc::channel();
        let released = Mutex::new(released);
        let url = backend::start(move |mut peer| {
            while let Ok((head, body, _)) = peer.request() {
                match head.target.path() {
                    "/held" => {
                        // Fails when the test has ended.
                        let _ = arrived.send(());
                        let _ = released
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .recv_timeout(SOON);
                    }
                    "/slow" => thread::sleep(Duration::from_millis(40)),
                    _ => {}
                }
                peer.send(format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{:08}",
                    body.len()
                ));
            }
        });
        Self {
            url,
            arrivals,
            releases,
        }
    }

    /// Waits until a request for `/held` has reached the backend.
    pub(crate) fn wait_for_held(&self) {
        self.arrivals.recv_timeout(SOON).unwrap();
    }

    /// Answers one request for `/held`.
    pub(crate) fn release(&self) {
        self.releases.send(()).unwrap();
    }
}
