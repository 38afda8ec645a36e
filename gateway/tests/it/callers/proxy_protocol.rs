//! Client addresses that proxies announce with the PROXY protocol.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::peers::caller;
use crate::support::peers::caller::{Caller, HOST};
use crate::support::peers::proxy_protocol::{
    SIGNATURE, begin_with, connect_through, socket_from, tcp4_of, trusted,
};
use crate::support::processes::process;
use crate::support::processes::process::{Running, hold};
use crate::support::scene::Scene;
use crate::support::{eventually, programs};

/// Address of a proxy that must announce its clients, of one that must not, and of a client.
const ANNOUNCES: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const SILENT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);
const CLIENT: Ipv4Addr = Ipv4Addr::new(127, 9, 9, 9);

/// A header that announces a connection from 198.51.100.7:4660 to 192.0.2.1:443.
fn tcp4() -> Vec<u8> {
    tcp4_of([198, 51, 100, 7])
}

/// A header that announces a connection from [2001:db8::7]:4660, with an extension of 3 bytes.
fn tcp6() -> Vec<u8> {
    let source = [&b"\x20\x01\x0d\xb8"[..], &[0; 11], &[7]].concat();
    let destination = [0; 16];
    let ports_and_extension = b"\x12\x34\x01\xbb\x04\x00\x03abc";
    [
        SIGNATURE,
        b"\x21\x21\x00\x2a",
        &source,
        &destination,
        ports_and_extension,
    ]
    .concat()
}

/// A scene behind a proxy of which the configuration does not say what it sends. Hands over all
/// connections.
fn behind_a_proxy() -> Scene {
    start("trusted_proxies = [\"127.0.0.1/32\"]\n")
}

/// A scene behind [`ANNOUNCES`] and [`SILENT`].
fn behind_declared_proxies() -> Scene {
    start(&trusted(&[
        ("127.0.0.2/31", "required"),
        ("127.0.0.3/32", "off"),
    ]))
}

fn start(configuration: &str) -> Scene {
    let scene = Scene::service().agent().configuration(configuration);
    scene.hand_over("always").start()
}

/// Value of `X-Forwarded-For` at the backend.
fn forwarded_for(scene: &Scene, caller: &mut Caller) -> String {
    let seen = caller.ask(scene.get("/")).json();
    let fields = seen["headers"].as_array().unwrap();
    let mut fields = fields.iter();
    let field = fields.find(|field| field[0] == "x-forwarded-for");
    field.unwrap()[1].as_str().unwrap().to_owned()
}

/// Value of `X-Forwarded-For` behind a connection that begins with this header.
fn announced_by(scene: &Scene, header: &[u8]) -> String {
    forwarded_for(scene, &mut connect_through(scene, header))
}

/// Bytes that the gateway sends before it ends a connection that begins with `beginning`.
fn refusal(scene: &Scene, beginning: &[u8]) -> Vec<u8> {
    refused(caller::socket(&scene.about), beginning)
}

fn refused(mut socket: TcpStream, beginning: &[u8]) -> Vec<u8> {
    socket.write_all(beginning).unwrap();
    let mut said = Vec::new();
    match socket.read_to_end(&mut said) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("still open: {error}"),
        _ => said,
    }
}

/// First byte of an alert (RFC 8446 §5.1), which refuses what is not TLS.
const ALERT: u8 = 21;

fn handshake_failures(scene: &Scene) -> u64 {
    scene.metrics().count("gw_handshake_failures_total")
}

#[test]
fn the_announced_source_is_the_client_address() {
    let scene = behind_a_proxy();
    // Enough connections for each worker to accept some of them.
    for _ in 0..8 {
        assert_eq!(announced_by(&scene, &tcp4()), "198.51.100.7");
        assert_eq!(announced_by(&scene, &tcp6()), "2001:db8::7");
    }
}

#[test]
fn a_header_may_arrive_byte_by_byte() {
    let scene = behind_a_proxy();
    let mut socket = caller::socket(&scene.about);
    for byte in tcp6() {
        socket.write_all(&[byte]).unwrap();
    }
    let mut caller = begin_with(&scene, b"", socket);
    assert_eq!(forwarded_for(&scene, &mut caller), "2001:db8::7");
}

#[test]
fn local_headers_and_connections_without_a_header_are_accepted() {
    let scene = behind_a_proxy();
    let local = [SIGNATURE, b"\x20\x00\x00\x00"].concat();
    let unspecified = [SIGNATURE, b"\x21\x00\x00\x03abc"].concat();
    for header in [local, unspecified, Vec::new()] {
        assert_eq!(announced_by(&scene, &header), "127.0.0.1", "{header:?}");
    }
    // The agent's tunnel was opened without a header as well.
    assert_eq!(scene.tunnels().len(), 1);
}

