//! Scenarios of a pipe. Tasks assert nothing: the checker does not survive their destructors after
//! a panic.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Waker;

use loom::thread;

use super::super::mailbox::{Mailbox, mailbox};
use super::*;
use crate::model::worker::{run, run_beside};

struct Frame {
    number: usize,
    bytes: usize,
}

impl PipeFrame for Frame {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Wakes the task on the thread that posts the wake.
struct AtOnce;

impl Post<Wake> for AtOnce {
    fn post(&self, _: WorkerId, wake: Wake) -> Result<(), Wake> {
        wake.deliver();
        Ok(())
    }
}

/// Mailboxes that are full.
struct Full;

impl Post<Wake> for Full {
    fn post(&self, _: WorkerId, wake: Wake) -> Result<(), Wake> {
        Err(wake)
    }
}

/// Mailboxes of workers.
struct Mailboxes([Mailbox<Wake>; 2]);

impl Post<Wake> for Mailboxes {
    fn post(&self, worker: WorkerId, wake: Wake) -> Result<(), Wake> {
        self.0[worker.0].post(wake)
    }
}

fn pipe_with(wakes: impl Post<Wake> + 'static) -> (Sender<Frame>, Receiver<Frame>) {
    pipe(WorkerId(0), WorkerId(1), Arc::new(wakes))
}

/// Sends frames of these sizes, and ends the pipe. Returns the number of frames that were sent.
async fn send_all(sender: Sender<Frame>, sizes: &[usize]) -> usize {
    let mut sent = 0;
    for (number, bytes) in sizes.iter().copied().enumerate() {
        sent += usize::from(sender.send(Frame { number, bytes }).await.is_ok());
    }
    sent
}

/// The numbers of all frames until the end of the pipe.
async fn receive_all(mut receiver: Receiver<Frame>) -> Vec<usize> {
    let mut numbers = Vec::new();
    while let Ok(frame) = receiver.receive().await {
        numbers.push(frame.number);
    }
    numbers
}

/// Polls a future once, with a waker that nothing waits for, and drops it.
fn poll_once<T>(future: impl Future<Output = T>) -> Poll<T> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn transfer<const FRAMES: usize>(wakes: impl Post<Wake> + 'static, sizes: [usize; FRAMES]) {
    let (sender, receiver) = pipe_with(wakes);
    let shared = Arc::clone(&sender.shared);
    let sending = thread::spawn(move || run(send_all(sender, &sizes)));
    let received = run(receive_all(receiver));
    assert_eq!(sending.join().unwrap(), FRAMES);
    assert!(received.into_iter().eq(0..FRAMES));
    assert_eq!(shared.in_flight.load(Ordering::SeqCst), 0);
}

/// The last frame needs all credit.
pub(crate) fn frames_that_wait_for_credit_arrive_in_order() {
    transfer(AtOnce, [1, 1, limits::PIPE_BYTES]);
}

pub(crate) fn frames_that_wait_for_room_arrive_in_order() {
    transfer(AtOnce, [0; limits::PIPE_FRAMES + 2]);
}

pub(crate) fn full_mailboxes_lose_no_wake() {
    transfer(Full, [limits::PIPE_BYTES; 2]);
}

pub(crate) fn frames_arrive_through_mailboxes() {
    let (sender_mail, sender_inbox) = mailbox(1);
    let (receiver_mail, receiver_inbox) = mailbox(1);
    let (sender, receiver) = pipe_with(Mailboxes([sender_mail, receiver_mail]));
    let sending = thread::spawn(move || {
        run_beside(
            sender_inbox.serve(WorkerId(0), Wake::deliver),
            send_all(sender, &[limits::PIPE_BYTES; 2]),
        )
    });
    let received = run_beside(
        receiver_inbox.serve(WorkerId(1), Wake::deliver),
        receive_all(receiver),
    );
    assert_eq!(sending.join().unwrap(), 2);
    assert_eq!(received, [0, 1]);
}

pub(crate) fn a_dropped_sender_ends_the_wait() {
    let (sender, receiver) = pipe_with(AtOnce);
    let dropping = thread::spawn(move || drop(sender));
    assert_eq!(run(receive_all(receiver)), [0; 0]);
    dropping.join().unwrap();
}

/// The receiver takes at most one frame. Not all of these have room at once.
fn leave<const FRAMES: usize>(sizes: [usize; FRAMES]) {
    let (sender, mut receiver) = pipe_with(AtOnce);
    let leaving = thread::spawn(move || {
        let received = poll_once(receiver.receive());
        drop(receiver);
        usize::from(received.is_ready())
    });
    let sent = run(send_all(sender, &sizes));
    let received = leaving.join().unwrap();
    assert!(
        (received..FRAMES).contains(&sent),
        "{sent} frames were sent"
    );
}

pub(crate) fn a_dropped_receiver_ends_the_wait_for_credit() {
    leave([limits::PIPE_BYTES; 3]);
}

pub(crate) fn a_dropped_receiver_ends_the_wait_for_room() {
    leave([0; limits::PIPE_FRAMES + 2]);
}

pub(crate) fn a_dropped_receiver_resolves_closed() {
    let (sender, receiver) = pipe_with(AtOnce);
    let dropping = thread::spawn(move || drop(receiver));
    let last = run(async move {
        sender.closed().await;
        sender
            .send(Frame {
                number: 0,
                bytes: 1,
            })
            .await
    });
    assert_eq!(last, Err(OtherEndGone));
    dropping.join().unwrap();
}

/// As a task that sends a response and ends it early when the caller has gone.
pub(crate) fn a_sender_that_waits_for_credit_and_for_the_end_is_woken_by_either() {
    let (sender, mut receiver) = pipe_with(AtOnce);
    let leaving = thread::spawn(move || drop(poll_once(receiver.receive())));
    let sizes = [limits::PIPE_BYTES; 2];
    run(async move {
        let closed = sender.closed();
        let sending = async {
            for (number, bytes) in sizes.into_iter().enumerate() {
                if sender.send(Frame { number, bytes }).await.is_err() {
                    return;
                }
            }
            // All were sent: only the end of the receiver is left to wait for.
            std::future::pending::<()>().await;
        };
        let mut closed = pin!(closed);
        let mut sending = pin!(sending);
        poll_fn(|cx| {
            if sending.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            closed.as_mut().poll(cx)
        })
        .await;
    });
    leaving.join().unwrap();
}

pub(crate) fn a_cancelled_receive_loses_no_frame() {
    let (sender, mut receiver) = pipe_with(AtOnce);
    let sending = thread::spawn(move || run(send_all(sender, &[1, 1])));
    let first = poll_once(receiver.receive());
    let rest = run(receive_all(receiver));
    let first = match first {
        Poll::Ready(Ok(frame)) => Some(frame.number),
        Poll::Ready(Err(OtherEndGone)) => None,
        Poll::Pending => None,
    };
    assert!(first.into_iter().chain(rest).eq(0..2));
    assert_eq!(sending.join().unwrap(), 2);
}

pub(crate) fn a_cancelled_send_leaves_no_frame_and_no_credit() {
    let (sender, receiver) = pipe_with(AtOnce);
    let shared = Arc::clone(&sender.shared);
    let sending = thread::spawn(move || {
        run(async move {
            let frame = |number| Frame {
                number,
                bytes: limits::PIPE_BYTES,
            };
            let first = sender.send(frame(0)).await;
            let second = poll_once(sender.send(frame(1)));
            let third = sender.send(frame(2)).await;
            (first, second, third)
        })
    });
    let received = run(receive_all(receiver));
    let (first, second, third) = sending.join().unwrap();
    assert_eq!((first, third), (Ok(()), Ok(())));
    if second.is_ready() {
        assert_eq!(received, [0, 1, 2]);
    } else {
        assert_eq!(received, [0, 2]);
    }
    assert_eq!(shared.in_flight.load(Ordering::SeqCst), 0);
}
