//! The predecessor's threads while it drains: they follow the successor's changes, and ask it to admit requests.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded, select};
use tokio::sync::oneshot;

use super::channel::Channel;
use super::message::TakeoverMessage;
use super::{FOLLOWS_NO_MORE, TakeoverError};
use crate::control::Control;
use crate::limits;
use crate::rate_limit::SuccessorCharge;
use crate::store::{Position, Step, StoredRecord};
use crate::worker::{self, Peers};

/// Interval between checks that the successor still answers.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Time for the first records or changes. A successor of an older version can be unable to send them.
const FIRST_WITHIN: Duration = limits::TAKEOVER_STEP;

/// What the successor tells about the records.
enum Update {
    Records(Vec<StoredRecord>),
    Change(Position, Vec<Step>),
}

/// Requests that wait for an answer of the successor, by number.
#[derive(Clone, Default)]
struct PendingCharges(Arc<Mutex<HashMap<u64, PendingCharge>>>);

struct PendingCharge {
    since: Instant,
    reply: oneshot::Sender<Option<Duration>>,
}

impl PendingCharges {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, PendingCharge>> {
        // No method of the map leaves it inconsistent on a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, number: u64, wait: Option<Duration>) {
        if let Some(PendingCharge { reply, .. }) = self.lock().remove(&number) {
            // Fails if the request was dropped.
            let _ = reply.send(wait);
        }
    }

    fn has_waited_longer_than(&self, limit: Duration) -> bool {
        self.lock()
            .values()
            .any(|waiting| waiting.since.elapsed() > limit)
    }
}

/// Starts the threads. They run until the successor or this process ends.
pub(super) fn follow(
    channel: Channel,
    charges: Receiver<SuccessorCharge>,
    control: Arc<Control>,
    peers: Arc<Peers>,
) -> Result<(), TakeoverError> {
    let socket = channel.socket().try_clone()?;
    channel.socket().set_read_timeout(Some(CHECK_INTERVAL))?;
    let pending = PendingCharges::default();
    let (alive, ended) = bounded::<Infallible>(0);
    let receiving = pending.clone();
    std::thread::Builder::new()
        .name("gw-successor".to_owned())
        .spawn(move || {
            let error = receive_from_successor(channel, &receiving, FIRST_WITHIN, |update| {
                match update {
                    Update::Records(records) => control.follow_records(records),
                    Update::Change(position, steps) => control.follow_change(position, steps)?,
                }
                Ok(())
            });
            tracing::warn!(%error, "{FOLLOWS_NO_MORE}");
            peers.tell_all(|| worker::WorkerMessage::End);
            // Ends the exchange with a predecessor of this process: it would get no changes any more.
            control.keep_no_changes();
            drop(alive);
            receiving.lock().clear();
        })?;
    std::thread::Builder::new()
        .name("gw-charges".to_owned())
        .spawn(move || {
            if send_charges(&socket, &charges, &pending, &ended).is_err() {
                // Ends the other thread too.
                let _ = socket.shutdown(Shutdown::Both);
            }
            drop(charges);
            pending.lock().clear();
        })?;
    Ok(())
}

/// Handles the messages of the successor until it ends, leaves a request unanswered for longer than
/// [`limits::CHARGED_WITHIN`], or cannot be followed.
fn receive_from_successor(
    mut channel: Channel,
    pending: &PendingCharges,
    first_within: Duration,
    follow: impl Fn(Update) -> Result<(), TakeoverError>,
) -> TakeoverError {
    let began = Instant::now();
    let mut checked = began;
    let mut is_followed = false;
    // Steps of a change so far. The successor has all of them in memory, too.
    let mut change = Vec::new();
    loop {
        let update = match channel.receive() {
            Ok(TakeoverMessage::Records { records }) => Some(Update::Records(records)),
            Ok(TakeoverMessage::Change { steps, position }) => {
                change.extend(steps);
                position.map(|position| Update::Change(position, std::mem::take(&mut change)))
            }
            Ok(TakeoverMessage::Charged { number, wait_ms }) => {
                pending.answer(number, wait_ms.map(Duration::from_millis));
                None
            }
            Ok(other) => return TakeoverError::Unexpected(format!("{other:?}")),
            Err(TakeoverError::Silent) => None,
            Err(error) => return error,
        };
        if let Some(update) = update {
            if let Err(error) = follow(update) {
                return error;
            }
            // Answers may have come meanwhile: reads them before the next check.
            (checked, is_followed) = (Instant::now(), true);
        }
        if !is_followed && began.elapsed() > first_within {
            return TakeoverError::NoRecords;
        }
        // Not after every message: a check visits all pending requests.
        if checked.elapsed() >= CHECK_INTERVAL {
            if pending.has_waited_longer_than(limits::CHARGED_WITHIN) {
                return TakeoverError::Silent;
            }
            checked = Instant::now();
        }
    }
}

