//! Backends in this process: blocking HTTP/1.1, one thread per connection. The sink answers uploads
//! with their length and digest.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use aws_lc_rs::digest::{Context, Digest, SHA256};
use serde::{Deserialize, Serialize};

/// Length and digest of a received body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Received {
    pub(crate) bytes: u64,
    pub(crate) sha256: String,
}

const HEAD_MAX: u64 = 64 * 1024;

/// Starts the sink on a port chosen by the kernel, until this process ends.
pub(crate) fn start() -> io::Result<SocketAddr> {
    listen("sink", |request, length, socket| {
        let answer = serde_json::to_string(&receive(request, length)?)?;
        socket.write_all(
            format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{answer}",
                answer.len()
            )
            .as_bytes(),
        )
    })
}

/// Starts a backend that reads a request body of the given length and writes a response with
/// `answer`.
pub(crate) fn listen(
    name: &'static str,
    answer: fn(&mut Requests, u64, &mut TcpStream) -> io::Result<()>,
) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let serve = move |mut socket: TcpStream| {
        let mut requests = BufReader::with_capacity(256 * 1024, socket.try_clone()?);
        while let Some(length) = body_length(&mut requests)? {
            answer(&mut requests, length, &mut socket)?;
        }
        Ok::<(), io::Error>(())
    };
    std::thread::Builder::new()
        .name(name.into())
        .spawn(move || {
            for socket in listener.incoming().flatten() {
                // A disconnect of the agent is ignored: the caller sees the failure.
                let _ = std::thread::Builder::new()
                    .name(name.into())
                    .spawn(move || serve(socket));
            }
        })?;
    Ok(address)
}

/// Received bytes of a connection.
pub(crate) type Requests = BufReader<TcpStream>;

/// Reads a request's head; `None` when the connection has ended.
fn body_length(reader: &mut impl BufRead) -> io::Result<Option<u64>> {
    let mut head = reader.take(HEAD_MAX);
    let mut length = 0;
    loop {
        let mut line = String::new();
        if head.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        if line == "\r\n" {
            return Ok(Some(length));
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value
                .trim()
                .parse()
                .map_err(|_| io::ErrorKind::InvalidData)?;
        }
    }
}

fn receive(reader: &mut impl BufRead, length: u64) -> io::Result<Received> {
    let mut body = reader.take(length);
    let mut hash = Context::new(&SHA256);
    let mut bytes = 0;
    loop {
        let part = body.fill_buf()?;
        if part.is_empty() {
            break;
        }
        let read = part.len();
        hash.update(part);
        bytes += read as u64;
        body.consume(read);
    }
    if bytes < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Received {
        bytes,
        sha256: hexadecimal(hash.finish()),
    })
}

/// A digest as text.
pub(crate) fn hexadecimal(digest: Digest) -> String {
    digest
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_counted_and_hashed() {
        let mut request = &b"POST /x HTTP/1.1\r\nHost: h\r\ncontent-length: 3\r\n\r\nabcGET"[..];
        let length = body_length(&mut request).unwrap().unwrap();
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad".to_owned();
        assert_eq!(
            receive(&mut request, length).unwrap(),
            Received { bytes: 3, sha256 }
        );
        assert_eq!(request, b"GET");
        assert!(receive(&mut request, 4).is_err());
        assert_eq!(body_length(&mut &b""[..]).unwrap(), None);
    }
}
