//! SIGINT, SIGTERM and SIGHUP for commands that must not leave files behind: they end the command
//! where it can remove what it has made.

use std::convert::Infallible;
use std::io::{self, Read, Write};
use std::thread;

use crossbeam_channel::{Receiver, RecvError, Sender, TryRecvError, bounded, select};
use futures_util::future::select_all;
use gw_shared::command::Failure;
use gw_shared::process::signal::is_ignored;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Bytes of one read.
const CHUNK: usize = 64 * 1024;
/// Chunks that are read ahead.
const CHUNKS: usize = 4;

/// Set by the first signal. A second one ends the process at once.
#[derive(Debug, Clone)]
pub(super) struct Interrupt {
    /// Disconnected by the first signal.
    signal: Receiver<Infallible>,
}

impl Interrupt {
    /// Registers the signals. They no longer end the process by default.
    pub(super) fn listen() -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::Run(format!("cannot register signals: {error}"));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .map_err(failed)?;
        let mut signals = Vec::new();
        {
            let _entered = runtime.enter();
            for kind in [
                SignalKind::interrupt(),
                SignalKind::terminate(),
                SignalKind::hangup(),
            ] {
                if !is_ignored(kind.as_raw_value()).map_err(failed)? {
                    signals.push(signal(kind).map_err(failed)?);
                }
            }
        }
        let (unset, signal) = bounded(0);
        let wait = move || runtime.block_on(wait(signals, unset));
        thread::Builder::new()
            .name("gw-signals".to_owned())
            .spawn(wait)
            .map_err(failed)?;
        Ok(Self { signal })
    }

    pub(super) fn is_set(&self) -> bool {
        self.signal.try_recv() == Err(TryRecvError::Disconnected)
    }

    fn check(&self) -> io::Result<()> {
        if self.is_set() {
            Err(interrupted())
        } else {
            Ok(())
        }
    }

    /// The failure of a command: `error`, or the signal that has caused it. `outcome` tells what
    /// was not made.
    pub(super) fn explain(&self, error: Failure, outcome: &str) -> Failure {
        if self.is_set() {
            Failure::Run(format!("{}; {outcome}", interrupted()))
        } else {
            error
        }
    }

    /// Opens a source and reads it in a thread of its own, so that a signal also ends the wait for
    /// its data.
    pub(super) fn open<R: Read, E: Send + 'static>(
        &self,
        open: impl FnOnce() -> Result<R, E> + Send + 'static,
    ) -> io::Result<Result<InterruptibleSource, E>> {
        let (opened, is_open) = bounded(1);
        let (sender, chunks) = bounded(CHUNKS);
        thread::Builder::new()
            .name("gw-source".to_owned())
            .spawn(move || match open() {
                // A send fails when the command does not read any more.
                Ok(source) => {
                    if opened.send(Ok(())).is_ok() {
                        read_all(source, &sender);
                    }
                }
                Err(error) => drop(opened.send(Err(error))),
            })?;
        let opened = select! {
            recv(is_open) -> opened => opened.map_err(|RecvError| io::Error::other("the thread \
                that opens it has ended"))?,
            recv(self.signal) -> _ => return Err(interrupted()),
        };
        Ok(opened.map(|()| InterruptibleSource {
            chunks,
            chunk: io::Cursor::default(),
            is_at_end: false,
            interrupt: self.clone(),
        }))
    }

    /// A writer that fails after a signal.
    pub(super) fn writer<W: Write>(&self, out: W) -> InterruptibleOutput<W> {
        InterruptibleOutput {
            out,
            interrupt: self.clone(),
        }
    }
}

fn interrupted() -> io::Error {
    io::Error::other("interrupted by a signal")
}

async fn wait(mut signals: Vec<Signal>, unset: Sender<Infallible>) {
    if signals.is_empty() {
        // All are ignored: the command runs to its end.
        std::future::pending::<()>().await;
    }
    next(&mut signals).await;
    drop(unset);
    next(&mut signals).await;
    std::process::exit(1);
}

async fn next(signals: &mut [Signal]) {
    select_all(signals.iter_mut().map(|signal| Box::pin(signal.recv()))).await;
}

/// Sends what `source` has. An empty chunk is its end.
fn read_all(mut source: impl Read, chunks: &Sender<io::Result<Vec<u8>>>) {
    loop {
        let mut chunk = vec![0; CHUNK];
        let read = match source.read(&mut chunk) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read.map(|count| {
                chunk.truncate(count);
                chunk
            }),
        };
        let is_last = !read.as_ref().is_ok_and(|chunk| !chunk.is_empty());
        // A send fails when the command does not read any more.
        if chunks.send(read).is_err() || is_last {
            return;
        }
    }
}

/// A source that is read in another thread.
#[derive(Debug)]
pub(super) struct InterruptibleSource {
    chunks: Receiver<io::Result<Vec<u8>>>,
    chunk: io::Cursor<Vec<u8>>,
    is_at_end: bool,
    interrupt: Interrupt,
}

impl Read for InterruptibleSource {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.interrupt.check()?;
        if self.chunk.position() == self.chunk.get_ref().len() as u64 && !self.is_at_end {
            let chunk = select! {
                recv(self.chunks) -> chunk => chunk.map_err(|RecvError| io::Error::other("the \
                    thread that reads it has ended"))??,
                recv(self.interrupt.signal) -> _ => return Err(interrupted()),
            };
            self.is_at_end = chunk.is_empty();
            self.chunk = io::Cursor::new(chunk);
        }
        self.chunk.read(buffer)
    }
}

/// A writer that fails after a signal.
#[derive(Debug)]
pub(super) struct InterruptibleOutput<W> {
    out: W,
    interrupt: Interrupt,
}

impl<W: Write> Write for InterruptibleOutput<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.interrupt.check()?;
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
