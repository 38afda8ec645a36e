//! Messages of HTTP/1.1 as peers of the product read and write them: apart from the product's own
//! code, which does not judge itself.

use std::io;

use bytes::{Buf, BytesMut};

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Takes the bytes of a head from `buffer`, once it is there.
pub fn take_head(buffer: &mut BytesMut) -> Option<BytesMut> {
    let end = buffer.windows(4).position(|four| four == b"\r\n\r\n")?;
    Some(buffer.split_to(end + 4))
}

/// A head: its first line and fields, with names in small letters.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// Method of a request.
    pub method: String,
    /// Target of a request.
    pub target: String,
    /// Status of a response.
    pub status: u16,
    fields: Vec<(String, String)>,
}

impl Head {
    /// Parses the head of a request.
    pub fn request(bytes: &[u8]) -> io::Result<Self> {
        let mut fields = [httparse::EMPTY_HEADER; 100];
        let mut request = httparse::Request::new(&mut fields);
        match request.parse(bytes) {
            Ok(httparse::Status::Complete(_)) => {}
            _ => return Err(invalid("not a request")),
        }
        Ok(Self {
            method: request.method.unwrap_or_default().to_owned(),
            target: request.path.unwrap_or_default().to_owned(),
            status: 0,
            fields: owned(request.headers),
        })
    }

    /// Parses the head of a response.
    pub fn response(bytes: &[u8]) -> io::Result<Self> {
        let mut fields = [httparse::EMPTY_HEADER; 100];
        let mut response = httparse::Response::new(&mut fields);
        match response.parse(bytes) {
            Ok(httparse::Status::Complete(_)) => {}
            _ => return Err(invalid("not a response")),
        }
        Ok(Self {
            status: response.code.unwrap_or(0),
            fields: owned(response.headers),
            ..Self::default()
        })
    }

    /// Parses the head of a response without the empty line at its end.
    pub fn parse(head: &[u8]) -> Option<Self> {
        Self::response(&[head, b"\r\n\r\n"].concat()).ok()
    }

    /// The first field with this name, which is in lower case.
    pub fn field(&self, name: &str) -> Option<&str> {
        let mut fields = self.fields.iter();
        fields
            .find(|(field, _)| field == name)
            .map(|(_, value)| value.as_str())
    }

    /// Whether a request asks for a switch of protocols.
    pub fn wants_upgrade(&self) -> bool {
        self.field("upgrade").is_some()
    }

    /// Whether the connection ends after the message.
    pub fn closes(&self) -> bool {
        self.field("connection")
            .is_some_and(|value| value.eq_ignore_ascii_case("close"))
    }

    /// Value of `Content-Length`, if there is one.
    pub fn content_length(&self) -> io::Result<Option<u64>> {
        let length = self.field("content-length");
        let length = length.map(|length| length.parse().map_err(|_| invalid("Content-Length")));
        length.transpose()
    }

    /// How the body of a request is framed.
    pub fn body(&self) -> io::Result<Body> {
        if self.field("transfer-encoding").is_some() {
            return Ok(Body::Chunk);
        }
        Ok(Body::Length(self.content_length()?.unwrap_or(0) as usize))
    }
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
pub enum Body {
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
pub enum Part<'a> {
    Data(&'a [u8]),
    /// A line of the trailers.
    Trailer(&'a str),
}

impl Body {
    /// Passes what is there to `sink`. Returns whether the body is complete.
    pub fn decode(
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

/// A piece of a body, as a chunk if the body is chunked.
pub fn piece(data: &[u8], is_chunked: bool) -> Vec<u8> {
    match is_chunked {
        true => [format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat(),
        false => data.to_vec(),
    }
}

/// A response with status 200 and this body.
pub fn ok(body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_parsed() {
        let head = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After:  3 \r\nX: a:b\r\n\r\n";
        let head = Head::response(head).unwrap();
        assert_eq!(head.status, 429);
        assert_eq!(
            (head.field("retry-after"), head.field("x"), head.field("y")),
            (Some("3"), Some("a:b"), None)
        );
        assert!(Head::response(b"SSH-2.0\r\n\r\n").is_err());
        let head = b"POST /a HTTP/1.1\r\nContent-Length: 7\r\n\r\n";
        let head = Head::request(head).unwrap();
        assert_eq!((&head.method[..], &head.target[..]), ("POST", "/a"));
        assert_eq!(head.body().unwrap(), Body::Length(7));
    }

    #[test]
    fn a_chunked_body_is_read_in_any_pieces() {
        let bytes = [
            &piece(b"one ", true)[..],
            &piece(b"two", true),
            b"0\r\nA: b\r\n\r\nGET",
        ];
        let bytes = bytes.concat();
        for size in 1..bytes.len() {
            let mut body = Body::Chunk;
            let mut buffer = BytesMut::new();
            let mut read = Vec::new();
            let mut trailers = Vec::new();
            let mut is_complete = false;
            for part in bytes.chunks(size) {
                buffer.extend_from_slice(part);
                is_complete = is_complete
                    || body
                        .decode(&mut buffer, |part| match part {
                            Part::Data(data) => read.extend_from_slice(data),
                            Part::Trailer(line) => trailers.push(line.to_owned()),
                        })
                        .unwrap();
            }
            assert!(is_complete && read == b"one two" && trailers == ["A: b"]);
            assert_eq!(buffer, "GET");
        }
    }
}