fn send_charges(
    mut socket: &UnixStream,
    charges: &Receiver<SuccessorCharge>,
    pending: &PendingCharges,
    ended: &Receiver<Infallible>,
) -> Result<(), TakeoverError> {
    let mut lines = Vec::new();
    for number in 0.. {
        let charge = select! {
            recv(charges) -> charge => charge,
            recv(ended) -> _ => return Ok(()),
        };
        let Ok(SuccessorCharge { service, reply }) = charge else {
            return Ok(());
        };
        // Beyond the limit, dropping `reply` refuses the request.
        if pending.lock().len() < limits::CHARGES {
            pending.lock().insert(
                number,
                PendingCharge {
                    since: Instant::now(),
                    reply,
                },
            );
            TakeoverMessage::Charge {
                number,
                service: service.to_string(),
            }
            .write_to(&mut lines)?;
        }
        // Sends requests that already wait in one write.
        if charges.is_empty() || lines.len() > 64 * 1024 {
            socket.write_all(&lines)?;
            lines.clear();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::runtime::{Builder, Runtime};

    use super::*;
    use crate::error::Error;
    use crate::rate_limit::SuccessorBuckets;

    fn runtime() -> Runtime {
        Builder::new_current_thread().build().unwrap()
    }

    #[test]
    fn answers_apply_to_the_request_of_their_number_and_requests_without_one_are_refused() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut successor = Channel::new(theirs).unwrap();
        let (charges, asking) = SuccessorBuckets::new();
        let pending = PendingCharges::default();
        let (alive, ended) = bounded::<Infallible>(0);
        let sender_pending = pending.clone();
        let sending = std::thread::spawn(move || {
            send_charges(&ours, &asking, &sender_pending, &ended).is_ok()
        });
        let service: Arc<str> = "demo--echo".into();
        let answer = pending.clone();
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
            answer.answer(numbers[1], Some(Duration::from_millis(1500)));
            answer.answer(numbers[0], None);
            // The third request gets no answer: the successor has ended.
            answer.lock().clear();
        });
        runtime().block_on(async {
            let (first, second, third) = tokio::join!(
                charges.take(&service),
                charges.take(&service),
                charges.take(&service)
            );
            assert!(first.is_ok());
            let wait = Duration::from_millis(1500);
            assert!(
                matches!(second, Err(Error::RateLimited { retry_after }) if retry_after == wait)
            );
            assert!(matches!(third, Err(Error::Overloaded(_))));
        });
        answering.join().unwrap();
        drop(alive);
        assert!(sending.join().unwrap());
        // Later requests are refused at once.
        assert!(matches!(
            runtime().block_on(charges.take(&service)),
            Err(Error::Overloaded(_))
        ));
    }

    #[test]
    fn other_messages_do_not_hide_a_missing_answer() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let pending = PendingCharges::default();
        let (reply, _answer) = oneshot::channel();
        pending.lock().insert(
            7,
            PendingCharge {
                since: Instant::now() - 2 * limits::CHARGED_WITHIN,
                reply,
            },
        );
        let sending = std::thread::spawn(move || {
            let mut line = Vec::new();
            TakeoverMessage::Charged {
                number: 8,
                wait_ms: None,
            }
            .write_to(&mut line)
            .unwrap();
            let begin = Instant::now();
            while begin.elapsed() < 4 * CHECK_INTERVAL && (&theirs).write_all(&line).is_ok() {}
        });
        let ended =
            receive_from_successor(Channel::new(ours).unwrap(), &pending, FIRST_WITHIN, |_| {
                Ok(())
            });
        assert!(matches!(ended, TakeoverError::Silent), "{ended}");
        sending.join().unwrap();
    }

    #[test]
    fn a_successor_that_sends_neither_changes_nor_records_is_not_followed() {
        let ended_by = |first: Option<TakeoverMessage>| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let mut lines = Vec::new();
            for message in first.into_iter().chain([TakeoverMessage::Charged {
                number: 8,
                wait_ms: None,
            }]) {
                message.write_to(&mut lines).unwrap();
            }
            (&theirs).write_all(&lines).unwrap();
            drop(theirs);
            let channel = Channel::new(ours).unwrap();
            receive_from_successor(channel, &PendingCharges::default(), Duration::ZERO, |_| {
                Ok(())
            })
        };
        assert!(matches!(ended_by(None), TakeoverError::NoRecords));
        let change = TakeoverMessage::Change {
            steps: Vec::new(),
            position: Some(Position::default()),
        };
        assert!(matches!(ended_by(Some(change)), TakeoverError::Ended));
        let records = TakeoverMessage::Records {
            records: Vec::new(),
        };
        assert!(matches!(ended_by(Some(records)), TakeoverError::Ended));
    }

    #[test]
    fn only_an_unanswered_request_counts_as_a_missing_answer() {
        let pending = PendingCharges::default();
        assert!(!pending.has_waited_longer_than(Duration::ZERO));
        let (reply, _answer) = oneshot::channel();
        pending.lock().insert(
            7,
            PendingCharge {
                since: Instant::now() - Duration::from_secs(3),
                reply,
            },
        );
        assert!(pending.has_waited_longer_than(Duration::from_secs(2)));
        assert!(!pending.has_waited_longer_than(Duration::from_hours(1)));
        pending.answer(7, None);
        assert!(!pending.has_waited_longer_than(Duration::ZERO));
    }
}
