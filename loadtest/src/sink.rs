//! Backends in this process: blocking HTTP/1.1, one thread per connection.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

const HEAD_MAX: u64 = 64 * 1024;

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

/// Writes a response with this body.
pub(crate) fn respond(socket: &mut TcpStream, body: &str) -> io::Result<()> {
    let length = body.len();
    let response = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}");
    socket.write_all(response.as_bytes())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_read_up_to_the_body() {
        let mut request = &b"POST /x HTTP/1.1\r\nHost: h\r\ncontent-length: 3\r\n\r\nabcGET"[..];
        let length = body_length(&mut request).unwrap().unwrap();
        assert_eq!((length, request), (3, &b"abcGET"[..]));
        assert_eq!(body_length(&mut &b""[..]).unwrap(), None);
    }
}
