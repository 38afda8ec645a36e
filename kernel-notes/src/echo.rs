//! An echo server on the reactor in two styles of reading, with its CPU cost.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::rc::Rc;
use std::task::ready;

use futures_util::future::join_all;
use gw_shared::net::Socket;
use gw_shared::runtime::Driver;
use monoio::io::{AsyncReadRent, AsyncWriteRentExt};
use monoio::net::TcpStream;

use crate::load::Load;
use crate::measure::{self, Spent, Stamp};

/// How the server reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Style {
    /// Waits for readiness on the ring, then calls `recv(2)` into a buffer of the thread, and
    /// `sendmsg(2)`. The product uses this style.
    Readiness,
    /// Gives the ring a buffer to read into and to write from, as monoio does.
    Completion,
}

/// Buffer size of one read, in both styles.
pub(crate) const BUFFER: usize = 64 * 1024;
/// Fraction of the load before the measurement, in which buffers grow and caches fill.
const WARM_UP: usize = 10;

thread_local! {
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; BUFFER]);
}

/// Serves `load` on one core. Returns the cost per message of the server's thread.
pub(crate) fn cost_per_message(driver: Driver, style: Style, load: Load) -> Spent {
    let meter = move || Meter::of(load);
    let spent = drive(load, move |listener| {
        driver
            .block_on(
                async move { serve(listener, load.connections, style, Rc::new(meter())).await },
            )
            .unwrap()
    });
    per_message(spent, load)
}

/// Runs a server on one core, driven by a thread on the other, and returns what the server returns
/// at the end of the load.
pub(crate) fn drive<T: Send + 'static>(
    load: Load,
    serve: impl FnOnce(TcpListener) -> T + Send + 'static,
) -> T {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        measure::pin(measure::MEASURED_CORE);
        serve(listener)
    });
    let client = std::thread::spawn(move || {
        measure::pin(measure::DRIVING_CORE);
        load.drive(address);
    });
    client.join().unwrap();
    server.join().unwrap()
}

/// Divides what a [`Meter`] of this load has measured by the number of messages.
pub(crate) fn per_message(spent: Spent, load: Load) -> Spent {
    let measured = (load.bytes() - load.bytes() / WARM_UP) as f64 / load.message as f64;
    Spent {
        cpu: spent.cpu.div_f64(measured),
        wall: spent.wall.div_f64(measured),
    }
}

/// Accepts this many connections and echoes until they end.
pub(crate) async fn serve(
    listener: TcpListener,
    connections: usize,
    style: Style,
    meter: Rc<Meter>,
) -> Spent {
    let listener = monoio::net::TcpListener::from_std(listener).unwrap();
    let mut echoes = Vec::new();
    for _ in 0..connections {
        let (stream, _) = listener.accept().await.unwrap();
        let meter = Rc::clone(&meter);
        // Peers that disconnect end their echo, with or without an error.
        echoes.push(match style {
            Style::Readiness => monoio::spawn(async move {
                drop(echo_when_ready(Socket::new(stream).unwrap(), &meter).await);
            }),
            Style::Completion => {
                monoio::spawn(async move { drop(echo_what_completes(stream, &meter).await) })
            }
        });
    }
    join_all(echoes).await;
    meter.spent()
}

async fn echo_when_ready(socket: Socket, meter: &Meter) -> io::Result<()> {
    loop {
        let mut rest = Vec::new();
        let receive_and_send = std::future::poll_fn(|cx| {
            SCRATCH.with_borrow_mut(|scratch| {
                let received = ready!(socket.poll_recv(cx, scratch))?;
                let sent = match socket.try_send(&[IoSlice::new(&scratch[..received])]) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                    result => result?,
                };
                rest.extend_from_slice(&scratch[sent..received]);
                std::task::Poll::Ready(io::Result::Ok(received))
            })
        });
        let received = receive_and_send.await?;
        if received == 0 {
            return Ok(());
        }
        socket.send_all(&mut [IoSlice::new(&rest)]).await?;
        meter.count(received);
    }
}

async fn echo_what_completes(mut stream: TcpStream, meter: &Meter) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        let (received, filled) = stream.read(buffer).await;
        let received = received?;
        if received == 0 {
            return Ok(());
        }
        let (sent, used) = stream.write_all(filled).await;
        sent?;
        buffer = used;
        meter.count(received);
    }
}

/// Computes `steps` steps. The number of instructions is fixed, so interruptions show in the
/// measured time.
fn work(steps: u32) {
    let mix = |state: u64, step| (state ^ u64::from(step)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    std::hint::black_box((0..steps).fold(std::hint::black_box(1), mix));
}

/// Reads the clocks after the warm-up and after the last echo.
pub(crate) struct Meter {
    from: usize,
    to: usize,
    work: u32,
    echoed: Cell<usize>,
    start: Cell<Option<Stamp>>,
    end: Cell<Option<Stamp>>,
}

impl Meter {
    pub(crate) fn new(from: usize, to: usize, work: u32) -> Self {
        Self {
            from,
            to,
            work,
            echoed: Cell::new(0),
            start: Cell::new(None),
            end: Cell::new(None),
        }
    }

    /// A meter of the whole load but for the warm-up.
    pub(crate) fn of(load: Load) -> Self {
        Self::new(load.bytes() / WARM_UP, load.bytes(), load.work)
    }

    pub(crate) fn count(&self, bytes: usize) {
        work(self.work);
        let before = self.echoed.get();
        let now = self.echoed.get() + bytes;
        self.echoed.set(now);
        if before < self.from && self.from <= now {
            self.start.set(Some(Stamp::thread()));
        }
        if before < self.to && self.to <= now {
            self.end.set(Some(Stamp::thread()));
        }
    }

    pub(crate) fn spent(&self) -> Spent {
        match (self.start.get(), self.end.get()) {
            (Some(start), Some(end)) => start.until(end),
            _ => Spent::default(),
        }
    }
}
