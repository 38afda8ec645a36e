//! The conversation after a takeover, for as long as the predecessor drains.
//!
//! | predecessor | successor |
//! |---|---|
//! | `levels`, once: of the buckets of services, which are the successor's from here on | |
//! | | `records`, at the beginning and whenever they have changed: the predecessor admits by them |
//! | `charge`: a request of a service that wants to be admitted | |
//! | | `charged`: it was taken out of its bucket, or after what time it could be |
//!
//! The two may be of different versions. Fields may be added; what one does not understand ends the conversation.
//!
//! A predecessor that has lost its successor cannot learn of revocations: it takes no more requests.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, at, bounded, never, select};
use tokio::sync::oneshot;

use super::{LINE_MAX, Message, TakeoverError, Talk};
use crate::control::Control;
use crate::limit::{PredecessorCharge, SuccessorCharge, levels};
use crate::limits;
use crate::ownership;
use crate::store::Record;
use crate::worker::{self, Peers};

/// Shortest time between two copies of the records.
const RECORDS_INTERVAL: Duration = Duration::from_millis(100);
/// How often the predecessor looks whether its successor still answers.
const LOOK: Duration = Duration::from_millis(500);

/// Requests that the successor was asked about, by number.
#[derive(Clone, Default)]
struct Asked(Arc<Mutex<HashMap<u64, Waiting>>>);

struct Waiting {
    since: Instant,
    reply: oneshot::Sender<Option<Duration>>,
}

impl Asked {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Waiting>> {
        // A map is whole after a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, number: u64, wait: Option<Duration>) {
        if let Some(Waiting { reply, .. }) = self.lock().remove(&number) {
            // The caller may have left.
            let _ = reply.send(wait);
        }
    }

    fn waits_for_longer_than(&self, limit: Duration) -> bool {
        self.lock().values().any(|waiting| waiting.since.elapsed() > limit)
    }
}

/// The predecessor's end: threads that admit by the successor's records and buckets until it, or this process, ends.
pub(super) fn follow(
    talk: Talk,
    charges: Receiver<SuccessorCharge>,
    control: Arc<Control>,
    peers: Arc<Peers>,
) -> Result<(), TakeoverError> {
    let socket = talk.0.get_ref().try_clone()?;
    talk.0.get_ref().set_read_timeout(Some(LOOK))?;
    let asked = Asked::default();
    let (alive, ended) = bounded::<Infallible>(0);
    let pending = asked.clone();
    std::thread::Builder::new().name("gw-successor".to_owned()).spawn(move || {
        let error = hear_successor(talk, &pending, |records| control.follow(records));
        tracing::warn!(%error, "the successor is gone: no more requests are taken, running ones may end");
        peers.tell_all(|| worker::Message::End);
        // A predecessor of this process has lost its source, too.
        control.end_watch();
        drop(alive);
        pending.lock().clear();
    })?;
    std::thread::Builder::new().name("gw-charges".to_owned()).spawn(move || {
        if send_charges(&socket, &charges, &asked, &ended).is_err() {
            // Seen by the other thread.
            let _ = socket.shutdown(Shutdown::Both);
        }
        drop(charges);
        asked.lock().clear();
    })?;
    Ok(())
}

/// Follows the messages of the successor until it is gone: ended, or silent on a request for longer than
/// [`limits::CHARGED_WITHIN`].
fn hear_successor(mut talk: Talk, asked: &Asked, follow: impl Fn(Vec<Record>)) -> TakeoverError {
    let mut looked = Instant::now();
    loop {
        match talk.hear() {
            Ok(Message::Records { records }) => follow(records),
            Ok(Message::Charged { number, wait_ms }) => {
                asked.answer(number, wait_ms.map(Duration::from_millis));
            }
            Ok(other) => return TakeoverError::NotUnderstood(format!("{other:?}")),
            Err(TakeoverError::Silent) => {}
            Err(error) => return error,
        }
        // Other messages do not stand in for the answer. Each look at all requests takes time, so there is one per LOOK.
        if looked.elapsed() >= LOOK {
            if asked.waits_for_longer_than(limits::CHARGED_WITHIN) {
                return TakeoverError::Silent;
            }
            looked = Instant::now();
        }
    }
}

fn send_charges(
    mut socket: &UnixStream,
    charges: &Receiver<SuccessorCharge>,
    asked: &Asked,
    ended: &Receiver<Infallible>,
) -> Result<(), TakeoverError> {
    let mut lines = Vec::new();
    for number in 0.. {
        let charge = select! {
            recv(charges) -> charge => charge,
            recv(ended) -> _ => return Ok(()),
        };
        let Ok(SuccessorCharge { service, reply }) = charge else { return Ok(()) };
        // Dropped, which refuses it, when there are too many.
        if asked.lock().len() < limits::CHARGES {
            asked.lock().insert(number, Waiting { since: Instant::now(), reply });
            Message::Charge { number, service: service.to_string() }.write_to(&mut lines)?;
        }
        // Those that wait already leave together.
        if charges.is_empty() || lines.len() > 64 * 1024 {
            socket.write_all(&lines)?;
            lines.clear();
        }
    }
    Ok(())
}

