//! Large bodies in both directions arrive unchanged, and the memory of the product stays bounded.

use std::io::{self, Read};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aws_lc_rs::digest::{Context, SHA256};
use clap::Args;

use crate::client::Target;
use crate::demo::{Demo, Options as DemoOptions};
use crate::failure::{Failure, ensure};
use crate::machine::procfs;
use crate::machine::procfs::Memory;
use crate::report::{mebibytes, say};
use crate::sink::{self, Received, hexadecimal};

/// Options of the scenario.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of each body.
    #[arg(long, default_value_t = 10_000_000_000)]
    bytes: u64,
}

/// Largest resident memory of gateway and agent together (and of the echo during the download).
const MEMORY_MAX: u64 = 64 << 20;
const SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// Period of the pattern that the demo's echo sends.
const PIECE: usize = 64 * 1024;
/// Name of the echo's thread in the demo. Its CPU time is reported separately.
const ECHO_THREAD: &str = "gw-echo";

pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    // Hashes before the transfers, because hashing during them takes CPU from the product.
    say(format_args!(
        "hashing {} bytes for each direction",
        options.bytes
    ));
    let echo = Content::echo(options.bytes);
    let numbered = Content::numbered(options.bytes);
    let downloaded = digest(echo)?;
    let uploaded = digest(numbered)?;

    let demo = Demo::start(gateway, &DemoOptions::default())?;
    let measured = Measurement::start(&demo)?;
    let received = download(&demo.target, options.bytes)?;
    let memory = measured.finish("download", options.bytes)?;
    judge("download", &received, &downloaded, memory)?;
    demo.stop()?;

    let backend = sink::start()?;
    let demo = Demo::start(
        gateway,
        &DemoOptions {
            backend: Some(format!("http://{backend}")),
            ..Default::default()
        },
    )?;
    let measured = Measurement::start(&demo)?;
    let received = upload(&demo.target, options.bytes)?;
    let memory = measured.finish("upload", options.bytes)?;
    judge("upload", &received, &uploaded, memory)?;
    demo.stop()
}

/// Downloads from the demo's echo and compares every byte with the pattern.
fn download(target: &Target, bytes: u64) -> Result<Received, Failure> {
    let mut connection = target.connect()?;
    let head = connection.get(&format!("/bytes/{bytes}"))?;
    ensure(head.status == 200, || {
        format!("download: status {}", head.status)
    })?;
    // Twice the pattern, so that the expected bytes of every read are one slice.
    let expected: Vec<u8> = (0..2 * PIECE).map(|position| position as u8).collect();
    let mut buffer = vec![0; PIECE];
    let mut hash = Context::new(&SHA256);
    let mut position = 0u64;
    loop {
        let read = connection.read_body(&mut buffer)?;
        if read == 0 {
            return Ok(Received {
                bytes: position,
                sha256: hexadecimal(hash.finish()),
            });
        }
        let offset = usize::try_from(position % PIECE as u64).unwrap_or_default();
        let same = buffer[..read] == expected[offset..offset + read];
        ensure(same, || {
            format!(
                "download: wrong bytes between {position} and {}",
                position + read as u64
            )
        })?;
        hash.update(&buffer[..read]);
        position += read as u64;
    }
}

/// Uploads to the sink, which answers with length and digest.
fn upload(target: &Target, bytes: u64) -> Result<Received, Failure> {
    let answer = target
        .connect()?
        .upload("/upload", bytes, &mut Content::numbered(bytes))?;
    ensure(answer.head.status == 200, || {
        format!(
            "upload: status {}: {}",
            answer.head.status,
            String::from_utf8_lossy(&answer.body)
        )
    })?;
    Ok(serde_json::from_slice(&answer.body)?)
}

fn judge(
    what: &str,
    received: &Received,
    expected: &Received,
    memory: Memory,
) -> Result<(), Failure> {
    ensure(received == expected, || {
        format!("{what}: {received:?} arrived, not {expected:?}")
    })?;
    say(format_args!(
        "{what}: all {} bytes as sent, SHA-256 {}",
        received.bytes, received.sha256
    ));
    ensure(memory.peak <= MEMORY_MAX, || {
        format!(
            "{what}: {:.1} MiB resident, over {:.0}",
            mebibytes(memory.peak),
            mebibytes(MEMORY_MAX)
        )
    })
}

fn digest(mut content: Content) -> Result<Received, Failure> {
    let mut buffer = vec![0; PIECE];
    let mut hash = Context::new(&SHA256);
    let mut bytes = 0;
    loop {
        let read = content.read(&mut buffer)?;
        if read == 0 {
            return Ok(Received {
                bytes,
                sha256: hexadecimal(hash.finish()),
            });
        }
        hash.update(&buffer[..read]);
        bytes += read as u64;
    }
}

/// A body that is generated while it is read.
struct Content {
    left: u64,
    piece: Vec<u8>,
    /// Bytes of `piece` already read.
    used: usize,
    /// Number of the next piece, if pieces are numbered.
    next: Option<u64>,
}

