//! Hand-over of a connection to the worker that owns its service, compared with requests that cross
//! one by one.
//!
//! Two demos with two workers each run in this process and differ only in this. Callers are a
//! separate process, so that their CPU time is not counted. Both demos get only connections that
//! the kernel gave to the worker that does not own the service.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gw_base::service::rate::Rate;
use gw_gateway::demo::{Demo, Options};
use gw_interface::config::{Config, HandOver};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use tempfile::TempDir;

use crate::load::PATIENCE;
use crate::measure::{self, Stamp, median, micros};

const ROUNDS: usize = 7;
const CONNECTIONS: [usize; 2] = [1, 16];
const ROUND: Duration = Duration::from_millis(1500);
const WARM_UP: Duration = Duration::from_millis(300);
const WORKERS: usize = 2;

pub(crate) fn probe() {
    measure::print_machine();
    println!(
        "CPU of gateway, agent and backend per request, µs, and the callers' p50, µs: median of \
         {ROUNDS}\n"
    );
    let demos = [HandOver::Always, HandOver::Never].map(|hand_over| (hand_over, start(hand_over)));
    for connections in CONNECTIONS {
        let mut callers: Vec<Callers> = demos
            .iter()
            .map(|(_, (demo, _))| Callers::start(demo, connections))
            .collect();
        let mut rounds = vec![Vec::new(); demos.len()];
        for round in 0..=ROUNDS {
            for (callers, rounds) in callers.iter_mut().zip(&mut rounds) {
                let length = if round == 0 { WARM_UP } else { ROUND };
                let result = callers.round(length);
                if round > 0 {
                    rounds.push(result);
                }
            }
        }
        println!("{connections} connections");
        for ((hand_over, _), rounds) in demos.iter().zip(&rounds) {
            let of = |pick: fn(&Round) -> f64| rounds.iter().map(pick).collect::<Vec<f64>>();
            let cpu = of(|round| round.cpu);
            let p50 = of(|round| round.p50);
            println!(
                "  {hand_over:?}: CPU {}, p50 {}",
                measure::spread(&cpu),
                measure::spread(&p50)
            );
        }
        let ratio = |pick: fn(&Round) -> f64| {
            let of = |rounds: &[Round]| median(rounds.iter().map(pick).collect());
            of(&rounds[1]) / of(&rounds[0])
        };
        println!(
            "  Never ÷ Always: CPU {:.2}, p50 {:.2}",
            ratio(|round| round.cpu),
            ratio(|round| round.p50)
        );
        callers.into_iter().for_each(Callers::end);
    }
}

/// A demo, and the folder of its state.
fn start(hand_over: HandOver) -> (Demo, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let options = Options {
        workers: WORKERS,
        // Never reached, because refusals are not measured.
        rate: Rate::new(1_000_000_000, 1_000_000_000).unwrap(),
        ..Options::default()
    };
    let config = Config {
        hand_over,
        ..options.config(folder.path().to_owned())
    };
    (Demo::start_with(&config, &options).unwrap(), folder)
}

/// Process of the callers of one demo.
struct Callers {
    child: Child,
    commands: ChildStdin,
    replies: BufReader<ChildStdout>,
}

/// Results of one round, in µs.
#[derive(Clone, Copy)]
struct Round {
    cpu: f64,
    p50: f64,
}

impl Callers {
    /// Makes the process open connections until this many are on the worker that does not own the
    /// service.
    fn start(demo: &Demo, connections: usize) -> Self {
        let port = demo.gateway().address().port().to_string();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([CALLER, &port, &connections.to_string()])
            .env(CA_FILE, &demo.about.ca_file)
            .env(SERVICE_KEY, &demo.about.service_key)
            .env(SERVER_NAME, server_name(demo))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let commands = child.stdin.take().unwrap();
        let replies = BufReader::new(child.stdout.take().unwrap());
        let mut callers = Self {
            child,
            commands,
            replies,
        };
        let mut misplaced = moved_or_crossed(demo);
        while callers.reply() == "opened" {
            let now = moved_or_crossed(demo);
            callers.command(if now > misplaced { "keep" } else { "drop" });
            misplaced = now;
        }
        callers
    }

    fn round(&mut self, length: Duration) -> Round {
        let start = Stamp::process();
        self.command(&length.as_millis().to_string());
        let reply = self.reply();
        let spent = start.until(Stamp::process());
        let (requests, p50) = reply.split_once(' ').unwrap();
        Round {
            cpu: micros(spent.cpu) / requests.parse::<f64>().unwrap(),
            p50: p50.parse().unwrap(),
        }
    }

    fn end(self) {
        let Self {
            mut child,
            commands,
            ..
        } = self;
        drop(commands);
        child.wait().unwrap();
    }

