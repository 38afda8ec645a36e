//! Scenarios of a mailbox. Tasks assert nothing: the checker does not survive their destructors
//! after a panic.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::pin;
use std::task::{Context, Waker};

use loom::thread;

use super::*;
use crate::model::worker::run_beside;

/// Runs a worker that handles the messages of `inbox` until it has had this number of them.
fn handle(inbox: Inbox<usize>, number: usize) -> Vec<usize> {
    let handled = RefCell::new(Vec::new());
    let waiting = RefCell::new(None::<Waker>);
    let worker = inbox.serve(WorkerId(0), |message| {
        handled.borrow_mut().push(message);
        waiting.take().into_iter().for_each(Waker::wake);
    });
    run_beside(
        worker,
        poll_fn(|cx| {
            if handled.borrow().len() == number {
                return Poll::Ready(());
            }
            waiting.replace(Some(cx.waker().clone()));
            Poll::Pending
        }),
    );
    handled.take()
}

pub(crate) fn messages_of_two_threads_arrive_once() {
    let (mailbox, inbox) = mailbox(2);
    let threads = [1, 2].map(|message| {
        let mailbox = mailbox.clone();
        thread::spawn(move || mailbox.post(message))
    });
    let mut handled = handle(inbox, 2);
    handled.sort_unstable();
    assert_eq!(handled, [1, 2]);
    for thread in threads {
        assert_eq!(thread.join().unwrap(), Ok(()));
    }
}

pub(crate) fn a_thread_that_waits_for_room_gets_it() {
    let (mailbox, inbox) = mailbox(1);
    let thread = thread::spawn(move || [1, 2].map(|message| mailbox.post_blocking(message)));
    assert_eq!(handle(inbox, 2), [1, 2]);
    assert_eq!(thread.join().unwrap(), [Ok(()), Ok(())]);
}

pub(crate) fn a_full_mailbox_gives_the_message_back() {
    let (mailbox, inbox) = mailbox(1);
    let posts = mailbox.clone();
    let thread = thread::spawn(move || posts.post(1));
    let here = mailbox.post(2);
    let there = thread.join().unwrap();
    let left = match (there, here) {
        (Ok(()), Err(2)) => 1,
        (Err(1), Ok(())) => 2,
        other => panic!("assertion: one message has room, not {other:?}"),
    };
    assert_eq!(handle(inbox, 1), [left]);
}

pub(crate) fn a_worker_that_starts_again_handles_the_messages_left() {
    let (mailbox, inbox) = mailbox(2);
    let thread = thread::spawn(move || [1, 2].map(|message| mailbox.post(message)));
    let mut handled = Vec::new();
    {
        // Ends between two of its turns.
        let mut worker = pin!(
            inbox
                .clone()
                .serve(WorkerId(0), |message| handled.push(message))
        );
        for _ in 0..2 {
            let _ = worker
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()));
        }
    }
    handled.extend(handle(inbox, 2 - handled.len()));
    assert_eq!(handled, [1, 2]);
    assert_eq!(thread.join().unwrap(), [Ok(()), Ok(())]);
}

pub(crate) fn a_mailbox_whose_worker_has_ended_gives_messages_back() {
    let (mailbox, inbox) = mailbox(1);
    let thread = thread::spawn(move || drop(inbox));
    let post = mailbox.post(1);
    assert!(matches!(post, Ok(()) | Err(1)));
    thread.join().unwrap();
    assert_eq!(mailbox.post(2), Err(2));
    assert_eq!(mailbox.post_blocking(3), Err(3));
}