/// The successor's end: threads that tell the predecessor what changes and admit its requests. Workers wait for
/// [`worker::Message::Levels`], which comes from here. The channel that is returned disconnects when the predecessor
/// has ended.
pub(super) fn lead(
    talk: Talk,
    control: &Arc<Control>,
    peers: &Arc<Peers>,
) -> Result<Receiver<Infallible>, TakeoverError> {
    let socket = talk.0.get_ref().try_clone()?;
    let (replies, answers) = bounded(limits::CHARGES);
    let (alive, ended) = bounded::<Infallible>(0);
    let changes = control.watch_changes();
    let (reading, workers) = (Arc::clone(control), Arc::clone(peers));
    std::thread::Builder::new().name("gw-predecessor".to_owned()).spawn(move || {
        let error = hear_predecessor(talk, &replies, &reading, &workers);
        tracing::info!(%error, "the predecessor has ended");
        drop(alive);
    })?;
    let (control, predecessor) = (Arc::clone(control), ended.clone());
    std::thread::Builder::new().name("gw-changes".to_owned()).spawn(move || {
        if let Err(error) = tell_predecessor(&socket, &answers, &changes, &predecessor, &control) {
            tracing::warn!(%error, "the predecessor cannot be told what changes: it takes no more requests");
        }
        // Whichever of the two threads ends first ends the other.
        let _ = socket.shutdown(Shutdown::Both);
    })?;
    Ok(ended)
}

fn hear_predecessor(mut talk: Talk, replies: &Sender<Message>, control: &Control, peers: &Peers) -> TakeoverError {
    let levels = match talk.hear() {
        Ok(Message::Levels { levels }) => Ok(levels::bounded(levels)),
        Ok(other) => Err(TakeoverError::NotUnderstood(format!("{other:?}"))),
        Err(error) => Err(error),
    };
    let (levels, failed) = match levels {
        Ok(levels) => (levels, None),
        Err(error) => {
            tracing::warn!(%error, "no levels of rate limits from the predecessor: limits start full");
            (Vec::new(), Some(error))
        }
    };
    let levels = Arc::new(levels);
    peers.tell_all(|| worker::Message::Levels(Arc::clone(&levels)));
    if let Some(error) = failed {
        // The other end sees it, and takes no more requests either.
        let _ = talk.0.get_ref().shutdown(Shutdown::Both);
        return error;
    }
    if let Err(error) = talk.0.get_ref().set_read_timeout(None) {
        return error.into();
    }
    loop {
        match talk.hear() {
            Ok(Message::Charge { number, service }) => {
                let owner = ownership::owner(format!("{service}.{}", control.region().apex()), control.workers());
                let replies = replies.clone();
                let answer = Box::new(move |wait: Option<Duration>| {
                    let wait_ms = wait.map(|wait| u64::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u64::MAX));
                    // Fails when the predecessor has ended.
                    let _ = replies.try_send(Message::Charged { number, wait_ms });
                });
                peers.tell(
                    owner,
                    worker::Message::ChargeForPredecessor(Box::new(PredecessorCharge { service, answer })),
                );
            }
            Ok(other) => return TakeoverError::NotUnderstood(format!("{other:?}")),
            Err(error) => return error,
        }
    }
}

fn tell_predecessor(
    mut socket: &UnixStream,
    answers: &Receiver<Message>,
    changes: &Receiver<()>,
    ended: &Receiver<Infallible>,
    control: &Control,
) -> Result<(), TakeoverError> {
    let (mut lines, mut fitted) = (Vec::new(), true);
    // Something may have changed since the predecessor gave the store away.
    let mut due = Some(Instant::now());
    let mut sent = None;
    loop {
        let timer = due.map_or_else(never, at);
        select! {
            recv(answers) -> answer => {
                let Ok(answer) = answer else { return Ok(()) };
                answer.write_to(&mut lines)?;
                while let Ok(answer) = answers.try_recv() {
                    answer.write_to(&mut lines)?;
                }
            }
            recv(changes) -> changed => {
                if changed.is_err() {
                    return Ok(());
                }
                let earliest = sent.map_or_else(Instant::now, |sent: Instant| sent + RECORDS_INTERVAL);
                due.get_or_insert(earliest);
            }
            recv(timer) -> _ => {
                let fits = write_records(control.records().into_vec(), &mut lines, LINE_MAX)?;
                if fitted && !fits {
                    tracing::warn!(
                        "the records are longer than {LINE_MAX} bytes: revocations do not reach the predecessor"
                    );
                }
                fitted = fits;
                (due, sent) = (None, Some(Instant::now()));
            }
            recv(ended) -> _ => return Ok(()),
        }
        socket.write_all(&lines)?;
        lines.clear();
    }
}

