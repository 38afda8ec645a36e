//! The predecessor's side while it drains: it follows the successor's changes, and asks it to admit
//! requests.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::limits;
use futures_util::future::OptionFuture;
use gw_base::process::background::Tasks;
use gw_control_plane::control::{Control, MissingChanges};
use gw_interface::rate_limit::SuccessorCharge;
use gw_store::{Position, Revision, Step};
use tokio::sync::{mpsc, oneshot};

use super::channel::{Channel, MessageReader, MessageWriter};
use super::message::TakeoverMessage;
use super::{FOLLOWS_NO_MORE, TakeoverError, start_exchange};

/// Interval between checks that the successor still answers.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Requests that wait for an answer of the successor, by number.
#[derive(Default)]
struct PendingCharges {
    pending: HashMap<u64, PendingCharge>,
    /// Number of the next request.
    next: u64,
}

struct PendingCharge {
    since: Instant,
    reply: oneshot::Sender<Option<Duration>>,
}

/// Starts a thread that exchanges messages until the successor or this process ends. With
/// `acknowledge`, the successor is told which changes are in use here.
pub(super) fn start(
    tasks: &Tasks,
    channel: Channel,
    charges: mpsc::Receiver<SuccessorCharge>,
    acknowledge: bool,
    control: Arc<Control>,
) -> Result<(), TakeoverError> {
    start_exchange(tasks, channel, move |tasks, reader, writer| {
        let apply = |position, steps| control.follow_change(position, steps);
        // Also by a predecessor of this process.
        let followed = async |revision| {
            control.followed_to(revision).await;
            revision
        };
        let exchange = follow(reader, writer, charges, acknowledge, apply, followed);
        if let Some(Err(error)) = tasks.block_until_stopped(exchange) {
            tracing::warn!(%error, "{FOLLOWS_NO_MORE}");
            // Ends the exchange with a predecessor of this process: it would get no changes any
            // more.
            control.keep_no_changes();
        }
    })
}

/// Exchanges messages with the successor until it ends, leaves a request unanswered for longer than
/// [`limits::CHARGED_WITHIN`], or cannot be followed. This process admits its requests itself then,
/// the pending ones included.
async fn follow(
    mut reader: MessageReader,
    mut writer: MessageWriter,
    charges: mpsc::Receiver<SuccessorCharge>,
    acknowledge: bool,
    apply: impl Fn(Position, Vec<Step>) -> Result<(), MissingChanges>,
    followed: impl AsyncFn(Revision) -> Revision,
) -> Result<Infallible, TakeoverError> {
    let mut pending = PendingCharges::default();
    // Dropped before `pending`, so that pending requests see that the exchange has ended.
    let mut charges = charges;
    // Steps of a change so far.
    let mut steps = Vec::new();
    let mut check = tokio::time::interval(CHECK_INTERVAL);
    // Revision that is in use here, until the successor is told of it.
    let mut applied = None;
    loop {
        let used = OptionFuture::from(applied.map(|at| followed(at)));
        tokio::select! {
            Some(revision) = used, if acknowledge && writer.has_room() => {
                writer.push(&TakeoverMessage::Applied { revision })?;
                applied = None;
            }
            message = reader.next() => match message? {
                TakeoverMessage::Step { step } => steps.push(step),
                TakeoverMessage::Change { position } => {
                    let revision = position.revision;
                    apply(position, std::mem::take(&mut steps))?;
                    applied = Some(revision);
                    // Answers may have come meanwhile: reads them before the next check.
                    check.reset();
                }
                TakeoverMessage::Answer { number, wait_ms } => {
                    pending.answer(number, wait_ms.map(Duration::from_millis));
                }
                other => return Err(other.unexpected()),
            },
            Some(charge) = charges.recv(), if writer.has_room() => {
                if let Some(message) = pending.insert(charge) {
                    writer.push(&message)?;
                }
            }
            sent = writer.send(), if writer.has_unsent() => sent?,
            _ = check.tick() => {
                if pending.have_waited_longer_than(limits::CHARGED_WITHIN) {
                    return Err(TakeoverError::Silent);
                }
            }
        }
    }
}

