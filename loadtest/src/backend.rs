//! A backend that remembers the ids of its requests.

use std::collections::HashSet;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Requests that the backend has received.
#[derive(Clone, Default)]
pub(crate) struct Received {
    ids: Arc<Mutex<HashSet<String>>>,
    twice: Arc<AtomicUsize>,
}

impl Received {
    /// Starts a backend on a port chosen by the kernel, until this process ends. Returns its URL.
    pub(crate) fn start(&self) -> io::Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let url = format!("http://{}", listener.local_addr()?);
        let received = self.clone();
        std::thread::Builder::new().name("backend".into()).spawn(move || {
            for socket in listener.incoming().flatten() {
                let received = received.clone();
                // A connection that ends is ignored: the caller sees the failure.
                let _ = std::thread::Builder::new().name("backend".into()).spawn(move || received.serve(socket));
            }
        })?;
        Ok(url)
    }

    /// Answers requests without bodies.
    fn serve(&self, mut socket: TcpStream) -> io::Result<()> {
        let mut lines = BufReader::new(socket.try_clone()?);
        let mut id = String::new();
        loop {
            let mut line = String::new();
            if lines.read_line(&mut line)? == 0 {
                return Ok(());
            }
            match line.trim_end().split_once(':') {
                Some((name, value)) if name.eq_ignore_ascii_case("x-gw-request-id") => value.trim().clone_into(&mut id),
                None if line == "\r\n" => {
                    self.note(std::mem::take(&mut id));
                    socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")?;
                }
                _ => {}
            }
        }
    }

    fn note(&self, id: String) {
        let is_new = self.ids.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
        if !is_new {
            self.twice.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Requests whose id had arrived before.
    pub(crate) fn twice(&self) -> usize {
        self.twice.load(Ordering::Relaxed)
    }
}
