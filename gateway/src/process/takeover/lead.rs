//! The successor's threads while the predecessor drains.

use std::convert::Infallible;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, at, bounded, never, select};

use super::channel::Channel;
use super::message::TakeoverMessage;
use super::{LINE_MAX, TakeoverError};
use crate::control::Control;
use crate::limits;
use crate::ownership;
use crate::rate_limit::{PredecessorCharge, levels};
use crate::store::StoredRecord;
use crate::worker::{self, Peers};

/// Shortest time between two copies of the records.
const RECORDS_INTERVAL: Duration = Duration::from_millis(100);

/// Starts threads that send changed records to the predecessor and admit its requests. Sends the workers
/// [`worker::WorkerMessage::Levels`], which they wait for. The returned channel disconnects when the predecessor has ended.
pub(super) fn lead(
    channel: Channel,
    control: &Arc<Control>,
    peers: &Arc<Peers>,
) -> Result<Receiver<Infallible>, TakeoverError> {
    let socket = channel.socket().try_clone()?;
    let (replies, answers) = bounded(limits::CHARGES);
    let (alive, ended) = bounded::<Infallible>(0);
    let changes = control.watch_changes();
    let (reading, workers) = (Arc::clone(control), Arc::clone(peers));
    std::thread::Builder::new().name("gw-predecessor".to_owned()).spawn(move || {
        let error = receive_from_predecessor(channel, &replies, &reading, &workers);
        tracing::info!(%error, "the predecessor has ended");
        drop(alive);
    })?;
    let (control, predecessor) = (Arc::clone(control), ended.clone());
    std::thread::Builder::new().name("gw-changes".to_owned()).spawn(move || {
        if let Err(error) = send_to_predecessor(&socket, &answers, &changes, &predecessor, &control) {
            tracing::warn!(%error, "cannot send records to the predecessor: it accepts no more requests");
        }
        // Ends the other thread too.
        let _ = socket.shutdown(Shutdown::Both);
    })?;
    Ok(ended)
}

fn receive_from_predecessor(
    mut channel: Channel,
    replies: &Sender<TakeoverMessage>,
    control: &Control,
    peers: &Peers,
) -> TakeoverError {
    let levels = match channel.receive() {
        Ok(TakeoverMessage::Levels { levels }) => Ok(levels::bounded(levels)),
        Ok(other) => Err(TakeoverError::Unexpected(format!("{other:?}"))),
        Err(error) => Err(error),
    };
    let (levels, failed) = match levels {
        Ok(levels) => (levels, None),
        Err(error) => {
            tracing::warn!(%error, "the predecessor sent no levels of rate limits: all limits start full");
            (Vec::new(), Some(error))
        }
    };
    let levels = Arc::new(levels);
    peers.tell_all(|| worker::WorkerMessage::Levels(Arc::clone(&levels)));
    if let Some(error) = failed {
        // The predecessor sees the end and accepts no more requests.
        let _ = channel.socket().shutdown(Shutdown::Both);
        return error;
    }
    if let Err(error) = channel.socket().set_read_timeout(None) {
        return error.into();
    }
    loop {
        match channel.receive() {
            Ok(TakeoverMessage::Charge { number, service }) => {
                let owner = ownership::owner(format!("{service}.{}", control.region().apex()), control.workers());
                let replies = replies.clone();
                let answer = Box::new(move |wait: Option<Duration>| {
                    let wait_ms = wait.map(|wait| u64::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u64::MAX));
                    // Fails if the predecessor has ended.
                    let _ = replies.try_send(TakeoverMessage::Charged { number, wait_ms });
                });
                peers.tell(
                    owner,
                    worker::WorkerMessage::ChargeForPredecessor(Box::new(PredecessorCharge { service, answer })),
                );
            }
            Ok(other) => return TakeoverError::Unexpected(format!("{other:?}")),
            Err(error) => return error,
        }
    }
}

fn send_to_predecessor(
    mut socket: &UnixStream,
    answers: &Receiver<TakeoverMessage>,
    changes: &Receiver<()>,
    ended: &Receiver<Infallible>,
    control: &Control,
) -> Result<(), TakeoverError> {
    let (mut lines, mut did_fit) = (Vec::new(), true);
    // The records may have changed since the predecessor closed the store.
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
                if did_fit && !fits {
                    tracing::warn!(
                        "the records exceed {LINE_MAX} bytes: the predecessor does not learn of revocations"
                    );
                }
                did_fit = fits;
                (due, sent) = (None, Some(Instant::now()));
            }
            recv(ended) -> _ => return Ok(()),
        }
        socket.write_all(&lines)?;
        lines.clear();
    }
}

/// Appends a line with `records`. Returns `false` and appends nothing if the line would be longer than `most` bytes:
/// the predecessor would end the exchange.
fn write_records(records: Vec<StoredRecord>, lines: &mut Vec<u8>, most: u64) -> Result<bool, TakeoverError> {
    match (TakeoverMessage::Records { records }).write_within(lines, most) {
        Ok(()) => Ok(true),
        Err(TakeoverError::TooLong) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_that_exceed_the_longest_line_are_not_sent() {
        let mut expected = Vec::new();
        TakeoverMessage::Charged { number: 8, wait_ms: None }.write_to(&mut expected).unwrap();
        let mut lines = expected.clone();
        let empty = b"{\"type\":\"records\",\"records\":[]}\n";
        assert!(!write_records(Vec::new(), &mut lines, empty.len() as u64 - 1).unwrap());
        assert_eq!(lines, expected);
        assert!(write_records(Vec::new(), &mut lines, empty.len() as u64).unwrap());
        expected.extend_from_slice(empty);
        assert_eq!(lines, expected);
    }
}
