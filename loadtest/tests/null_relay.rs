//! The relay that `compare` takes as a floor passes all bytes on, in both directions.

#![allow(clippy::unwrap_used, reason = "tests panic on unexpected errors")]

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;

use rustls::{ClientConnection, StreamOwned};

/// More than the buffers of all sockets on the way.
const BYTES: usize = 20_000_000;

struct Relay(Child);

impl Drop for Relay {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Starts the relay before a backend that answers with what it gets. Returns the port for callers.
fn start(arguments: &[&str]) -> (Relay, u16) {
    let backend = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = backend.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for connection in backend.incoming() {
            let mut from = connection.unwrap();
            let mut to = from.try_clone().unwrap();
            thread::spawn(move || io::copy(&mut from, &mut to));
        }
    });
    let mut child = Command::new(env!("CARGO_BIN_EXE_gw-loadtest"))
        .args(["null-relay", "--backend", &address])
        .args(arguments)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    (Relay(child), line.trim().parse().unwrap())
}

fn byte(number: usize) -> u8 {
    (number % 251) as u8
}

/// Sends numbered bytes and compares what comes back.
fn exchange(mut connection: impl Read + Write, length: usize) {
    const CHUNK: usize = 100_000;
    let sent: Vec<u8> = (0..length).map(byte).collect();
    let mut returned = vec![0; CHUNK];
    for chunk in sent.chunks(CHUNK) {
        connection.write_all(chunk).unwrap();
        connection.read_exact(&mut returned[..chunk.len()]).unwrap();
        assert!(returned[..chunk.len()] == *chunk);
    }
}

#[test]
fn plain_bytes_come_back_on_many_connections() {
    let (_relay, port) = start(&[]);
    let callers: Vec<TcpStream> = (0..50)
        .map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap())
        .collect();
    for caller in &callers {
        exchange(caller, 1000);
    }
    // The backend's end of a stream reaches the caller.
    let mut caller = &callers[0];
    exchange(caller, 1000);
    caller.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(caller.read(&mut [0; 8]).unwrap(), 0);
    exchange(&callers[1], 1000);
}

#[test]
fn bytes_wait_for_a_caller_that_reads_late() {
    let (_relay, port) = start(&[]);
    let caller = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut writer = caller.try_clone().unwrap();
    let sender = thread::spawn(move || {
        let sent: Vec<u8> = (0..BYTES).map(byte).collect();
        writer.write_all(&sent).unwrap();
    });
    let mut returned = vec![0; BYTES];
    let mut reader = &caller;
    reader.read_exact(&mut returned).unwrap();
    sender.join().unwrap();
    assert!(
        returned
            .iter()
            .enumerate()
            .all(|(number, it)| *it == byte(number))
    );
}

#[test]
fn both_hops_are_tls_with_a_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let certified = rcgen::generate_simple_self_signed(["relay.test".to_owned()]).unwrap();
    let file = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let certificate = file("certificate", certified.cert.pem());
    let key = file("key", certified.signing_key.serialize_pem());
    let (_relay, port) = start(&[
        "--certificate",
        &certificate,
        "--key",
        &key,
        "--name",
        "relay.test",
    ]);
    let config = gw_bed::tls::client([certified.cert.der().clone()], None, &[]);
    let session =
        ClientConnection::new(Arc::new(config), "relay.test".try_into().unwrap()).unwrap();
    let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    exchange(StreamOwned::new(session, socket), 1_000_000);
}
