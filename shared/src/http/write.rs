//! Writing of HTTP/1.1 heads. All relayed HTTP/1.1 messages, in both directions, are written here.
//!
//! Only [`Framing`] and [`ConnectionField`] determine the framing. Fields of the map that frame or
//! belong to a connection ([`is_framing`]) are never written, so a peer's framing fields cannot
//! reach the next hop.

use std::io::Write;

use http::header;
use http::uri::PathAndQuery;
use http::{Method, StatusCode};

use super::framing::{Framing, is_framing};
use super::upgrade::UpgradeProtocol;
use crate::http::Fields;

/// The `Connection` field of a head (RFC 9110 §7.6.1).
#[derive(Debug, Clone, Copy)]
pub enum ConnectionField<'a> {
    /// No field: an HTTP/1.1 connection persists.
    Persists,
    /// `keep-alive`: the connection persists after a response to HTTP/1.0.
    KeepAlive,
    /// `close`: the connection ends after this message, or after the response to it.
    Close,
    /// `upgrade`: a request to switch to this protocol, or the response that accepts it.
    Upgrade(&'a UpgradeProtocol),
}

/// Appends a request head to `out`: request line, `Host`, the given fields, fields of the framing,
/// and the empty line.
pub fn write_request(
    out: &mut Vec<u8>,
    method: &Method,
    target: &PathAndQuery,
    host: &[u8],
    headers: &Fields,
    framing: Framing,
    connection: ConnectionField<'_>,
) {
    out.extend_from_slice(method.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(target.as_str().as_bytes());
    out.extend_from_slice(b" HTTP/1.1\r\n");
    write_line(out, b"host", host);
    // The bytes of the other protocol are no body.
    let framing = match (connection, framing) {
        (ConnectionField::Upgrade(_), Framing::Length(1..)) => framing,
        (ConnectionField::Upgrade(_), _) => Framing::None,
        (_, framing) => framing,
    };
    let has_te = write_fields(out, headers, framing, HostField::Skip);
    write_connection(out, connection, has_te);
    out.extend_from_slice(b"\r\n");
}

/// Appends a response head to `out`: status line, the given fields, fields of the framing, and the
/// empty line.
pub fn write_response(
    out: &mut Vec<u8>,
    status: StatusCode,
    headers: &Fields,
    framing: Framing,
    connection: ConnectionField<'_>,
) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(status.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(status.canonical_reason().unwrap_or_default().as_bytes());
    out.extend_from_slice(b"\r\n");
    write_fields(
        out,
        headers,
        framing.of_response(status, &Method::GET),
        HostField::Write,
    );
    write_connection(out, connection, false);
    out.extend_from_slice(b"\r\n");
}

/// Appends the fields of a trailer section as lines.
pub(crate) fn write_trailers(out: &mut Vec<u8>, trailers: &Fields) {
    write_fields(out, trailers, Framing::None, HostField::Skip);
}

/// Treatment of `Host` in a map of fields.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HostField {
    /// Already written, or not allowed.
    Skip,
    /// Written like any other field.
    Write,
}

/// Appends fields as lines; replaces fields that frame by those of `framing`. Returns whether `TE`
/// is among them.
fn write_fields(out: &mut Vec<u8>, headers: &Fields, framing: Framing, host: HostField) -> bool {
    let mut length = framing.content_length();
    let mut has_te = false;
    for (name, value) in headers.iter() {
        if *name == header::CONTENT_LENGTH {
            // At its place in the received head.
            length
                .take()
                .into_iter()
                .for_each(|length| write_length(out, length));
        } else if !is_framing(name) && (host == HostField::Write || *name != header::HOST) {
            let name = name.as_str();
            has_te |= name == "te";
            write_line(out, name.as_bytes(), value.as_bytes());
        }
    }
    length
        .into_iter()
        .for_each(|length| write_length(out, length));
    if framing == Framing::Chunked {
        out.extend_from_slice(b"transfer-encoding: chunked\r\n");
    }
    has_te
}

