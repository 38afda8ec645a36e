//! Raw HTTP/2 frames (RFC 9113 §4.1) and header blocks (RFC 7541).

use std::io::{Read, Write};

pub(crate) use gw_bed::http2::{
    ACK, CONTINUATION, DATA, END_STREAM, Frame, GOAWAY, HEADERS, LAST, NO_WINDOW, PING, PRIORITY,
    RST_STREAM, SETTINGS, UNKNOWN, WINDOW_UPDATE, frame, headers, indexed as remembered, request,
};

use crate::client::Stream;
use crate::failure::Failure;

/// Sends the connection preface and SETTINGS on a new connection.
pub(crate) fn begin(mut stream: Stream, settings: &[u8]) -> Result<Stream, Failure> {
    stream.write_all(&gw_bed::http2::preface(settings))?;
    stream.flush()?;
    Ok(stream)
}

/// Reads one frame.
pub(crate) fn read(stream: &mut impl Read) -> Result<Frame, Failure> {
    Ok(Frame::read(stream)?)
}
