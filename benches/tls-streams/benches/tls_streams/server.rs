//! The process of a server.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gw_shared::net::TlsStream;
use gw_shared::runtime::{self, Driver};
use rustix::time::{ClockId, clock_gettime};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::streams::{MonoioRustls, Stream, Style};

/// Fraction of the messages before the measurement, in which buffers grow and caches fill.
const WARM_UP: usize = 10;
/// Buffer of the caller while connections are idle, for streams that need one to read.
const IDLE_ROOM: usize = 1024;
/// Time after which a future that waits is dropped.
const DROPPED_AFTER: Duration = Duration::from_millis(50);
/// Bytes of one write in the test of dropped futures.
const PIECE: usize = 64 * 1024;

/// Serves what the arguments say: style, mode, connections, bytes of a message, messages. Reads
/// certificate and key from standard input, and prints the port.
pub(crate) fn run(arguments: &[String]) {
    let mut pem = String::new();
    io::stdin().read_to_string(&mut pem).unwrap();
    let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).unwrap();
    let config = gw_bed::tls::server((certificate, key), &[]);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    say(&listener.local_addr().unwrap().port().to_string());

    let numbers: Vec<usize> = arguments[2..]
        .iter()
        .map(|number| number.parse().unwrap())
        .collect();
    let job = Job {
        listener,
        config: Arc::new(config),
        mode: arguments[1].clone(),
        connections: numbers[0],
        message: numbers[1],
        messages: numbers[2],
    };
    let style = Style::ALL
        .into_iter()
        .find(|style| style.name() == arguments[0]);
    match style.unwrap() {
        Style::Gw => job.run::<TlsStream>(),
        Style::Buffered => job.run::<MonoioRustls<false>>(),
        Style::UnsafeIo => job.run::<MonoioRustls<true>>(),
    }
}

/// Prints a line for the client's process.
fn say(line: &str) {
    println!("{line}");
    io::stdout().flush().unwrap();
}

struct Job {
    listener: TcpListener,
    config: Arc<ServerConfig>,
    mode: String,
    connections: usize,
    message: usize,
    messages: usize,
}

impl Job {
    fn run<S: Stream>(self) {
        let driver = Driver::choose().unwrap();
        match self.mode.as_str() {
            "busy" => {
                let room = self.message;
                let cost = driver.block_on(self.echo::<S>(room)).unwrap();
                say(&(cost.as_secs_f64() * 1e6).to_string());
            }
            "idle" => drop(driver.block_on(self.echo::<S>(IDLE_ROOM)).unwrap()),
            "dropped-read" => driver.block_on(self.drop_read::<S>()).unwrap(),
            "dropped-write" => driver.block_on(self.drop_write::<S>()).unwrap(),
            mode => panic!("unknown mode {mode}"),
        }
    }

    /// Echoes on all connections until they end. Returns the CPU time per message.
    async fn echo<S: Stream>(self, room: usize) -> Duration {
        let meter = Rc::new(Meter::new(self.message * self.messages));
        let listener = monoio::net::TcpListener::from_std(self.listener).unwrap();
        let mut echoes = Vec::new();
        for _ in 0..self.connections {
            let (tcp, _) = listener.accept().await.unwrap();
            let config = Arc::clone(&self.config);
            let meter = Rc::clone(&meter);
            echoes.push(monoio::spawn(async move {
                let mut stream = S::accept(tcp, config, room).await.unwrap();
                // A client that disconnects ends its echo, with or without an error.
                while let Ok(echoed @ 1..) = stream.echo().await {
                    meter.count(echoed);
                }
            }));
        }
        for echo in echoes {
            echo.await;
        }
        let measured = self.messages - self.messages / WARM_UP;
        meter.spent().div_f64(measured.max(1) as f64)
    }

    /// Drops a read that waits, then echoes.
    async fn drop_read<S: Stream>(self) {
        let mut stream = self.accept_one::<S>().await;
        let read = runtime::timeout(DROPPED_AFTER, stream.echo()).await;
        assert!(read.is_err(), "nothing was sent");
        say("dropped");
        while let Ok(1..) = stream.echo().await {}
    }

    /// Writes the bytes of [`pattern`], and drops a write that waits. The next write is of the same
    /// bytes.
    async fn drop_write<S: Stream>(self) {
        let mut stream = self.accept_one::<S>().await;
        let bytes = pattern(self.message);
        let mut written = 0;
        while written < bytes.len() {
            let piece = &bytes[written..bytes.len().min(written + PIECE)];
            match runtime::timeout(DROPPED_AFTER, stream.write(piece)).await {
                Ok(taken) => written += taken.unwrap(),
                Err(_) => say("dropped"),
            }
        }
        stream.close().await.unwrap();
    }

    async fn accept_one<S: Stream>(&self) -> S {
        let listener = self.listener.try_clone().unwrap();
        let listener = monoio::net::TcpListener::from_std(listener).unwrap();
        let (tcp, _) = listener.accept().await.unwrap();
        S::accept(tcp, Arc::clone(&self.config), PIECE)
            .await
            .unwrap()
    }
}

/// Bytes in a pattern that shows a change of their order.
pub(crate) fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 31 % 251) as u8).collect()
}

/// Reads the CPU time of the thread, of process and kernel, after the warm-up and after the last
/// echo.
struct Meter {
    bytes: usize,
    echoed: Cell<usize>,
    start: Cell<Duration>,
    end: Cell<Duration>,
}

impl Meter {
    fn new(bytes: usize) -> Self {
        Self {
            bytes,
            echoed: Cell::new(0),
            start: Cell::default(),
            end: Cell::default(),
        }
    }

    fn count(&self, bytes: usize) {
        let before = self.echoed.get();
        let now = before + bytes;
        self.echoed.set(now);
        let passes = |mark: usize| before < mark && mark <= now;
        if passes(self.bytes / WARM_UP) {
            self.start.set(thread_time());
        }
        if passes(self.bytes) {
            self.end.set(thread_time());
        }
    }

    fn spent(&self) -> Duration {
        self.end.get() - self.start.get()
    }
}

fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap()
}
