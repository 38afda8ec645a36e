//! The client, and the server's process as the client sees it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

use crate::streams::Style;

/// Timeout of the client.
const PATIENCE: Duration = Duration::from_secs(20);

/// Load of a server.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    pub(crate) connections: usize,
    /// Bytes of a message.
    pub(crate) message: usize,
    /// Number of messages over all connections.
    pub(crate) messages: usize,
}

impl Load {
    pub(crate) const fn new(connections: usize, message: usize, messages: usize) -> Self {
        Self {
            connections,
            message,
            messages,
        }
    }
}

pub(crate) type Connection = StreamOwned<ClientConnection, TcpStream>;

/// The process of a server.
pub(crate) struct Server {
    process: Child,
    lines: BufReader<ChildStdout>,
    port: u16,
    config: Arc<ClientConfig>,
}

impl Server {
    pub(crate) fn start(style: Style, mode: &str, load: Load) -> Self {
        let issued = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--serve", style.name(), mode])
            .args([load.connections, load.message, load.messages].map(|number| number.to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let pem = issued.cert.pem() + &issued.signing_key.serialize_pem();
        let mut stdin = process.stdin.take().unwrap();
        stdin.write_all(pem.as_bytes()).unwrap();
        drop(stdin);

        let config = gw_bed::tls::client([issued.cert.der().clone()], None, &[]);
        let mut server = Self {
            lines: BufReader::new(process.stdout.take().unwrap()),
            process,
            port: 0,
            config: Arc::new(config),
        };
        server.port = server.line().parse().unwrap();
        server
    }

    /// The next line that the server prints.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Connects and completes the handshake.
    pub(crate) fn connect(&self) -> Connection {
        let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).unwrap();
        socket.set_nodelay(true).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let mut session = ClientConnection::new(Arc::clone(&self.config), name).unwrap();
        while session.is_handshaking() {
            session.complete_io(&mut socket).unwrap();
        }
        StreamOwned::new(session, socket)
    }

    /// Resident memory in bytes.
    pub(crate) fn resident(&self) -> usize {
        let path = format!("/proc/{}/smaps_rollup", self.process.id());
        let text = std::fs::read_to_string(path).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("Rss:"));
        let kib = line.unwrap().trim().trim_end_matches(" kB");
        kib.parse::<usize>().unwrap() * 1024
    }

    /// Waits for the end of the process.
    pub(crate) fn end(self) -> Output {
        self.process.wait_with_output().unwrap()
    }
}

/// Sends a message and reads it back.
pub(crate) fn echo_once(connection: &mut Connection, message: usize) {
    let mut bytes = vec![7; message];
    connection.write_all(&bytes).unwrap();
    connection.read_exact(&mut bytes).unwrap();
}

/// CPU time of a new server per message, in microseconds. The client writes a message to each
/// connection, then reads all echoes, and so on.
pub(crate) fn cpu_per_echo(style: Style, load: Load) -> f64 {
    let mut server = Server::start(style, "busy", load);
    let mut connections: Vec<_> = (0..load.connections).map(|_| server.connect()).collect();
    let message = vec![7; load.message];
    let mut echo = vec![0; load.message];
    for _ in 0..load.messages / load.connections {
        for connection in &mut connections {
            connection.write_all(&message).unwrap();
        }
        for connection in &mut connections {
            connection.read_exact(&mut echo).unwrap();
        }
    }
    drop(connections);
    let cost = server.line().parse().unwrap();
    assert!(server.end().status.success());
    cost
}
