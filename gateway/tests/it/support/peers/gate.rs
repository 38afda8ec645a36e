//! A TCP connection between two programs that a test can interrupt.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};

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
    passage: Arc<(Mutex<Passage>, Condvar)>,
}

impl Gate {
    pub(crate) fn to(target: Target) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let passage = Arc::new((Mutex::new(Passage::Open), Condvar::new()));
        let known = Arc::clone(&passage);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let target = target.clone();
                let passage = Arc::clone(&known);
                std::thread::spawn(move || serve(client, &target, &passage));
            }
        });
        Self { address, passage }
    }

    pub(crate) fn set(&self, passage: Passage) {
        *self.passage.0.lock().unwrap() = passage;
        self.passage.1.notify_all();
    }
}

fn wait_until_open((passage, changed): &(Mutex<Passage>, Condvar)) {
    let passage = passage.lock().unwrap();
    drop(
        changed
            .wait_while(passage, |passage| *passage == Passage::Stalled)
            .unwrap(),
    );
}

fn serve(
    client: TcpStream,
    target: &Target,
    passage: &Arc<(Mutex<Passage>, Condvar)>,
) -> io::Result<()> {
    wait_until_open(passage);
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
                passage,
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
                passage,
            )
        }
    }
}

fn carry_both(
    client: TcpStream,
    mut from_server: impl Read + Send + 'static,
    mut to_server: impl Write,
    close_server: impl Fn() -> io::Result<()>,
    passage: &Arc<(Mutex<Passage>, Condvar)>,
) -> io::Result<()> {
    let mut from_client = client.try_clone()?;
    let mut to_client = client;
    let known = Arc::clone(passage);
    std::thread::spawn(move || {
        let ended = carry(&mut from_server, &mut to_client, &known);
        let _ = to_client.shutdown(Shutdown::Both);
        ended
    });
    let ended = carry(&mut from_client, &mut to_server, passage);
    close_server()?;
    ended
}

fn carry(
    from: &mut impl Read,
    to: &mut impl Write,
    passage: &(Mutex<Passage>, Condvar),
) -> io::Result<()> {
    let mut buffer = [0; 16 * 1024];
    loop {
        let received = from.read(&mut buffer)?;
        wait_until_open(passage);
        if received == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..received])?;
    }
}
