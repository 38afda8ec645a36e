//! Large bodies in both directions arrive unchanged, and the memory of the product stays bounded.

use std::io::{self, Read};
use std::net::TcpStream;
use std::path::Path;
use std::time::Instant;

use clap::Args;

use crate::client::Target;
use crate::demo::{Demo, Options as DemoOptions};
use crate::failure::{Failure, ensure};
use crate::machine::procfs::Memory;
use crate::report::{mebibytes, say};
use crate::sink::{self, Requests};

/// Options of the scenario.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of each body.
    #[arg(long, default_value_t = 10_000_000_000)]
    bytes: u64,
}

/// Largest resident memory of gateway and agent together (and of the echo during the download).
const MEMORY_MAX: u64 = 64 << 20;
/// Bytes of one read. The low byte of a position is the same in each piece.
const PIECE: usize = 64 * 1024;

pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    transfer(gateway, "download", None, options.bytes, download)?;
    let backend = format!("http://{}", sink::listen("sink", compare_upload)?);
    transfer(gateway, "upload", Some(backend), options.bytes, upload)
}

/// Starts the product, runs one transfer, and checks the peak of the memory.
fn transfer(
    gateway: &Path,
    what: &str,
    backend: Option<String>,
    bytes: u64,
    transfer: fn(&Target, u64) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let options = DemoOptions {
        backend,
        ..DemoOptions::default()
    };
    let demo = Demo::start(gateway, &options)?;
    let began = Instant::now();
    transfer(&demo.target, bytes)?;
    let seconds = began.elapsed().as_secs_f64();
    let peak = Memory::of(demo.pid())?.peak;
    say(format_args!(
        "{what}: all {bytes} bytes as sent, {:.0} MB/s, at most {:.1} MiB resident",
        bytes as f64 / 1e6 / seconds,
        mebibytes(peak)
    ));
    ensure(peak <= MEMORY_MAX, || {
        format!("{what}: more than {:.0} MiB", mebibytes(MEMORY_MAX))
    })?;
    demo.stop()
}

/// Downloads from the demo's echo, which sends the low byte of each position.
fn download(target: &Target, bytes: u64) -> Result<(), Failure> {
    let mut connection = target.connect()?;
    let head = connection.get(&format!("/bytes/{bytes}"))?;
    ensure(head.status == 200, || {
        format!("download: status {}", head.status)
    })?;
    let mut buffer = vec![0; PIECE];
    let mut position = 0;
    while position < bytes {
        let read = connection.read_body(&mut buffer)?;
        let is_as_sent = (position..)
            .zip(&buffer[..read])
            .all(|(position, byte)| *byte == position as u8);
        ensure(read > 0 && is_as_sent, || {
            format!("download: wrong bytes after {position}")
        })?;
        position += read as u64;
    }
    Ok(())
}

fn upload(target: &Target, bytes: u64) -> Result<(), Failure> {
    let answer = target
        .connect()?
        .upload("/upload", bytes, &mut Numbered::new(bytes))?;
    let said = String::from_utf8_lossy(&answer.body);
    ensure(
        answer.head.status == 200 && said == bytes.to_string(),
        || format!("upload: status {}: {said}", answer.head.status),
    )
}

/// Compares an upload with what was sent. Answers with the number of bytes before the first one
/// that differs.
fn compare_upload(request: &mut Requests, length: u64, socket: &mut TcpStream) -> io::Result<()> {
    let mut expected = Numbered::new(length);
    let mut received = request.take(length);
    let mut same = 0;
    let mut buffers = [vec![0; PIECE], vec![0; PIECE]];
    loop {
        let [sent, arrived] = &mut buffers;
        let count = expected.read(sent)?;
        received.read_exact(&mut arrived[..count])?;
        if count == 0 || sent[..count] != arrived[..count] {
            break;
        }
        same += count as u64;
    }
    io::copy(&mut received, &mut io::sink())?;
    sink::respond(socket, &same.to_string())
}

/// A body whose pieces begin with their number, which reveals lost, repeated and swapped pieces.
struct Numbered {
    position: u64,
    length: u64,
}

impl Numbered {
    fn new(length: u64) -> Self {
        Self {
            position: 0,
            length,
        }
    }
}

impl Read for Numbered {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let within = self.position % PIECE as u64;
        let left = (PIECE as u64 - within).min(self.length - self.position);
        let read = into.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let number = (self.position / PIECE as u64).to_be_bytes();
        for (byte, position) in into[..read].iter_mut().zip(within..) {
            let of_number = usize::try_from(position).ok().and_then(|it| number.get(it));
            *byte = of_number.copied().unwrap_or(position as u8);
        }
        self.position += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_bodies_have_their_length_and_numbers() {
        let mut bytes = Vec::new();
        Numbered::new(PIECE as u64 + 20)
            .read_to_end(&mut bytes)
            .unwrap();
        assert_eq!(bytes.len(), PIECE + 20);
        assert_eq!((bytes[7], bytes[8], bytes[300]), (0, 8, 44));
        assert_eq!((bytes[PIECE + 7], bytes[PIECE + 8]), (1, 8));
    }
}