#[test]
fn malformed_headers_end_the_connection() {
    let scene = behind_a_proxy();
    let wrong_version = [SIGNATURE, b"\x11\x11\x00\x00"].concat();
    let too_short = [SIGNATURE, b"\x21\x11\x00\x04\x01\x02\x03\x04"].concat();
    let too_long = [SIGNATURE, b"\x21\x11\xff\xff"].concat();
    let malformed = [wrong_version, too_short, too_long];
    for header in &malformed {
        assert_eq!(refusal(&scene, header), b"", "{header:?}");
    }
    let failures = malformed.len() as u64;
    eventually("the failures are counted", || {
        (handshake_failures(&scene) == failures).then_some(())
    });
}

const LINE: &[u8] = b"PROXY TCP4 198.51.100.7 192.0.2.1 1 2\r\n";

#[test]
fn a_header_of_version_1_is_not_looked_for_without_a_setting() {
    let answer = refusal(&behind_a_proxy(), LINE);
    assert_eq!(&answer[..9], b"HTTP/1.1 ");
}

#[test]
fn headers_of_untrusted_peers_are_refused() {
    let scene = Scene::service().agent().start();
    assert_eq!(refusal(&scene, &tcp4())[0], ALERT);
    assert_eq!(announced_by(&scene, b""), "127.0.0.1");
}

/// Connections without a header where one is required.
fn without_header(scene: &Scene) -> u64 {
    let metrics = scene.metrics();
    metrics.count_with("gw_connections_turned_away_total", "proxy_header_missing")
}

