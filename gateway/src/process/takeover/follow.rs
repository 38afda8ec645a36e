//! The predecessor's threads while it drains: they admit requests by the successor's records and buckets.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded, select};
use tokio::sync::oneshot;

use super::TakeoverError;
use super::channel::Channel;
use super::message::TakeoverMessage;
use crate::control::Control;
use crate::limits;
use crate::rate_limit::SuccessorCharge;
use crate::store::StoredRecord;
use crate::worker::{self, Peers};

/// Interval between checks that the successor still answers.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

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
        self.lock().values().any(|waiting| waiting.since.elapsed() > limit)
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
    std::thread::Builder::new().name("gw-successor".to_owned()).spawn(move || {
        let error = receive_from_successor(channel, &receiving, |records| control.follow(records));
        tracing::warn!(%error, "the successor has ended: this process only finishes running requests");
        peers.tell_all(|| worker::WorkerMessage::End);
        // Ends the exchange with a predecessor of this process: it would get no changes any more.
        control.end_watch();
        drop(alive);
        receiving.lock().clear();
    })?;
    std::thread::Builder::new().name("gw-charges".to_owned()).spawn(move || {
        if send_charges(&socket, &charges, &pending, &ended).is_err() {
            // Ends the other thread too.
            let _ = socket.shutdown(Shutdown::Both);
        }
        drop(charges);
        pending.lock().clear();
    })?;
    Ok(())
}

/// Handles the messages of the successor until it ends, or leaves a request unanswered for longer than
/// [`limits::CHARGED_WITHIN`].
fn receive_from_successor(
    mut channel: Channel,
    pending: &PendingCharges,
    follow: impl Fn(Vec<StoredRecord>),
) -> TakeoverError {
    let mut checked = Instant::now();
    loop {
        match channel.receive() {
            Ok(TakeoverMessage::Records { records }) => follow(records),
            Ok(TakeoverMessage::Charged { number, wait_ms }) => {
                pending.answer(number, wait_ms.map(Duration::from_millis));
            }
            Ok(other) => return TakeoverError::Unexpected(format!("{other:?}")),
            Err(TakeoverError::Silent) => {}
            Err(error) => return error,
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
        let Ok(SuccessorCharge { service, reply }) = charge else { return Ok(()) };
        // Beyond the limit, dropping `reply` refuses the request.
        if pending.lock().len() < limits::CHARGES {
            pending.lock().insert(number, PendingCharge { since: Instant::now(), reply });
            TakeoverMessage::Charge { number, service: service.to_string() }.write_to(&mut lines)?;
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
        let ((charges, asking), pending) = (SuccessorBuckets::new(), PendingCharges::default());
        let (alive, ended) = bounded::<Infallible>(0);
        let sender_pending = pending.clone();
        let sending = std::thread::spawn(move || send_charges(&ours, &asking, &sender_pending, &ended).is_ok());
        let service: Arc<str> = "demo--echo".into();
        let answer = pending.clone();
        let answering = std::thread::spawn(move || {
            let mut numbers = Vec::new();
            for _ in 0..3 {
                let TakeoverMessage::Charge { number, service } = successor.receive().unwrap() else { panic!() };
                assert_eq!(service, "demo--echo");
                numbers.push(number);
            }
            answer.answer(numbers[1], Some(Duration::from_millis(1500)));
            answer.answer(numbers[0], None);
            // The third request gets no answer: the successor has ended.
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
        // Later requests are refused at once.
        assert!(matches!(runtime().block_on(charges.take(&service)), Err(Error::Overloaded(_))));
    }

    #[test]
    fn other_messages_do_not_hide_a_missing_answer() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let pending = PendingCharges::default();
        let (reply, _answer) = oneshot::channel();
        pending.lock().insert(7, PendingCharge { since: Instant::now() - 2 * limits::CHARGED_WITHIN, reply });
        let sending = std::thread::spawn(move || {
            let mut line = Vec::new();
            TakeoverMessage::Charged { number: 8, wait_ms: None }.write_to(&mut line).unwrap();
            let begin = Instant::now();
            while begin.elapsed() < 4 * CHECK_INTERVAL && (&theirs).write_all(&line).is_ok() {}
        });
        let ended = receive_from_successor(Channel::new(ours).unwrap(), &pending, |_| ());
        assert!(matches!(ended, TakeoverError::Silent), "{ended}");
        sending.join().unwrap();
    }

    #[test]
    fn only_an_unanswered_request_counts_as_a_missing_answer() {
        let pending = PendingCharges::default();
        assert!(!pending.has_waited_longer_than(Duration::ZERO));
        let (reply, _answer) = oneshot::channel();
        pending.lock().insert(7, PendingCharge { since: Instant::now() - Duration::from_secs(3), reply });
        assert!(pending.has_waited_longer_than(Duration::from_secs(2)));
        assert!(!pending.has_waited_longer_than(Duration::from_hours(1)));
        pending.answer(7, None);
        assert!(!pending.has_waited_longer_than(Duration::ZERO));
    }
}
