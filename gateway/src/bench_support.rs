//! What benches/ measures of the crate-private parts: workers with nothing to do, reached through their mailboxes, and
//! pipes between them. Not an interface.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use gw_shared::runtime::Driver;
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::server::ResolvesServerCertUsingSni;

use crate::config::HandOver;
use crate::hostname::Region;
use crate::limits;
use crate::mailbox::{Mailbox, Message, mailbox};
use crate::ownership::WorkerId;
use crate::pipe::{self, Frame};
use crate::store::Directory;
use crate::tls::ServerConfigs;
use crate::worker::{self, Peers, Setup};

/// Longest wait for a worker: only one that has ended takes longer.
const WITHIN: Duration = Duration::from_secs(10);

/// A worker of the product without services or connections, on a thread of its own.
pub struct IdleWorker {
    mailbox: Mailbox,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl IdleWorker {
    /// Starts worker number `id`, pinned to the core of that number.
    pub fn start(id: usize) -> io::Result<Self> {
        let driver = Driver::choose().map_err(io::Error::other)?;
        let (mailbox, inbox) = mailbox(limits::MAILBOX);
        let peers = Peers {
            mailboxes: vec![mailbox.clone(); id + 1],
            busy: std::iter::repeat_with(Default::default).take(id + 1).collect(),
        };
        let setup = Setup {
            id: WorkerId(id),
            inbox,
            peers: Arc::new(peers),
            listener: TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?,
            region: Region::new("bench", "localhost"),
            directory: Arc::default(),
            certificates: Arc::new(no_certificates()?),
            hand_over: HandOver::Always,
            connection_limit: 1,
        };
        let thread = std::thread::Builder::new().spawn(move || worker::run(setup, &driver))?;
        Ok(Self { mailbox, thread: Some(thread) })
    }

    /// Posts `messages` messages as fast as there is room for them and waits until the worker has handled them all.
    ///
    /// Each is an empty directory of its own: the cheapest message that owns memory, as a request does.
    pub fn post_and_drain(&self, messages: usize) -> io::Result<()> {
        for _ in 0..messages {
            self.post(Message::Directory(Arc::new(Directory::default())))?;
        }
        self.round_trip()
    }

    /// Has the worker report, and waits for it: everything posted before has been handled then.
    pub fn round_trip(&self) -> io::Result<()> {
        let (reply, report) = crossbeam_channel::bounded(1);
        self.post(Message::Scrape(reply))?;
        report.recv_timeout(WITHIN).map(drop).map_err(io::Error::other)
    }

    fn post(&self, message: Message) -> io::Result<()> {
        self.mailbox.post_blocking(message).map_err(|()| io::Error::other("the worker has ended"))
    }
}

impl Drop for IdleWorker {
    fn drop(&mut self) {
        // Fails only when it has ended already.
        let _ = self.post(Message::Stop);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// A configuration that no handshake succeeds with: none is tried.
fn no_certificates() -> io::Result<ServerConfigs> {
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(ResolvesServerCertUsingSni::new()));
    let config = Arc::new(config);
    Ok(ServerConfigs { public: Arc::clone(&config), tunnel: config })
}

/// Plays `frames` frames of `size` bytes back and forth between two workers through a pair of pipes, `hops` hops in
/// all, and returns how long that took. At most as many frames as a pipe has room for.
pub fn rally(near: &IdleWorker, far: &IdleWorker, frames: usize, size: usize, hops: usize) -> io::Result<Duration> {
    let frames = frames.clamp(1, limits::PIPE_FRAMES);
    let (to_far, from_near) = pipe::pipe(&near.mailbox, &far.mailbox);
    let (to_near, from_far) = pipe::pipe(&far.mailbox, &near.mailbox);
    let hops_left = Arc::new(AtomicUsize::new(hops.max(1)));
    let (done, wait) = crossbeam_channel::bounded(1);
    let player = |receiver, sender| {
        let ends = Mutex::new(Some((receiver, sender)));
        Arc::new(Player { ends, hops_left: Arc::clone(&hops_left), done: done.clone() })
    };
    let players = [player(from_far, to_far), player(from_near, to_near)];
    // Finds nothing yet, and registers for what comes.
    players.iter().for_each(|player| Arc::clone(player).wake());

    let start = Instant::now();
    let served = (0..frames).all(|_| players[0].serve(Frame::Data(vec![0; size].into())));
    let finished = served && wait.recv_timeout(WITHIN).is_ok();
    let took = start.elapsed();
    // Each pipe knows its player's waker, and the player its pipes: taken apart, or neither would ever be freed.
    players.iter().for_each(|player| drop(player.ends().take()));
    if finished { Ok(took) } else { Err(io::Error::other("the rally ended early")) }
}

type Ends = Option<(pipe::Receiver, pipe::Sender)>;

/// A task without a reactor: it runs where its wake is delivered, on its worker.
struct Player {
    ends: Mutex<Ends>,
    hops_left: Arc<AtomicUsize>,
    done: crossbeam_channel::Sender<()>,
}

impl Player {
    fn serve(&self, frame: Frame) -> bool {
        self.ends().as_mut().is_some_and(|(_, sender)| send_now(sender, frame))
    }

    fn ends(&self) -> std::sync::MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what has arrived and plays it back; the last hop ends the rally.
    fn play(&self, receiver: &mut pipe::Receiver, sender: &mut pipe::Sender, cx: &mut Context<'_>) {
        while let Poll::Ready(Ok(frame)) = receiver.poll_receive(cx) {
            let one_less = |left: usize| left.checked_sub(1);
            match self.hops_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less) {
                Ok(1) => drop(self.done.try_send(())),
                Ok(_) => drop(send_now(sender, frame)),
                Err(_) => {}
            }
        }
    }
}

impl Wake for Player {
    fn wake(self: Arc<Self>) {
        let waker = Waker::from(Arc::clone(&self));
        if let Some((receiver, sender)) = self.ends().as_mut() {
            self.play(receiver, sender, &mut Context::from_waker(&waker));
        }
    }
}

/// Sends a frame that there is room for.
fn send_now(sender: &mut pipe::Sender, frame: Frame) -> bool {
    let sending = pin!(sender.send(frame));
    matches!(sending.poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Ok(())))
}

/// One frame through a pipe whose ends are on the same thread and never wait: queue and credit alone.
pub struct LocalPipe(pipe::Sender, pipe::Receiver);

impl LocalPipe {
    pub fn new(worker: &IdleWorker) -> Self {
        let (sender, receiver) = pipe::pipe(&worker.mailbox, &worker.mailbox);
        Self(sender, receiver)
    }

    /// Sends `data` and receives it; whether it came through.
    pub fn pass(&mut self, data: Bytes) -> bool {
        send_now(&mut self.0, Frame::Data(data))
            && matches!(self.1.poll_receive(&mut Context::from_waker(Waker::noop())), Poll::Ready(Ok(Frame::Data(_))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_workers_handle_their_mail_and_play() {
        let workers = [IdleWorker::start(0).unwrap(), IdleWorker::start(1).unwrap()];
        workers[0].post_and_drain(100_000).unwrap();
        for frames in [1, limits::PIPE_FRAMES] {
            rally(&workers[0], &workers[1], frames, 100, 10_000).unwrap();
        }
        assert!(LocalPipe::new(&workers[0]).pass(Bytes::from_static(b"x")));
    }
}