/// Headers of the PROXY protocol, and the client address that each announces.
fn announcements() -> [(Vec<u8>, &'static str); 6] {
    let line = b"PROXY TCP4 198.51.100.7 192.0.2.1 4660 443\r\n".to_vec();
    let line6 = b"PROXY TCP6 2001:db8::7 2001:db8::1 4660 443\r\n".to_vec();
    let own = [
        &b"PROXY UNKNOWN\r\n"[..],
        &[SIGNATURE, b"\x20\x00\x00\x00"].concat(),
    ]
    .map(<[u8]>::to_vec);
    let [own_line, own_header] = own;
    [
        (line, "198.51.100.7"),
        (line6, "2001:db8::7"),
        (own_line, "127.0.0.2"),
        (own_header, "127.0.0.2"),
        (tcp4(), "198.51.100.7"),
        (tcp6(), "2001:db8::7"),
    ]
}

/// A connection of the proxy that must announce its clients.
fn connect_announcing(scene: &Scene) -> TcpStream {
    socket_from(ANNOUNCES, scene.address())
}

#[test]
fn a_proxy_that_must_announce_its_clients_may_use_each_kind_of_header() {
    let scene = behind_declared_proxies();
    for (header, client) in &announcements() {
        let mut whole = begin_with(&scene, header, connect_announcing(&scene));
        assert_eq!(forwarded_for(&scene, &mut whole), *client);
        let mut socket = connect_announcing(&scene);
        for byte in header {
            socket.write_all(&[*byte]).unwrap();
        }
        let mut in_bytes = begin_with(&scene, b"", socket);
        assert_eq!(forwarded_for(&scene, &mut in_bytes), *client, "in bytes");
    }
}

#[test]
fn a_proxy_that_announces_its_clients_must_do_so_on_every_connection() {
    let scene = behind_declared_proxies();
    let mut hello = Vec::new();
    caller::session(&scene.about, HOST, &[b"http/1.1"], None)
        .write_tls(&mut hello)
        .unwrap();
    let without: [&[u8]; 4] = [
        &hello,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PROXX",
        b"\r\n\r\n\0\r\nQUIX",
    ];
    for (count, beginning) in (1..).zip(without) {
        let said = refused(connect_announcing(&scene), beginning);
        assert_eq!(said, b"", "no answer, and no handshake");
        eventually("the connection is counted", || {
            (without_header(&scene) == count).then_some(())
        });
    }
    assert_eq!(handshake_failures(&scene), 0);
}

/// The first is a check of the proxy.
#[test]
fn a_connection_without_a_byte_and_a_line_without_an_end_are_failed_handshakes() {
    let scene = behind_declared_proxies();
    drop(connect_announcing(&scene));
    let line = [b"PROXY TCP4 ", &[b'1'; 96][..]].concat();
    assert_eq!(refused(connect_announcing(&scene), &line), b"");
    eventually("the failures are counted", || {
        (handshake_failures(&scene) == 2).then_some(())
    });
    assert_eq!(without_header(&scene), 0);
}

#[test]
fn a_second_header_is_no_part_of_the_announcement() {
    let scene = behind_declared_proxies();
    let own = b"PROXY TCP4 198.51.100.7 192.0.2.1 4660 443\r\n";
    let twice = [&own[..], &tcp4()].concat();
    assert_eq!(refused(connect_announcing(&scene), &twice)[0], ALERT);
}

#[test]
fn a_client_of_a_proxy_that_announces_none_cannot_announce_itself() {
    let scene = behind_declared_proxies();
    let connect = || socket_from(SILENT, scene.address());
    assert_eq!(refused(connect(), &tcp4())[0], ALERT);
    assert_eq!(&refused(connect(), LINE)[..9], b"HTTP/1.1 ");
    let mut caller = begin_with(&scene, b"", connect());
    assert_eq!(forwarded_for(&scene, &mut caller), "127.0.0.3");
    assert_eq!(without_header(&scene), 0);
}

#[test]
fn a_proxy_that_announces_no_clients_may_name_them_in_x_forwarded_for() {
    let scene = behind_declared_proxies();
    let mut caller = begin_with(&scene, b"", socket_from(SILENT, scene.address()));
    let request = scene.request("GET /", "X-Forwarded-For: 198.51.100.7\r\n\r\n");
    let seen = caller.ask(request).json().to_string();
    assert!(seen.contains("198.51.100.7, 127.0.0.3"), "{seen}");
}

/// `gw-gateway serve` with these trusted proxies, and the folder of its configuration and data.
fn serve_behind(proxies: &str) -> (Command, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gateway.toml");
    fs::write(&path, process::config_text(&folder.path().join("data"), 0)).unwrap();
    let mut serve = process::serve_command(&path);
    serve.env("GW_TRUSTED_PROXIES", proxies);
    (serve, folder)
}

#[test]
fn a_missing_header_is_logged_with_its_setting() {
    let (mut serve, _folder) = serve_behind("127.0.0.2=required, 10.0.0.0/8");
    let gateway = process::serve(&mut serve);
    let socket = socket_from(ANNOUNCES, gateway.address);
    assert_eq!(refused(socket, b"GET / HTTP/1.1\r\n\r\n"), b"");
    let line = gateway.log.line_with("connection closed");
    for part in ["127.0.0.2", "trusted_proxies", "required"] {
        assert!(line.contains(part), "{part}: {line}");
    }
}

#[test]
fn a_check_reports_the_proxies_whose_headers_are_guessed() {
    let (mut serve, _folder) = serve_behind("10.0.0.0/8,192.0.2.1=off");
    let output = serve.arg("--check").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let guessed = "trusted_proxies: 10.0.0.0/8: no proxy_protocol";
    assert!(said.contains(guessed), "{said}");
    assert!(!said.contains("192.0.2.1"), "{said}");
}

/// Waits until `port` takes connections, then asserts that the backend sees the client of a real
/// proxy.
fn assert_announced(scene: &Scene, port: u16) {
    let balancer = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    eventually("the proxy listens", || TcpStream::connect(balancer).ok());
    let mut caller = begin_with(scene, b"", socket_from(CLIENT, balancer));
    assert_eq!(forwarded_for(scene, &mut caller), CLIENT.to_string());
}

/// A free port of loopback, and the socket that reserves it.
fn reserve_port() -> (socket2::Socket, u16) {
    let reserved = hold((Ipv4Addr::LOCALHOST, 0).into());
    let address = reserved.local_addr().unwrap().as_socket().unwrap();
    (reserved, address.port())
}

/// Starts `program` with a configuration file that has this text.
fn start_proxy(folder: &Path, program: &[&str], text: &str) -> Running {
    let file = folder.join("proxy.conf");
    fs::write(&file, text).unwrap();
    let mut command = Command::new(program[0]);
    command
        .args(&program[1..])
        .arg(file)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Running::new(command.spawn().unwrap())
}

#[test]
fn haproxy_announces_clients_in_both_versions() {
    if !programs::usable(&["haproxy"]) {
        return;
    }
    let scene = behind_declared_proxies();
    for option in ["send-proxy", "send-proxy-v2"] {
        let folder = tempfile::tempdir().unwrap();
        let (_reserved, port) = reserve_port();
        let config = format!(
            "defaults\n    mode tcp\n    timeout connect 5s\n    timeout client 1m\n    timeout \
             server 1m\n\
             listen gw\n    bind 127.0.0.1:{port}\n    server gw1 {} source {ANNOUNCES} check \
             {option}\n",
            scene.address()
        );
        let _haproxy = start_proxy(folder.path(), &["haproxy", "-db", "-f"], &config);
        assert_announced(&scene, port);
    }
    assert_eq!(without_header(&scene), 0, "HAProxy's checks have a header");
}

#[test]
fn nginx_announces_clients_in_version_1() {
    if !programs::usable(&["nginx", "nginx-stream"]) {
        return;
    }
    let scene = behind_declared_proxies();
    let folder = tempfile::tempdir().unwrap();
    let (_reserved, port) = reserve_port();
    let path = folder.path().display();
    let config = format!(
        "load_module /usr/lib/nginx/modules/ngx_stream_module.so;\ndaemon off;\n\
         master_process off;\npid {path}/nginx.pid;\nerror_log {path}/nginx.err;\nevents {{}}\n\
         stream {{ server {{ listen 127.0.0.1:{port} reuseport; proxy_pass {}; proxy_bind \
         {ANNOUNCES}; proxy_protocol on; }} }}\n",
        scene.address()
    );
    let _nginx = start_proxy(folder.path(), &["nginx", "-c"], &config);
    assert_announced(&scene, port);
}
