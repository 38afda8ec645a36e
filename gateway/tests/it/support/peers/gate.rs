//! A TCP connection between two programs that a test can interrupt, and whose TLS handshake it can
//! look at.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};

use rustls::NamedGroup;

/// What a gate does with connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passage {
    Open,
    /// Bytes wait, as if packets were lost.
    Stalled,
}

/// Where a gate leads.
#[derive(Clone)]
pub(crate) enum Target {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// Passes connections on to a target.
pub(crate) struct Gate {
    pub(crate) address: SocketAddr,
    known: Arc<Known>,
}

/// Most bytes of a server that are kept: those of a ServerHello.
const BEGINNING: usize = 2048;

/// What all connections of a gate share.
struct Known {
    passage: (Mutex<Passage>, Condvar),
    /// The first bytes of the server on each connection.
    beginnings: Mutex<Vec<Vec<u8>>>,
}

impl Gate {
    pub(crate) fn to(target: Target) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let known = Arc::new(Known {
            passage: (Mutex::new(Passage::Open), Condvar::new()),
            beginnings: Mutex::default(),
        });
        let shared = Arc::clone(&known);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let target = target.clone();
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || serve(client, &target, &shared));
            }
        });
        Self { address, known }
    }

    pub(crate) fn set(&self, passage: Passage) {
        *self.known.passage.0.lock().unwrap() = passage;
        self.known.passage.1.notify_all();
    }

    /// The key exchange of each connection whose server has begun a handshake of TLS 1.3.
    pub(crate) fn key_exchanges(&self) -> Vec<NamedGroup> {
        let beginnings = self.known.beginnings.lock().unwrap();
        beginnings
            .iter()
            .filter_map(|beginning| key_share(beginning))
            .collect()
    }
}

/// The group of the key share in a ServerHello (RFC 8446 §4.1.3, §4.2.8); `None` for other bytes
/// and for a HelloRetryRequest, which has a group and no key.
fn key_share(beginning: &[u8]) -> Option<NamedGroup> {
    const HANDSHAKE: u8 = 22;
    const SERVER_HELLO: u8 = 2;
    const KEY_SHARE: u16 = 51;
    let number = |bytes: &[u8]| u16::from_be_bytes([bytes[0], bytes[1]]);
    if *beginning.first()? != HANDSHAKE || *beginning.get(5)? != SERVER_HELLO {
        return None;
    }
    // Headers of record and message, version and random number are before the session id.
    let session_id = 5 + 4 + 2 + 32;
    // Cipher suite, compression method and the length of the extensions follow it.
    let at = session_id + 1 + usize::from(*beginning.get(session_id)?) + 2 + 1 + 2;
    let mut extensions = beginning.get(at..)?;
    while extensions.len() > 8 {
        let length = usize::from(number(&extensions[2..]));
        if number(extensions) == KEY_SHARE {
            return (length > 2).then(|| number(&extensions[4..]).into());
        }
        extensions = extensions.get(4 + length..)?;
    }
    None
}

fn wait_until_open((passage, changed): &(Mutex<Passage>, Condvar)) {
    let passage = passage.lock().unwrap();
    drop(
        changed
            .wait_while(passage, |passage| *passage == Passage::Stalled)
            .unwrap(),
    );
}

fn serve(client: TcpStream, target: &Target, known: &Arc<Known>) -> io::Result<()> {
    wait_until_open(&known.passage);
    client.set_nodelay(true)?;
    match target {
        Target::Tcp(address) => {
            let server = TcpStream::connect(address)?;
            server.set_nodelay(true)?;
            let from = server.try_clone()?;
            let to = server.try_clone()?;
            carry_both(
                client,
                from,
                to,
                move || server.shutdown(Shutdown::Both),
                known,
            )
        }
        Target::Unix(path) => {
            let server = UnixStream::connect(path)?;
            let from = server.try_clone()?;
            let to = server.try_clone()?;
            carry_both(
                client,
                from,
                to,
                move || server.shutdown(Shutdown::Both),
                known,
            )
        }
    }
}

fn carry_both(
    client: TcpStream,
    mut from_server: impl Read + Send + 'static,
    mut to_server: impl Write,
    close_server: impl Fn() -> io::Result<()>,
    known: &Arc<Known>,
) -> io::Result<()> {
    let mut from_client = client.try_clone()?;
    let mut to_client = client;
    let shared = Arc::clone(known);
    let connection = {
        let mut beginnings = known.beginnings.lock().unwrap();
        beginnings.push(Vec::new());
        beginnings.len() - 1
    };
    let keep = move |received: &[u8]| {
        let mut beginnings = shared.beginnings.lock().unwrap();
        let beginning = &mut beginnings[connection];
        let room = BEGINNING - beginning.len();
        beginning.extend_from_slice(&received[..received.len().min(room)]);
    };
    let shared = Arc::clone(known);
    std::thread::spawn(move || {
        let ended = carry(&mut from_server, &mut to_client, &shared.passage, keep);
        let _ = to_client.shutdown(Shutdown::Both);
        ended
    });
    let ended = carry(&mut from_client, &mut to_server, &known.passage, |_| ());
    close_server()?;
    ended
}

fn carry(
    from: &mut impl Read,
    to: &mut impl Write,
    passage: &(Mutex<Passage>, Condvar),
    keep: impl Fn(&[u8]),
) -> io::Result<()> {
    let mut buffer = [0; 16 * 1024];
    loop {
        let received = from.read(&mut buffer)?;
        wait_until_open(passage);
        if received == 0 {
            return Ok(());
        }
        keep(&buffer[..received]);
        to.write_all(&buffer[..received])?;
    }
}