impl Content {
    /// The pattern of the demo's echo: the low byte of each position.
    fn echo(length: u64) -> Self {
        let piece: Vec<u8> = (0..PIECE).map(|position| position as u8).collect();
        Self {
            left: length,
            used: piece.len(),
            piece,
            next: None,
        }
    }

    /// The pattern with numbered pieces, which reveals lost, repeated and swapped pieces.
    fn numbered(length: u64) -> Self {
        Self {
            next: Some(0),
            ..Self::echo(length)
        }
    }
}

impl Read for Content {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.used == self.piece.len() {
            self.used = 0;
            if let Some(next) = &mut self.next {
                self.piece[..8].copy_from_slice(&next.to_be_bytes());
                *next += 1;
            }
        }
        let left = usize::try_from(self.left).unwrap_or(usize::MAX);
        let read = into.len().min(self.piece.len() - self.used).min(left);
        into[..read].copy_from_slice(&self.piece[self.used..self.used + read]);
        self.used += read;
        self.left -= read as u64;
        Ok(read)
    }
}

/// Time, CPU time and memory of a demo during one transfer.
struct Measurement {
    pid: u32,
    start: Instant,
    cpu: Duration,
    echo_cpu: Duration,
    /// Dropped to stop the sampling.
    stop: mpsc::Sender<()>,
    sampler: JoinHandle<Samples>,
}

#[derive(Default)]
struct Samples {
    count: usize,
    resident_max: u64,
}

impl Measurement {
    fn start(demo: &Demo) -> Result<Self, Failure> {
        let pid = demo.pid();
        let (stop, stopped) = mpsc::channel();
        let sampler = std::thread::Builder::new()
            .name("memory".into())
            .spawn(move || sample(pid, &stopped))?;
        let cpu = procfs::cpu(pid);
        let echo_cpu = procfs::cpu_of_thread(pid, ECHO_THREAD);
        Ok(Self {
            pid,
            start: Instant::now(),
            cpu,
            echo_cpu,
            stop,
            sampler,
        })
    }

    /// Prints duration, CPU time and memory of the transfer.
    fn finish(self, what: &str, bytes: u64) -> Result<Memory, Failure> {
        let elapsed = self.start.elapsed().as_secs_f64();
        let echo = procfs::cpu_of_thread(self.pid, ECHO_THREAD).saturating_sub(self.echo_cpu);
        let product = procfs::cpu(self.pid)
            .saturating_sub(self.cpu)
            .saturating_sub(echo);
        let memory = Memory::of(self.pid)?;
        drop(self.stop);
        let samples = self
            .sampler
            .join()
            .map_err(|_| Failure::new("the memory sampler panicked"))?;
        let gigabytes = bytes as f64 / 1e9;
        say(format_args!(
            "{what}: {gigabytes:.2} GB in {elapsed:.1} s, {:.0} MB/s; CPU {:.2} s/GB (gateway and \
             agent), {:.2} s/GB (echo)",
            gigabytes * 1e3 / elapsed,
            product.as_secs_f64() / gigabytes,
            echo.as_secs_f64() / gigabytes,
        ));
        say(format_args!(
            "{what}: memory {:.1} MiB at most in {} samples, VmHWM {:.1} MiB",
            mebibytes(samples.resident_max),
            samples.count,
            mebibytes(memory.peak),
        ));
        Ok(memory)
    }
}

/// Samples the memory of a process until `stop` is dropped.
fn sample(pid: u32, stop: &mpsc::Receiver<()>) -> Samples {
    let mut samples = Samples::default();
    loop {
        if let Ok(memory) = Memory::of(pid) {
            samples.count += 1;
            samples.resident_max = samples.resident_max.max(memory.resident);
        }
        if stop.recv_timeout(SAMPLE_EVERY) != Err(RecvTimeoutError::Timeout) {
            return samples;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_bodies_have_their_length_and_numbers() {
        let mut bytes = Vec::new();
        Content::numbered(PIECE as u64 + 20)
            .read_to_end(&mut bytes)
            .unwrap();
        assert_eq!(bytes.len(), PIECE + 20);
        assert_eq!((bytes[7], bytes[8], bytes[300]), (0, 8, 44));
        assert_eq!((bytes[PIECE + 7], bytes[PIECE + 8]), (1, 8));
        let mut echo = Vec::new();
        Content::echo(70_000).read_to_end(&mut echo).unwrap();
        assert!(
            echo.len() == 70_000
                && echo
                    .iter()
                    .enumerate()
                    .all(|(position, byte)| *byte == position as u8)
        );
    }

    #[test]
    fn digests_match_the_content() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(
            digest(Content::echo(0)).unwrap(),
            Received {
                bytes: 0,
                sha256: empty.to_owned()
            }
        );
        assert_ne!(
            digest(Content::echo(100_000)).unwrap(),
            digest(Content::numbered(100_000)).unwrap()
        );
    }
}
