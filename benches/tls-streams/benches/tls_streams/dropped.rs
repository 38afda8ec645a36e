//! What the peer sees after a server has dropped a future that waits, and has gone on.

use std::io::{Read, Write};

use crate::client::{Load, Server};
use crate::server::pattern;
use crate::streams::Style;

/// More than the kernel's buffers of a connection hold.
const BYTES: usize = 16 << 20;

pub(crate) fn compare() {
    for (title, outcome) in [
        ("read", after_dropped_read as fn(Style) -> String),
        ("write", after_dropped_write),
    ] {
        let columns = Style::ALL.map(|style| {
            if style == Style::UnsafeIo {
                // The kernel would go on with memory that has been freed.
                "forbidden by its documentation".to_owned()
            } else {
                outcome(style)
            }
        });
        println!("| {title} | {} |", columns.join(" | "));
    }
}

/// The server drops a read while nothing arrives. The client then sends, and reads the echo.
fn after_dropped_read(style: Style) -> String {
    let mut server = Server::start(style, "dropped-read", Load::new(1, 0, 0));
    let mut connection = server.connect();
    assert_eq!(server.line(), "dropped");
    let bytes = pattern(100_000);
    connection.write_all(&bytes).unwrap();
    let mut echo = vec![0; bytes.len()];
    let result = connection.read_exact(&mut echo);
    let seen = match result {
        Ok(()) if echo == bytes => "echo complete".to_owned(),
        Ok(()) => "echo of other bytes".to_owned(),
        Err(error) => format!("no echo ({error})"),
    };
    drop(connection);
    format!("{seen}; {}", server_end(server))
}

/// The client does not read until the server has dropped a write.
fn after_dropped_write(style: Style) -> String {
    let mut server = Server::start(style, "dropped-write", Load::new(1, BYTES, 0));
    let mut connection = server.connect();
    assert_eq!(server.line(), "dropped");
    let mut received = Vec::new();
    let result = connection.read_to_end(&mut received);
    let sent = pattern(BYTES);
    let kind = if sent.starts_with(&received) {
        "bytes"
    } else {
        "bytes, not those that were written"
    };
    let end = match result {
        Ok(_) => "close_notify".to_owned(),
        Err(error) => error.to_string(),
    };
    drop(connection);
    format!(
        "{} of {BYTES} {kind}, then {end}; {}",
        received.len(),
        server_end(server)
    )
}

/// How the server's process ended.
fn server_end(server: Server) -> String {
    let output = server.end();
    let errors = String::from_utf8_lossy(&output.stderr);
    // The line after the place of the panic.
    let panic = errors
        .lines()
        .skip_while(|line| !line.contains("panicked at"))
        .nth(1);
    match panic {
        Some(message) => format!("the server panics: {message}"),
        None => format!("the server ends with {}", output.status),
    }
}