    fn command(&mut self, line: &str) {
        writeln!(self.commands, "{line}").unwrap();
    }

    fn reply(&mut self) -> String {
        read_line(&mut self.replies).expect("the callers' process runs")
    }
}

fn server_name(demo: &Demo) -> String {
    let host = demo.about.tenant_url.strip_prefix("https://").unwrap();
    host.rsplit_once(':').unwrap().0.to_owned()
}

/// Sum of the connections handed over and the requests that crossed.
fn moved_or_crossed(demo: &Demo) -> u64 {
    let reports = demo.gateway().control().reports();
    reports
        .iter()
        .map(|report| report.totals["connections_handed_over"] + report.totals["requests_crossing"])
        .sum()
}

/// Argument that starts the callers' process.
pub(crate) const CALLER: &str = "callers";
const CA_FILE: &str = "GW_PROBE_CA_FILE";
const SERVICE_KEY: &str = "GW_PROBE_SERVICE_KEY";
const SERVER_NAME: &str = "GW_PROBE_SERVER_NAME";
/// Largest number of connections opened to find one that the kernel gives to the worker that does
/// not own the service. About half of them are.
const TRIES: usize = 64;

type Connection = StreamOwned<ClientConnection, TcpStream>;

/// Runs the callers' process: opens connections, then sends requests for the duration that each
/// line of its input gives.
pub(crate) fn call(port: &str, connections: &str) {
    let port: u16 = port.parse().unwrap();
    let wanted: usize = connections.parse().unwrap();
    let variable = |name: &str| std::env::var(name).unwrap();
    let name = variable(SERVER_NAME);
    let config = Arc::new(client_config(&variable(CA_FILE).into()));
    let request = format!(
        "GET /status/200 HTTP/1.1\r\nHost: {name}\r\nX-Gw-Service-Key: {}\r\n\r\n",
        variable(SERVICE_KEY)
    );
    let mut commands = std::io::stdin().lock();
    let mut kept = Vec::new();
    for _ in 0..TRIES * wanted {
        if kept.len() == wanted {
            break;
        }
        let mut connection = open(port, &name, &config);
        exchange(&mut connection, request.as_bytes());
        println!("opened");
        if read_line(&mut commands).as_deref() == Some("keep") {
            kept.push(connection);
        }
    }
    assert_eq!(kept.len(), wanted, "the kernel does not spread connections");
    println!("ready");
    while let Some(length) = read_line(&mut commands) {
        let until = Instant::now() + Duration::from_millis(length.parse().unwrap());
        let latencies = call_all(&mut kept, request.as_bytes(), until);
        println!("{} {}", latencies.len(), median(latencies));
    }
}

fn call_all(connections: &mut [Connection], request: &[u8], until: Instant) -> Vec<f64> {
    std::thread::scope(|scope| {
        let call = |connection| scope.spawn(move || call_one(connection, request, until));
        let callers: Vec<_> = connections.iter_mut().map(call).collect();
        callers
            .into_iter()
            .flat_map(|caller| caller.join().unwrap())
            .collect()
    })
}

fn call_one(connection: &mut Connection, request: &[u8], until: Instant) -> Vec<f64> {
    let mut latencies = Vec::new();
    while Instant::now() < until {
        let start = Instant::now();
        exchange(connection, request);
        latencies.push(micros(start.elapsed()));
    }
    latencies
}

fn client_config(ca_file: &PathBuf) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(ca_file).unwrap())
        .unwrap();
    ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth()
}

fn open(port: u16, name: &str, config: &Arc<ClientConfig>) -> Connection {
    let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    socket.set_nodelay(true).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    StreamOwned::new(
        ClientConnection::new(Arc::clone(config), name).unwrap(),
        socket,
    )
}

/// Sends a request and reads the complete response.
fn exchange(connection: &mut Connection, request: &[u8]) {
    connection.write_all(request).unwrap();
    let mut buffer = [0; 4096];
    let mut filled = 0;
    loop {
        let received = connection.read(&mut buffer[filled..]).unwrap();
        assert!(received > 0, "the gateway closed the connection");
        filled += received;
        let response = std::str::from_utf8(&buffer[..filled]).unwrap();
        let Some((head, body)) = response.split_once("\r\n\r\n") else {
            continue;
        };
        assert!(head.starts_with("HTTP/1.1 200 "), "{response}");
        let head = head.to_ascii_lowercase();
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "))
            .expect("the response has a Content-Length");
        if body.len() == length.parse::<usize>().unwrap() {
            return;
        }
    }
}

/// The next line; `None` at the end of the input.
fn read_line(input: &mut impl BufRead) -> Option<String> {
    let mut line = String::new();
    (input.read_line(&mut line).unwrap() > 0).then(|| line.trim().to_owned())
}
