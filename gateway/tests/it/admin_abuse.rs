//! The admin listener against clients that have not authenticated.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use gw_gateway::config::Config;
use gw_gateway::demo::{Demo, Options};

use crate::support::{SOON, options};

/// What the listener answers before it closes the connection or resets it.
fn answer(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    // Fails if the listener does not wait for the end.
    drop(stream.write_all(request));
    let mut answer = Vec::new();
    if let Err(error) = stream.read_to_end(&mut answer) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "the connection ends");
    }
    String::from_utf8(answer).unwrap()
}

#[test]
fn no_path_is_served_under_a_foreign_name() {
    let adjust = |config: &mut Config| config.admin_hosts = vec!["console.example.com".to_owned()];
    let demo = Demo::start(&Options { adjust, ..options(None) }).unwrap();
    let ask = |path: &str, version: &str, host: &str| {
        let request = format!("GET {path} HTTP/{version}\r\n{host}Connection: close\r\n\r\n");
        answer(demo.gateway().admin_address(), request.as_bytes())
    };
    let paths =
        ["/metrics", "/healthz", "/readyz", "/api/v1/openapi.json", "/api/v1/accounts", "/", "/sign-in", "/nothing"];
    for path in paths {
        for host in ["evil.example:9080", "127.0.0.1.evil.example", "demo--echo.eu1.gw.localhost.evil", ""] {
            let refused = ask(path, "1.1", &format!("Host: {host}\r\n"));
            assert!(
                refused.starts_with("HTTP/1.1 421 ") && refused.contains("admin_hosts"),
                "{path} {host}: {refused}"
            );
        }
        let refused = ask(path, "1.1", "Host: 127.0.0.1\r\nHost: evil.example\r\n");
        assert!(refused.starts_with("HTTP/1.1 421 "), "{path}: {refused}");
        for host in ["console.example.com", "localhost:1", "eu1.gw.localhost", "10.0.0.7:9080", "[::1]:9080"] {
            let served = ask(path, "1.1", &format!("Host: {host}\r\n"));
            assert!(!served.starts_with("HTTP/1.1 421 "), "{path} {host}: {served}");
        }
    }
    // Probes of load balancers.
    assert!(ask("/readyz", "1.0", "").starts_with("HTTP/1.0 200 "));
    assert!(ask("/metrics", "1.1", "Host: 127.0.0.1:9080\r\n").starts_with("HTTP/1.1 200 "));
}
