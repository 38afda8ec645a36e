//! Backends that do what a test says.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use crate::SOON;
use crate::http::Peer;

/// Starts a backend that gives every connection to `serve`, each on its own thread. Returns its URL.
pub(crate) fn start(serve: impl Fn(Peer<TcpStream>) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for connection in listener.incoming() {
            let (connection, serve) = (connection.unwrap(), Arc::clone(&serve));
            connection.set_nodelay(true).unwrap();
            connection.set_read_timeout(Some(SOON)).unwrap();
            thread::spawn(move || serve(Peer::new(connection)));
        }
    });
    url
}

/// Starts a backend that answers every request with the same bytes.
pub(crate) fn answering(response: &'static str) -> String {
    start(move |mut peer| {
        while peer.request().is_ok() {
            peer.send(response);
        }
    })
}
