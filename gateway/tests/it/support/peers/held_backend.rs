//! A backend that holds requests until the test releases them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::backend;
use crate::support::SOON;

/// A backend that answers `/held` once released, `/slow` after 40 ms, and other requests at once.
/// The body of a response is the length of the request body in eight digits. The response to
/// `/early` begins before the request body is received.
pub(crate) struct HeldBackend {
    pub(crate) url: String,
    arrivals: Receiver<()>,
    releases: Sender<()>,
    requests: Arc<AtomicUsize>,
}

impl HeldBackend {
    pub(crate) fn start() -> Self {
        let (arrived, arrivals) = mpsc::channel();
        let (releases, released) = mpsc::channel();
        let released = Mutex::new(released);
        let requests = Arc::new(AtomicUsize::new(0));
        let received = Arc::clone(&requests);
        let url = backend::start(move |mut peer| {
            const HEAD: &str = "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n";
            while let Ok(head) = peer.request_head() {
                let is_early = head.target.path() == "/early";
                if is_early {
                    peer.send(HEAD);
                }
                let Ok((body, _)) = peer.body(head.framing) else {
                    return;
                };
                received.fetch_add(1, Ordering::SeqCst);
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
                let begun = if is_early { "" } else { HEAD };
                peer.send(format!("{begun}{:08}", body.len()));
            }
        });
        Self {
            url,
            arrivals,
            releases,
            requests,
        }
    }

    /// Number of requests that have arrived.
    pub(crate) fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
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
