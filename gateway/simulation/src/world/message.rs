//! Messages of HTTP/1.1 as callers and backends of the world read them: written here, so that the
//! product's own code does not judge itself.

use std::io;

use bytes::{Buf, BytesMut};

/// Field of trailers that names the request.
pub(crate) const TRAILER: &str = "x-sim-trailer";

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Takes the bytes of a head from `buffer`, once it is there.
pub(crate) fn take_head(buffer: &mut BytesMut) -> Option<BytesMut> {
    let end = buffer.windows(4).position(|four| four == b"\r\n\r\n")?;
    Some(buffer.split_to(end + 4))
}

/// A head: its first line and fields, with names in small letters.
pub(crate) struct Head {
    pub(crate) target: String,
    pub(crate) status: u16,
    fields: Vec<(String, String)>,
}

impl Head {
    pub(crate) fn request(bytes: &[u8]) -> io::Result<Self> {
        let mut fields = [httparse::EMPTY_HEADER; 100];
        let mut request = httparse::Request::new(&mut fields);
        match request.parse(bytes) {
            Ok(httparse::Status::Complete(_)) => {}
            _ => return Err(invalid("not a request")),
        }
        Ok(Self {
            target: request.path.unwrap_or_default().to_owned(),
            status: 0,
            fields: owned(request.headers),
        })
    }

    pub(crate) fn response(bytes: &[u8]) -> io::Result<Self> {
        let mut fields = [httparse::EMPTY_HEADER; 100];
        let mut response = httparse::Response::new(&mut fields);
        match response.parse(bytes) {
            Ok(httparse::Status::Complete(_)) => {}
            _ => return Err(invalid("not a response")),
        }
        Ok(Self {
            target: String::new(),
            status: response.code.unwrap_or(0),
            fields: owned(response.headers),
        })
    }

    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let mut fields = self.fields.iter();
        fields
            .find(|(field, _)| field == name)
            .map(|(_, value)| value.as_str())
    }

    /// Id of the request, which its path names.
    pub(crate) fn id(&self) -> io::Result<u32> {
        id(&self.target)
    }

    pub(crate) fn wants_upgrade(&self) -> bool {
        self.field("upgrade").is_some()
    }

    pub(crate) fn closes(&self) -> bool {
        self.field("connection")
            .is_some_and(|value| value.eq_ignore_ascii_case("close"))
    }

    /// How the body of a request is framed.
    pub(crate) fn body(&self) -> io::Result<Body> {
        if self.field("transfer-encoding").is_some() {
            return Ok(Body::Chunk);
        }
        match self.field("content-length") {
            Some(length) => length
                .parse()
                .map(Body::Length)
                .map_err(|_| invalid("Content-Length")),
            None => Ok(Body::Length(0)),
        }
    }
}

/// Id of the request with this path.
pub(crate) fn id(path: &str) -> io::Result<u32> {
    let id = path.strip_prefix("/r/").and_then(|id| id.parse().ok());
    id.ok_or_else(|| invalid("the path names no request"))
}

fn owned(fields: &[httparse::Header<'_>]) -> Vec<(String, String)> {
    fields
        .iter()
        .map(|field| {
            let value = String::from_utf8_lossy(field.value).into_owned();
            (field.name.to_ascii_lowercase(), value)
        })
        .collect()
}

/// Reads a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Body {
    /// This many bytes follow.
    Length(usize),
    /// Until the connection ends.
    Close,
    /// The size of a chunk follows.
    Chunk,
    /// This many bytes of a chunk follow.
    InChunk(usize),
    /// Trailers follow.
    Trailers,
}

/// A part of a body.
pub(crate) enum Part<'a> {
    Data(&'a [u8]),
    /// A line of the trailers.
    Trailer(&'a str),
}

impl Body {
    /// Passes what is there to `sink`. Returns whether the body is complete.
    pub(crate) fn decode(
        &mut self,
        buffer: &mut BytesMut,
        mut sink: impl FnMut(Part<'_>),
    ) -> io::Result<bool> {
        loop {
            match self {
                Self::Length(left) => {
                    let length = buffer.len().min(*left);
                    sink(Part::Data(&buffer[..length]));
                    buffer.advance(length);
                    *left -= length;
                    return Ok(*left == 0);
                }
                Self::Close => {
                    sink(Part::Data(buffer));
                    buffer.clear();
                    return Ok(false);
                }
                Self::Chunk => {
                    let Some(line) = take_line(buffer) else {
                        return Ok(false);
                    };
                    let size =
                        usize::from_str_radix(&line, 16).map_err(|_| invalid("size of a chunk"))?;
                    *self = match size {
                        0 => Self::Trailers,
                        size => Self::InChunk(size),
                    };
                }
                Self::InChunk(0) => match take_line(buffer).as_deref() {
                    None => return Ok(false),
                    Some("") => *self = Self::Chunk,
                    Some(_) => return Err(invalid("end of a chunk")),
                },
                Self::InChunk(left) => {
                    let length = buffer.len().min(*left);
                    if length == 0 {
                        return Ok(false);
                    }
                    sink(Part::Data(&buffer[..length]));
                    buffer.advance(length);
                    *left -= length;
                }
                Self::Trailers => match take_line(buffer).as_deref() {
                    None => return Ok(false),
                    Some("") => {
                        *self = Self::Length(0);
                        return Ok(true);
                    }
                    Some(line) => sink(Part::Trailer(line)),
                },
            }
        }
    }
}

fn take_line(buffer: &mut BytesMut) -> Option<String> {
    let end = buffer.windows(2).position(|two| two == b"\r\n")?;
    let line = String::from_utf8_lossy(&buffer[..end]).into_owned();
    buffer.advance(end + 2);
    Some(line)
}

/// The request that a line of trailers names.
pub(crate) fn trailer(line: &str) -> Option<u32> {
    let (name, value) = line.split_once(':')?;
    let is_ours = name.eq_ignore_ascii_case(TRAILER);
    is_ours.then(|| value.trim().parse().ok())?
}
