//! Entry points of benches/ into private modules: idle workers, their mailboxes, and pipes between
//! them. Not a public interface.

use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::limits;
use bytes::Bytes;
use gw_base::mailbox::{Mailbox, mailbox};
use gw_region::owners::ownership::WorkerId;
use gw_shared::http::Part;
use gw_shared::runtime::{self, Driver};
use gw_store::Directory;
use gw_telemetry::counters::Scrape;
use gw_telemetry::counters::services::{Sample, ServiceCounters};

use crate::pipe;
use crate::support::memory_worker::setup;
use crate::upstream::Frame;
use crate::worker::{self, WorkerHandles, WorkerMessage};

/// Longest wait for a worker.
const WITHIN: Duration = Duration::from_secs(10);

/// A worker without services or connections, on its own thread.
pub struct IdleWorker {
    mailbox: Mailbox<WorkerMessage>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl IdleWorker {
    /// Starts worker `id`, pinned to the core of that number.
    pub fn start(id: usize) -> io::Result<Self> {
        let driver = Driver::choose().map_err(io::Error::other)?;
        let (mailbox, inbox) = mailbox(limits::MAILBOX);
        let setup = setup(WorkerId(id), &mailbox, Arc::default())?;
        let thread = std::thread::Builder::new()
            .spawn(move || worker::run(setup, inbox, crossbeam_channel::bounded(1).0, &driver))?;
        Ok(Self {
            mailbox,
            thread: Some(thread),
        })
    }

    /// Posts `messages` messages as fast as there is room for them and waits until the worker has
    /// handled them all.
    ///
    /// Each message is an empty directory: the cheapest message that owns memory, as a request
    /// does.
    pub fn post_and_drain(&self, messages: usize) -> io::Result<()> {
        for _ in 0..messages {
            self.post(WorkerMessage::Directory(Arc::new(Directory::default())))?;
        }
        self.round_trip()
    }

    /// Waits for a report of the worker, which it sends after handling all earlier messages.
    pub fn round_trip(&self) -> io::Result<()> {
        let (reply, report) = crossbeam_channel::bounded(1);
        self.post(WorkerMessage::Scrape(Scrape {
            reply,
            with_services: false,
        }))?;
        report
            .recv_timeout(WITHIN)
            .map(drop)
            .map_err(io::Error::other)
    }

    /// Runs a task on the worker's reactor.
    fn run<F>(&self, task: impl FnOnce() -> F + Send + 'static)
    where
        F: Future<Output = ()> + 'static,
    {
        let job = WorkerTask(Mutex::new(Some(Box::new(move || runtime::spawn(task())))));
        let (sender, mut receiver) = pipe_between(&self.mailbox, &self.mailbox);
        let waker = Waker::from(Arc::new(job));
        // Registers the waker. Dropping the sender makes the worker wake it.
        drop(receiver.poll_receive(&mut Context::from_waker(&waker)));
        drop(sender);
    }

    fn post(&self, message: WorkerMessage) -> io::Result<()> {
        self.mailbox
            .post_blocking(message)
            .map_err(|_| io::Error::other("the worker has ended"))
    }
}

impl Drop for IdleWorker {
    fn drop(&mut self) {
        // Fails only if the worker has ended.
        let _ = self.post(WorkerMessage::Stop);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn pipe_between(
    sender: &Mailbox<WorkerMessage>,
    receiver: &Mailbox<WorkerMessage>,
) -> (pipe::Sender<Frame>, pipe::Receiver<Frame>) {
    pipe::pipe(
        WorkerId(0),
        WorkerId(1),
        WorkerHandles::new(vec![sender.clone(), receiver.clone()]),
    )
}

/// Passes `frames` frames of `size` bytes back and forth between two workers through a pipe each
/// way, `hops` hops in total. Returns the time taken. The number of frames is limited to the
/// capacity of a pipe.
pub fn rally(
    near: &IdleWorker,
    far: &IdleWorker,
    frames: usize,
    size: usize,
    hops: usize,
) -> io::Result<Duration> {
    let (to_far, from_near) = pipe_between(&near.mailbox, &far.mailbox);
    let (to_near, from_far) = pipe_between(&far.mailbox, &near.mailbox);
    let hops_left = Arc::new(AtomicUsize::new(hops.max(1)));
    let (done, wait) = crossbeam_channel::bounded(2);
    let left = Arc::clone(&hops_left);
    let over = done.clone();
    far.run(move || play(from_near, to_near, left, over));
    let start = Instant::now();
    near.run(move || async move {
        for _ in 0..frames.clamp(1, limits::PIPE_FRAMES) {
            drop(
                to_far
                    .send(Frame::Part(Part::Data(vec![0; size].into())))
                    .await,
            );
        }
        play(from_far, to_far, hops_left, done).await;
    });
    wait.recv_timeout(WITHIN)
        .map(|()| start.elapsed())
        .map_err(io::Error::other)
}

/// Sends received frames back until the last hop. Then drops its pipes, which ends the other side
/// too.
async fn play(
    mut receiver: pipe::Receiver<Frame>,
    sender: pipe::Sender<Frame>,
    hops_left: Arc<AtomicUsize>,
    done: crossbeam_channel::Sender<()>,
) {
    while let Ok(frame) = receiver.receive().await {
        if hops_left.fetch_sub(1, Ordering::Relaxed) == 1 {
            // Fails only if `rally` has timed out.
            let _ = done.try_send(());
            return;
        }
        if sender.send(frame).await.is_err() {
            return;
        }
        // Relaying yields after a frame too.
        runtime::yield_now().await;
    }
}

/// A task that a worker starts when this waker is woken on it. Wakes are the only messages that can
/// carry code.
struct WorkerTask(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Wake for WorkerTask {
    fn wake(self: Arc<Self>) {
        let job = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(job) = job {
            job();
        }
    }
}

/// Sends a frame without waiting. Returns whether there was room.
fn send_now(sender: &pipe::Sender<Frame>, frame: Frame) -> bool {
    let sending = pin!(sender.send(frame));
    matches!(
        sending.poll(&mut Context::from_waker(Waker::noop())),
        Poll::Ready(Ok(()))
    )
}

/// A pipe with both ends on one thread, to measure queue and credit without wakes.
pub struct LocalPipe(pipe::Sender<Frame>, pipe::Receiver<Frame>);

impl LocalPipe {
    /// Creates a pipe with both ends at `worker`.
    pub fn new(worker: &IdleWorker) -> Self {
        let (sender, receiver) = pipe_between(&worker.mailbox, &worker.mailbox);
        Self(sender, receiver)
    }

    /// Sends `data` and receives it. Returns whether it arrived.
    pub fn pass(&mut self, data: Bytes) -> bool {
        send_now(&self.0, Frame::Part(Part::Data(data)))
            && matches!(
                self.1.poll_receive(&mut Context::from_waker(Waker::noop())),
                Poll::Ready(Ok(Frame::Part(Part::Data(_))))
            )
    }
}

/// Request counters of the services of a worker.
pub struct LabelCounts {
    services: ServiceCounters,
    labels: Vec<Arc<str>>,
}

impl LabelCounts {
    /// Counters of `services` services with one request each.
    pub fn new(services: usize) -> Self {
        let labels = (0..services)
            .map(|number| format!("acme--svc{number}").into())
            .collect();
        let counts = Self {
            services: ServiceCounters::default(),
            labels,
        };
        (0..services).for_each(|number| counts.count(number));
        counts
    }

    /// Counts a request of service `number`.
    pub fn count(&self, number: usize) {
        let sample = Sample {
            status: Some(200),
            code: None,
            bytes_in: 10,
            bytes_out: 1000,
            total: Duration::from_micros(900),
            response_head: Some(Duration::from_micros(800)),
            is_left_out: false,
        };
        let label = &self.labels[number % self.labels.len()];
        self.services.ended(label, 1, sample);
    }
}
