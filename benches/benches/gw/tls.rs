//! The TLS stream, with both ends on one reactor over loopback TCP. One iteration is one message
//! from end to end: encryption, decryption, and the system calls of both ends.

use std::io::IoSlice;
use std::net::{Ipv4Addr, TcpListener};
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use gw_shared::net::{Socket, TlsStream};
use gw_shared::runtime::{self, Driver};
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::server::UnbufferedServerConnection;

const SMALL: usize = 100;
const LARGE: usize = 64 * 1024;

pub(crate) fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("tls");
    let reactor = Reactor::start();
    for (name, size) in [("100 B", SMALL), ("64 KiB", LARGE)] {
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_function(format!("one way, {name}"), |bencher| {
            bencher.iter_custom(|messages| {
                reactor.run(Job {
                    size,
                    messages,
                    echo: false,
                })
            });
        });
        group.bench_function(format!("there and back, {name}"), |bencher| {
            bencher.iter_custom(|messages| {
                reactor.run(Job {
                    size,
                    messages,
                    echo: true,
                })
            });
        });
    }
    group.finish();
}

#[derive(Clone, Copy)]
struct Job {
    size: usize,
    messages: u64,
    /// Whether each message is echoed before the next one is sent.
    echo: bool,
}

/// A thread with a reactor and a pair of connected streams.
struct Reactor {
    jobs: mpsc::Sender<Job>,
    times: mpsc::Receiver<Duration>,
}

impl Reactor {
    fn start() -> Self {
        let (jobs, work) = mpsc::channel::<Job>();
        let (done, times) = mpsc::channel();
        std::thread::spawn(move || {
            let serve = async move {
                let (client, server) = connect().await;
                // Blocks the reactor between jobs, because nothing else runs on it.
                while let Ok(job) = work.recv() {
                    let start = Instant::now();
                    run(job, Rc::clone(&client), Rc::clone(&server)).await;
                    done.send(start.elapsed()).unwrap();
                }
            };
            Driver::choose().unwrap().block_on(serve).unwrap();
        });
        Self { jobs, times }
    }

    fn run(&self, job: Job) -> Duration {
        self.jobs.send(job).unwrap();
        self.times.recv_timeout(Duration::from_secs(60)).unwrap()
    }
}

async fn run(job: Job, client: Rc<TlsStream>, server: Rc<TlsStream>) {
    runtime::spawn(async move {
        let mut message = vec![0; job.size];
        for _ in 0..job.messages {
            read_exact(&server, &mut message).await;
            if job.echo {
                write(&server, &message).await;
            }
        }
        write(&server, DONE).await;
    });
    let message = vec![1; job.size];
    let mut echo = vec![0; job.size];
    for _ in 0..job.messages {
        write(&client, &message).await;
        if job.echo {
            read_exact(&client, &mut echo).await;
        }
    }
    read_exact(&client, &mut [0; DONE.len()]).await;
}

/// Message of the server once it has received everything.
const DONE: &[u8] = b"done";

async fn write(stream: &TlsStream, bytes: &[u8]) {
    stream.write_all(&mut [IoSlice::new(bytes)]).await.unwrap();
    stream.flush().await.unwrap();
}

async fn read_exact(stream: &TlsStream, target: &mut [u8]) {
    let mut filled = 0;
    while filled < target.len() {
        let read = std::future::poll_fn(|cx| stream.poll_read(cx, &mut target[filled..]))
            .await
            .unwrap();
        assert!(read > 0, "the other end closed");
        filled += read;
    }
}

/// A client and a server after their handshake.
async fn connect() -> (Rc<TlsStream>, Rc<TlsStream>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let socket = Socket::connect(listener.local_addr().unwrap(), None)
        .await
        .unwrap();
    let accepted = Socket::from_fd(listener.accept().unwrap().0.into()).unwrap();
    let (client, server) = sessions();
    let client = Rc::new(TlsStream::new(socket, client));
    let server = Rc::new(TlsStream::new(accepted, server));
    let accepting = Rc::clone(&server);
    runtime::spawn(async move {
        accepting.handshake().await.unwrap();
        write(&accepting, DONE).await;
    });
    client.handshake().await.unwrap();
    read_exact(&client, &mut [0; DONE.len()]).await;
    (client, server)
}

/// TLS 1.3 sessions as used by gateway and agent, with a new certificate.
fn sessions() -> (UnbufferedClientConnection, UnbufferedServerConnection) {
    let issued = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(issued.signing_key.serialize_der()));
    let server = gw_bed::tls::server((issued.cert.der().clone(), key), &[]);
    let client = gw_bed::tls::client([issued.cert.der().clone()], None, &[]);
    let name = ServerName::try_from("localhost").unwrap();
    let client = UnbufferedClientConnection::new(Arc::new(client), name).unwrap();
    (
        client,
        UnbufferedServerConnection::new(Arc::new(server)).unwrap(),
    )
}