impl PendingCharges {
    /// Returns the message that asks to admit the request. Beyond the limit, refuses the request.
    fn insert(&mut self, charge: SuccessorCharge) -> Option<TakeoverMessage> {
        let SuccessorCharge { service, reply } = charge;
        if self.pending.len() >= limits::CHARGES {
            return None;
        }
        let number = self.next;
        self.next += 1;
        let since = Instant::now();
        self.pending.insert(number, PendingCharge { since, reply });
        let service = service.to_string();
        Some(TakeoverMessage::Charge { number, service })
    }

    fn answer(&mut self, number: u64, wait: Option<Duration>) {
        if let Some(PendingCharge { reply, .. }) = self.pending.remove(&number) {
            // Fails if the request was dropped.
            let _ = reply.send(wait);
        }
    }

    fn have_waited_longer_than(&self, limit: Duration) -> bool {
        self.pending
            .values()
            .any(|waiting| waiting.since.elapsed() > limit)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use gw_base::error::Error;
    use gw_interface::rate_limit::SuccessorBuckets;
    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// Follows the process at the other end of `socket` until the exchange ends.
    fn follow_until_end(
        socket: UnixStream,
        charges: mpsc::Receiver<SuccessorCharge>,
    ) -> TakeoverError {
        runtime().block_on(async {
            let (reader, writer) = Channel::new(socket).unwrap().split().unwrap();
            let Err(error) =
                follow(reader, writer, charges, false, |_, _| Ok(()), async |at| at).await;
            error
        })
    }

    #[test]
    fn answers_apply_to_the_request_of_their_number_and_others_are_left_to_this_process() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut successor = Channel::new(theirs).unwrap();
        let (buckets, charges) = SuccessorBuckets::new();
        let following = std::thread::spawn(move || follow_until_end(ours, charges));
        let service: Arc<str> = "demo--echo".into();
        let answering = std::thread::spawn(move || {
            let mut numbers = Vec::new();
            for _ in 0..3 {
                let TakeoverMessage::Charge { number, service } = successor.receive().unwrap()
                else {
                    panic!()
                };
                assert_eq!(service, "demo--echo");
                numbers.push(number);
            }
            for (number, wait_ms) in [(numbers[1], Some(1500)), (numbers[0], None)] {
                successor
                    .send(&TakeoverMessage::Answer { number, wait_ms })
                    .unwrap();
            }
            // The third request gets no answer: the successor ends.
        });
        runtime().block_on(async {
            let (first, second, third) = tokio::join!(
                buckets.take(&service),
                buckets.take(&service),
                buckets.take(&service)
            );
            assert!(matches!(first, Some(Ok(()))));
            let wait = Duration::from_millis(1500);
            assert!(matches!(
                second,
                Some(Err(Error::RateLimited { retry_after })) if retry_after == wait
            ));
            assert!(third.is_none());
        });
        answering.join().unwrap();
        assert!(matches!(following.join().unwrap(), TakeoverError::Ended));
        // Later requests, too.
        assert!(runtime().block_on(buckets.take(&service)).is_none());
    }

    #[test]
    fn other_messages_do_not_hide_a_missing_answer() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (buckets, charges) = SuccessorBuckets::new();
        let sending = std::thread::spawn(move || {
            let line = TakeoverMessage::Answer {
                number: 8,
                wait_ms: None,
            };
            let line = line.line().unwrap();
            let begin = Instant::now();
            let most = limits::CHARGED_WITHIN + 4 * CHECK_INTERVAL;
            while begin.elapsed() < most && (&theirs).write_all(&line).is_ok() {}
        });
        let asking =
            std::thread::spawn(move || runtime().block_on(buckets.take(&"demo--echo".into())));
        let ended = follow_until_end(ours, charges);
        assert!(matches!(ended, TakeoverError::Silent), "{ended}");
        assert!(asking.join().unwrap().is_none());
        sending.join().unwrap();
    }

    #[test]
    fn only_an_unanswered_request_counts_as_a_missing_answer() {
        let mut pending = PendingCharges::default();
        assert!(!pending.have_waited_longer_than(Duration::ZERO));
        let (reply, _answer) = oneshot::channel();
        pending.pending.insert(
            7,
            PendingCharge {
                since: Instant::now() - Duration::from_secs(3),
                reply,
            },
        );
        assert!(pending.have_waited_longer_than(Duration::from_secs(2)));
        assert!(!pending.have_waited_longer_than(Duration::from_hours(1)));
        pending.answer(7, None);
        assert!(!pending.have_waited_longer_than(Duration::ZERO));
    }
}
