//! Frames that an agent sends on its tunnel (`docs/tunnel.md`), valid or not.

use gw_shared::tunnel::frame::{FrameHeader, Kind, StreamId};

/// Duration in a head that means that there is none.
const NO_DURATION: [u8; 4] = [0xff; 4];

/// Announces a body of unknown length.
pub const CHUNKED: (&str, &str) = ("transfer-encoding", "chunked");

pub fn frame(kind: Kind, end: bool, stream: StreamId, payload: &[u8]) -> Vec<u8> {
    let mut frame = FrameHeader {
        kind,
        end,
        length: payload.len(),
        stream,
    }
    .encode()
    .to_vec();
    frame.extend_from_slice(payload);
    frame
}

/// A frame of the tunnel.
pub fn of_tunnel(kind: Kind, payload: &[u8]) -> Vec<u8> {
    frame(kind, false, StreamId::TUNNEL, payload)
}

pub fn hello(streams: u32) -> Vec<u8> {
    of_tunnel(Kind::Hello, &streams.to_be_bytes())
}

pub fn ping() -> Vec<u8> {
    of_tunnel(Kind::Ping, &[7; 8])
}

pub fn message(json: impl AsRef<[u8]>) -> Vec<u8> {
    of_tunnel(Kind::Message, json.as_ref())
}

/// An HTTP/1.1 response head.
pub fn head_text(status: &str, fields: &[(&str, &str)]) -> String {
    let fields: String = fields
        .iter()
        .map(|(name, value)| format!("{name}: {value}\r\n"))
        .collect();
    format!("HTTP/1.1 {status} \r\n{fields}\r\n")
}

/// A RESPONSE with any head.
pub fn response(stream: StreamId, end: bool, head: impl AsRef<[u8]>) -> Vec<u8> {
    let payload = [&[0; 4], &NO_DURATION, head.as_ref()].concat();
    frame(Kind::Response, end, stream, &payload)
}

/// A RESPONSE that a body follows.
pub fn head(stream: StreamId, status: &str, fields: &[(&str, &str)]) -> Vec<u8> {
    response(stream, false, head_text(status, fields))
}

/// A RESPONSE without a body.
pub fn last_head(stream: StreamId, status: &str, fields: &[(&str, &str)]) -> Vec<u8> {
    response(stream, true, head_text(status, fields))
}

/// A RESPONSE with status 200, before a body of unknown length.
pub fn begun(stream: StreamId) -> Vec<u8> {
    head(stream, "200", &[CHUNKED])
}

/// A complete response with a body.
pub fn ok(stream: StreamId, body: &[u8]) -> Vec<u8> {
    [begun(stream), last_data(stream, body)].concat()
}

pub fn interim(stream: StreamId, status: &str, fields: &[(&str, &str)]) -> Vec<u8> {
    frame(
        Kind::Interim,
        false,
        stream,
        head_text(status, fields).as_bytes(),
    )
}

pub fn data(stream: StreamId, data: &[u8]) -> Vec<u8> {
    frame(Kind::Data, false, stream, data)
}

pub fn last_data(stream: StreamId, data: &[u8]) -> Vec<u8> {
    frame(Kind::Data, true, stream, data)
}

pub fn trailers(stream: StreamId, fields: &[(&str, &str)]) -> Vec<u8> {
    let lines: String = fields
        .iter()
        .map(|(name, value)| format!("{name}: {value}\r\n"))
        .collect();
    frame(
        Kind::Trailers,
        true,
        stream,
        format!("{lines}\r\n").as_bytes(),
    )
}

/// A REFUSED with any code and message.
pub fn refused(stream: StreamId, code: &[u8], message: &[u8]) -> Vec<u8> {
    let payload = [
        &[0; 4],
        &NO_DURATION,
        &[code.len() as u8][..],
        code,
        message,
    ]
    .concat();
    frame(Kind::Refused, true, stream, &payload)
}

pub fn reset(stream: StreamId, code: &[u8]) -> Vec<u8> {
    frame(Kind::Reset, false, stream, code)
}

/// Reports the bytes of the request body that the backend took.
pub fn uploaded(stream: StreamId, bytes: u64) -> Vec<u8> {
    frame(Kind::Uploaded, false, stream, &bytes.to_be_bytes())
}

pub fn credit(stream: StreamId, bytes: u32) -> Vec<u8> {
    frame(Kind::Credit, false, stream, &bytes.to_be_bytes())
}
