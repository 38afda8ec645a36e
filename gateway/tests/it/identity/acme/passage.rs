//! The way from the authority to a listener, which a test opens.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use crate::support::SOON;

/// Passes connections of the authority on to the listener that a test chooses. They wait until
/// there is one.
pub(super) struct Passage {
    address: SocketAddr,
    state: Arc<(Mutex<State>, Condvar)>,
}

#[derive(Default)]
struct State {
    target: Option<SocketAddr>,
    /// Connections that have come so far.
    came: usize,
}

impl Passage {
    pub(super) fn closed() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::<(Mutex<State>, Condvar)>::default();
        let known = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let state = Arc::clone(&known);
                thread::spawn(move || serve(client, &state));
            }
        });
        Self { address, state }
    }

    pub(super) fn port(&self) -> u16 {
        self.address.port()
    }

    /// Passes connections on to `target` from now on, also those that wait.
    pub(super) fn lead_to(&self, target: SocketAddr) {
        self.change(|state| state.target = Some(target));
    }

    /// Lets further connections wait.
    pub(super) fn close(&self) {
        self.change(|state| state.target = None);
    }

    /// Connections that have come so far.
    pub(super) fn came(&self) -> usize {
        self.state.0.lock().unwrap().came
    }

    /// Waits for more than `before` connections.
    pub(super) fn await_more_than(&self, before: usize) {
        let state = self.state.0.lock().unwrap();
        let changed = &self.state.1;
        let (_state, timeout) = changed
            .wait_timeout_while(state, SOON, |state| state.came <= before)
            .unwrap();
        assert!(!timeout.timed_out(), "the authority connects");
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.0.lock().unwrap());
        self.state.1.notify_all();
    }
}

fn serve(client: TcpStream, (state, changed): &(Mutex<State>, Condvar)) -> io::Result<()> {
    let mut known = state.lock().unwrap();
    known.came += 1;
    changed.notify_all();
    let known = changed
        .wait_while(known, |known| known.target.is_none())
        .unwrap();
    let server = TcpStream::connect(known.target.unwrap())?;
    drop(known);
    let mut from_server = server.try_clone()?;
    let mut to_client = client.try_clone()?;
    thread::spawn(move || {
        let ended = io::copy(&mut from_server, &mut to_client);
        let _ = to_client.shutdown(Shutdown::Both);
        ended
    });
    let (mut from_client, mut to_server) = (client, server);
    let ended = io::copy(&mut from_client, &mut to_server);
    let _ = to_server.shutdown(Shutdown::Both);
    ended.map(drop)
}
