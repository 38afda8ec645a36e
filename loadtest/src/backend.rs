//! Backends in this process that remember the ids of their requests.

use std::collections::HashSet;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use gw_bed::http1::{self, Head};
use gw_bed::threads::{Peer, listen};
use socket2::{Domain, Socket, Type};

const BACKLOG: i32 = 1024;

/// Requests that backends have received.
#[derive(Clone, Default)]
pub(crate) struct Received {
    seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
struct Seen {
    ids: HashSet<String>,
    posts: usize,
    posts_twice: usize,
}

/// A running backend, until this process ends.
pub(crate) struct Backend {
    pub(crate) url: String,
    requests: Arc<AtomicUsize>,
}

/// A port on which no program listens: connections are refused.
pub(crate) struct Refusing {
    socket: Socket,
    address: SocketAddr,
}

/// What a backend does with each request.
struct Service {
    received: Received,
    requests: Arc<AtomicUsize>,
    delay: Duration,
    answer: Arc<str>,
}

impl Refusing {
    pub(crate) fn new() -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        let address = address_of(&socket)?;
        Ok(Self { socket, address })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Starts a backend on the port, which answers `answer` after `delay`.
    pub(crate) fn listen(
        self,
        received: &Received,
        delay: Duration,
        answer: &str,
    ) -> io::Result<Backend> {
        let url = self.url();
        self.socket.listen(BACKLOG)?;
        let listener = TcpListener::from(self.socket);
        let requests = Arc::<AtomicUsize>::default();
        let received = received.clone();
        let service = Service {
            received,
            requests: Arc::clone(&requests),
            delay,
            answer: answer.into(),
        };
        // A connection that ends is ignored: the caller sees the failure.
        listen(listener, move |socket| drop(service.serve(socket)));
        Ok(Backend { url, requests })
    }
}

fn address_of(socket: &Socket) -> io::Result<SocketAddr> {
    socket
        .local_addr()?
        .as_socket()
        .ok_or_else(|| io::ErrorKind::Unsupported.into())
}

impl Backend {
    /// Requests that this backend has received.
    pub(crate) fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }
}

impl Service {
    fn serve(&self, socket: TcpStream) -> io::Result<()> {
        socket.set_nodelay(true)?;
        let response = http1::ok(self.answer.as_bytes());
        let mut peer = Peer::new(socket);
        loop {
            let head = Head::request(&peer.raw_head()?)?;
            self.requests.fetch_add(1, Ordering::Relaxed);
            let id = head.field("x-gw-request-id").unwrap_or_default();
            self.received.note(id.to_owned(), head.method == "POST");
            let length = head.content_length()?.unwrap_or(0);
            peer.bytes(length as usize)?;
            if !self.delay.is_zero() {
                std::thread::sleep(self.delay);
            }
            peer.try_send(&response)?;
        }
    }
}

impl Received {
    /// Starts a backend on a port chosen by the kernel. Returns its URL.
    pub(crate) fn start(&self) -> io::Result<String> {
        Ok(self.backend(Duration::ZERO, "ok")?.url)
    }

    /// Starts a backend that answers `answer` after `delay`.
    pub(crate) fn backend(&self, delay: Duration, answer: &str) -> io::Result<Backend> {
        Refusing::new()?.listen(self, delay, answer)
    }

    fn note(&self, id: String, is_post: bool) {
        let mut seen = self.seen();
        let is_new = seen.ids.insert(id);
        match (is_new, is_post) {
            (true, true) => seen.posts += 1,
            (true, false) => {}
            (false, _) => seen.posts_twice += usize::from(is_post),
        }
    }

    /// POST requests, and those among them whose id had arrived before.
    pub(crate) fn posts(&self) -> (usize, usize) {
        let seen = self.seen();
        (seen.posts + seen.posts_twice, seen.posts_twice)
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    #[test]
    fn repeated_requests_are_counted() {
        let received = Received::default();
        for (id, is_post) in [
            ("1", true),
            ("2", false),
            ("1", true),
            ("2", false),
            ("3", true),
        ] {
            received.note(id.to_owned(), is_post);
        }
        assert_eq!(received.posts(), (3, 1));
    }

    #[test]
    fn a_port_refuses_until_a_backend_listens() {
        let connect =
            |address: SocketAddr| TcpStream::connect_timeout(&address, Duration::from_millis(100));
        let refusing = Refusing::new().unwrap();
        let address = refusing.address;
        assert_eq!(
            connect(address).unwrap_err().kind(),
            ErrorKind::ConnectionRefused
        );
        let _backend = refusing
            .listen(&Received::default(), Duration::ZERO, "ok")
            .unwrap();
        assert!(connect(address).is_ok());
    }
}