/// Appends a line with `records`. Returns `false` and appends nothing if it would be longer than `most` bytes, which would
/// end the link.
fn write_records(records: Vec<Record>, lines: &mut Vec<u8>, most: u64) -> Result<bool, TakeoverError> {
    match (Message::Records { records }).write_within(lines, most) {
        Ok(()) => Ok(true),
        Err(TakeoverError::TooLong) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use tokio::runtime::{Builder, Runtime};

    use super::*;
    use crate::error::Error;
    use crate::limit::SuccessorBuckets;

    fn runtime() -> Runtime {
        Builder::new_current_thread().build().unwrap()
    }

    #[test]
    fn requests_are_admitted_by_the_answer_to_their_number_and_refused_without_one() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut successor = Talk::new(theirs).unwrap();
        let ((charges, asking), asked) = (SuccessorBuckets::new(), Asked::default());
        let (alive, ended) = bounded::<Infallible>(0);
        let pending = asked.clone();
        let sending = std::thread::spawn(move || send_charges(&ours, &asking, &pending, &ended).is_ok());
        let service: Arc<str> = "demo--echo".into();
        let answer = asked.clone();
        let answering = std::thread::spawn(move || {
            let mut numbers = Vec::new();
            for _ in 0..3 {
                let Message::Charge { number, service } = successor.hear().unwrap() else { panic!() };
                assert_eq!(service, "demo--echo");
                numbers.push(number);
            }
            answer.answer(numbers[1], Some(Duration::from_millis(1500)));
            answer.answer(numbers[0], None);
            // The third one is never answered; the successor is gone.
            answer.lock().clear();
        });
        runtime().block_on(async {
            let (first, second, third) =
                tokio::join!(charges.take(&service), charges.take(&service), charges.take(&service));
            assert!(first.is_ok());
            let wait = Duration::from_millis(1500);
            assert!(matches!(second, Err(Error::RateLimited { retry_after }) if retry_after == wait));
            assert!(matches!(third, Err(Error::Overloaded(_))));
        });
        answering.join().unwrap();
        drop(alive);
        assert!(sending.join().unwrap());
        // Nothing takes them any more.
        assert!(matches!(runtime().block_on(charges.take(&service)), Err(Error::Overloaded(_))));
    }

    #[test]
    fn a_successor_that_says_other_things_than_the_answer_is_noticed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let asked = Asked::default();
        let (reply, _answer) = oneshot::channel();
        asked.lock().insert(7, Waiting { since: Instant::now() - 2 * limits::CHARGED_WITHIN, reply });
        let saying = std::thread::spawn(move || {
            let mut line = Vec::new();
            Message::Charged { number: 8, wait_ms: None }.write_to(&mut line).unwrap();
            let begin = Instant::now();
            while begin.elapsed() < 4 * LOOK && (&theirs).write_all(&line).is_ok() {}
        });
        let ended = hear_successor(Talk::new(ours).unwrap(), &asked, |_| ());
        assert!(matches!(ended, TakeoverError::Silent), "{ended}");
        saying.join().unwrap();
    }

    #[test]
    fn records_that_do_not_fit_in_a_line_are_left_out() {
        let mut expected = Vec::new();
        Message::Charged { number: 8, wait_ms: None }.write_to(&mut expected).unwrap();
        let mut lines = expected.clone();
        let empty = b"{\"type\":\"records\",\"records\":[]}\n";
        assert!(!write_records(Vec::new(), &mut lines, empty.len() as u64 - 1).unwrap());
        assert_eq!(lines, expected);
        assert!(write_records(Vec::new(), &mut lines, empty.len() as u64).unwrap());
        expected.extend_from_slice(empty);
        assert_eq!(lines, expected);
    }

    #[test]
    fn a_successor_that_does_not_answer_is_noticed_and_one_that_is_not_asked_is_not() {
        let asked = Asked::default();
        assert!(!asked.waits_for_longer_than(Duration::ZERO));
        let (reply, _answer) = oneshot::channel();
        asked.lock().insert(7, Waiting { since: Instant::now() - Duration::from_secs(3), reply });
        assert!(asked.waits_for_longer_than(Duration::from_secs(2)));
        assert!(!asked.waits_for_longer_than(Duration::from_hours(1)));
        asked.answer(7, None);
        assert!(!asked.waits_for_longer_than(Duration::ZERO));
    }
}