fn write_line(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

fn write_length(out: &mut Vec<u8>, length: u64) {
    // Writing to a Vec does not fail.
    drop(write!(out, "content-length: {length}\r\n"));
}

/// Appends `Connection`, and `Upgrade`. `has_te` tells whether the head has `TE`, which belongs to
/// the connection too and is named for that (RFC 9110 §10.1.4). One line: some recipients read the
/// first `Connection` only.
fn write_connection(out: &mut Vec<u8>, connection: ConnectionField<'_>, has_te: bool) {
    let option: &[u8] = match connection {
        ConnectionField::Persists => b"",
        ConnectionField::KeepAlive => b"keep-alive",
        ConnectionField::Close => b"close",
        ConnectionField::Upgrade(_) => b"upgrade",
    };
    match (option, has_te) {
        (b"", false) => {}
        (b"", true) => write_line(out, b"connection", b"TE"),
        (option, false) => write_line(out, b"connection", option),
        (option, true) => write_line(out, b"connection", &[option, b", TE"].concat()),
    }
    if let ConnectionField::Upgrade(protocol) = connection {
        write_line(out, b"upgrade", protocol.as_value().as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use http::header::HeaderValue;

    use super::*;
    use crate::testing::fields;

    /// Every field that frames a message or belongs to a connection, with a false value.
    fn hostile() -> Fields {
        fields(&[
            ("x-first", "1"),
            ("content-length", "34"),
            ("content-length", "35"),
            ("content_length", "36"),
            ("transfer-encoding", "chunked"),
            ("transfer_encoding", "chunked"),
            ("connection", "upgrade, close"),
            ("upgrade", "h2c"),
            ("http2-settings", "AAMAAABk"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "keep-alive"),
            ("x-last", "2"),
        ])
    }

    /// A request for `/p?q` as it is written.
    fn request(headers: &Fields, framing: Framing, connection: ConnectionField<'_>) -> String {
        let mut out = Vec::new();
        let target = PathAndQuery::from_static("/p?q");
        write_request(
            &mut out,
            &Method::PUT,
            &target,
            b"h",
            headers,
            framing,
            connection,
        );
        String::from_utf8(out).unwrap()
    }

    /// A response as it is written.
    fn response(
        status: u16,
        headers: &Fields,
        framing: Framing,
        connection: ConnectionField<'_>,
    ) -> String {
        let mut out = Vec::new();
        let status = StatusCode::from_u16(status).unwrap();
        write_response(&mut out, status, headers, framing, connection);
        String::from_utf8(out).unwrap()
    }

    const LENGTH_3: &str = "content-length: 3\r\n";
    const LENGTH_7: &str = "content-length: 7\r\n";
    const CHUNKED: &str = "transfer-encoding: chunked\r\n";
    const CLOSE: &str = "connection: close\r\n";
    const UPGRADES: &str = "connection: upgrade\r\nupgrade: websocket\r\n";

    #[test]
    fn received_framing_fields_do_not_reach_a_written_request() {
        let websocket = UpgradeProtocol::from_static("websocket");
        let mut headers = hostile();
        headers.append(header::HOST, HeaderValue::from_static("elsewhere"));
        let persists = ConnectionField::Persists;
        let switches = ConnectionField::Upgrade(&websocket);
        for (framing, connection, length, rest) in [
            (Framing::None, persists, "", ""),
            (Framing::Length(0), persists, "content-length: 0\r\n", ""),
            (Framing::Length(7), persists, LENGTH_7, ""),
            (Framing::Chunked, persists, "", CHUNKED),
            (Framing::Length(7), ConnectionField::Close, LENGTH_7, CLOSE),
            (Framing::None, switches, "", UPGRADES),
            // The content comes before the other protocol (RFC 9110 §7.8).
            (Framing::Length(7), switches, LENGTH_7, UPGRADES),
            (Framing::Chunked, switches, "", UPGRADES),
        ] {
            let expected = format!(
                "PUT /p?q HTTP/1.1\r\nhost: h\r\nx-first: 1\r\n{length}x-last: 2\r\n{rest}\r\n"
            );
            let written = request(&headers, framing, connection);
            assert_eq!(written, expected, "{framing:?} {connection:?}");
        }
    }

    #[test]
    fn te_of_a_request_is_named_in_connection() {
        let websocket = UpgradeProtocol::from_static("websocket");
        let te = fields(&[("te", "trailers")]);
        for (connection, expected) in [
            (ConnectionField::Persists, "connection: TE\r\n"),
            (ConnectionField::Close, "connection: close, TE\r\n"),
            (
                ConnectionField::Upgrade(&websocket),
                "connection: upgrade, TE\r\nupgrade: websocket\r\n",
            ),
        ] {
            let begin = "PUT /p?q HTTP/1.1\r\nhost: h\r\nte: trailers\r\n";
            let written = request(&te, Framing::None, connection);
            assert_eq!(written, format!("{begin}{expected}\r\n"));
        }
    }

    #[test]
    fn received_framing_fields_do_not_reach_a_written_response() {
        let websocket = UpgradeProtocol::from_static("websocket");
        let persists = ConnectionField::Persists;
        let closes = ConnectionField::Close;
        let kept = ConnectionField::KeepAlive;
        let switches = ConnectionField::Upgrade(&websocket);
        let chunked_and_close = format!("{CHUNKED}{CLOSE}");
        for (status, framing, connection, length, rest) in [
            (200, Framing::Length(3), persists, LENGTH_3, ""),
            (200, Framing::Described(3), persists, LENGTH_3, ""),
            (200, Framing::Chunked, closes, "", &chunked_and_close[..]),
            (200, Framing::UntilClose, closes, "", CLOSE),
            (
                200,
                Framing::Length(3),
                kept,
                LENGTH_3,
                "connection: keep-alive\r\n",
            ),
            (304, Framing::Described(3), persists, LENGTH_3, ""),
            (304, Framing::Chunked, persists, "", ""),
            (204, Framing::Length(3), persists, "", ""),
            (204, Framing::Chunked, persists, "", ""),
            (103, Framing::Length(3), persists, "", ""),
            (101, Framing::UntilClose, switches, "", UPGRADES),
        ] {
            let text = response(status, &hostile(), framing, connection);
            let (line, fields) = text.split_once("\r\n").unwrap();
            assert!(line.starts_with(&format!("HTTP/1.1 {status} ")), "{line}");
            let expected = format!("x-first: 1\r\n{length}x-last: 2\r\n{rest}\r\n");
            assert_eq!(fields, expected, "{status} {framing:?}");
        }
        // A length that the received head did not have.
        let written = response(200, &Fields::new(), Framing::Length(3), persists);
        assert_eq!(written, "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n");
    }

    #[test]
    fn a_status_without_a_reason_keeps_its_space() {
        let persists = ConnectionField::Persists;
        let written = response(299, &Fields::new(), Framing::Length(0), persists);
        assert_eq!(written, "HTTP/1.1 299 \r\ncontent-length: 0\r\n\r\n");
    }

    #[test]
    fn framing_fields_and_host_are_left_out_of_trailers() {
        let mut trailers = hostile();
        trailers.append(header::HOST, HeaderValue::from_static("elsewhere"));
        let mut out = Vec::new();
        write_trailers(&mut out, &trailers);
        assert_eq!(out, b"x-first: 1\r\nx-last: 2\r\n");
    }
}
