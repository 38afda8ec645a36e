//! An open-loop load: requests are due at a constant rate, however slow the responses are.
//! Latencies count from the time when a request is due, so that a delay also counts for the
//! requests that wait behind it.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

use crate::client::{Head, Target, Transport};
use crate::failure::{Failure, ensure};

/// Time after the last request is due for the remaining responses.
const REST_WITHIN: Duration = Duration::from_secs(20);
/// Number of the timer among the events, which is not that of a connection.
const TIMER: u64 = u64::MAX;
const EVENTS: usize = 256;

/// Results of a run.
pub(super) struct Latencies {
    /// Times from due to the complete response, in ascending order.
    pub(super) sorted: Vec<Duration>,
    /// Time from the first due request to the last response.
    pub(super) elapsed: Duration,
    /// Responses other than 200.
    pub(super) refused: u64,
}

/// Due times of requests at a constant rate.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    pub(super) per_second: u64,
    pub(super) requests: u64,
}

impl Schedule {
    pub(super) fn new(per_second: u64, seconds: u32) -> Self {
        Self {
            per_second,
            requests: per_second * u64::from(seconds),
        }
    }

    /// Due time of a request after the start. Rounded for each request alone, so that errors do not
    /// add up.
    fn due(self, number: u64) -> Duration {
        let nanoseconds = u128::from(number) * 1_000_000_000 / u128::from(self.per_second);
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }

    /// Whether a request exists and is due.
    fn is_due(self, number: u64, elapsed: Duration) -> bool {
        number < self.requests && self.due(number) <= elapsed
    }

    fn timer(self) -> Itimerspec {
        let every = Duration::from_nanos(1_000_000_000 / self.per_second);
        let every = Timespec {
            tv_sec: every.as_secs().cast_signed(),
            tv_nsec: every.subsec_nanos().into(),
        };
        Itimerspec {
            it_interval: every,
            it_value: every,
        }
    }
}

/// Sends the scheduled requests on `callers` connections. A request that finds all of them busy
/// waits for the next free one; the wait is a part of its latency.
pub(super) fn run(
    target: &Target,
    callers: usize,
    schedule: Schedule,
) -> Result<Latencies, Failure> {
    let request = format!("GET / HTTP/1.1\r\n{}\r\n", target.fields()).into_bytes();
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(std::io::Error::from)?;
    let mut callers = (0..callers)
        .map(|number| Caller::connect(target, &poll, number))
        .collect::<Result<Vec<_>, _>>()?;
    let mut free: VecDeque<usize> = (0..callers.len()).collect();
    let timer = timer(&poll, schedule)?;
    let mut outcome = Latencies {
        sorted: Vec::new(),
        elapsed: Duration::ZERO,
        refused: 0,
    };
    let mut events = Vec::with_capacity(EVENTS);
    let mut sent = 0;
    let start = Instant::now();
    let last_response = schedule.due(schedule.requests) + REST_WITHIN;
    while outcome.sorted.len() as u64 != schedule.requests {
        while schedule.is_due(sent, start.elapsed())
            && let Some(number) = free.pop_front()
        {
            callers[number].send(&request, schedule.due(sent))?;
            sent += 1;
        }
        epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), None)
            .map_err(std::io::Error::from)?;
        for event in events.drain(..) {
            if event.data.u64() == TIMER {
                rustix::io::read(&timer, &mut [0; 8]).map_err(std::io::Error::from)?;
                continue;
            }
            let number = usize::try_from(event.data.u64()).unwrap_or_default();
            if let Some((status, due)) = callers[number].receive()? {
                outcome.elapsed = start.elapsed();
                outcome.sorted.push(outcome.elapsed.saturating_sub(due));
                outcome.refused += u64::from(status != 200);
                free.push_back(number);
            }
        }
        ensure(start.elapsed() < last_response, || {
            let unanswered = schedule.requests - outcome.sorted.len() as u64;
            format!(
                "{unanswered} of {} requests have no response {REST_WITHIN:?} after the end",
                schedule.requests
            )
        })?;
    }
    outcome.sorted.sort_unstable();
    Ok(outcome)
}

fn timer(poll: &OwnedFd, schedule: Schedule) -> Result<OwnedFd, Failure> {
    let create = || {
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?;
        rustix::time::timerfd_settime(&timer, TimerfdTimerFlags::empty(), &schedule.timer())?;
        epoll::add(poll, &timer, EventData::new_u64(TIMER), EventFlags::IN)?;
        Ok(timer)
    };
    create().map_err(|error: rustix::io::Errno| Failure::during("setting a timer", error))
}

/// A connection with at most one request.
struct Caller {
    stream: Transport,
    /// Due time of the request that waits for its response.
    due: Option<Duration>,
    received: Vec<u8>,
}

impl Caller {
    fn connect(target: &Target, poll: &OwnedFd, number: usize) -> Result<Self, Failure> {
        let stream = target.transport_from(0)?;
        stream.socket().set_nonblocking(true)?;
        epoll::add(
            poll,
            stream.socket(),
            EventData::new_u64(number as u64),
            EventFlags::IN,
        )
        .map_err(std::io::Error::from)?;
        Ok(Self {
            stream,
            due: None,
            received: Vec::new(),
        })
    }

    fn send(&mut self, request: &[u8], due: Duration) -> Result<(), Failure> {
        self.due = Some(due);
        // A request is far smaller than an empty socket buffer.
        self.stream.write_all(request)?;
        Ok(self.stream.flush()?)
    }

    /// Reads available bytes; returns status and due time once the response is complete.
    fn receive(&mut self) -> Result<Option<(u16, Duration)>, Failure> {
        let mut buffer = [0; 4096];
        match self.stream.read(&mut buffer) {
            Ok(0) => return Err(Failure::new("a connection closed during the load")),
            Ok(read) => self.received.extend_from_slice(&buffer[..read]),
            // Session tickets are no response.
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(Failure::during("waiting for a response", error)),
        }
        let Some(status) = complete_response(&self.received)? else {
            return Ok(None);
        };
        self.received.clear();
        let due = self
            .due
            .take()
            .ok_or_else(|| Failure::new("a response without a request"))?;
        Ok(Some((status, due)))
    }
}

/// Status of the response in `received`, if it is complete.
fn complete_response(received: &[u8]) -> Result<Option<u16>, Failure> {
    let Some(end) = received.windows(4).position(|window| window == b"\r\n\r\n") else {
        return Ok(None);
    };
    let head = Head::parse(&received[..end])
        .ok_or_else(|| Failure::new("a response that is not HTTP/1.1"))?;
    let length: Option<usize> = head
        .field("content-length")
        .and_then(|length| length.parse().ok());
    let length = length.ok_or_else(|| Failure::new("a response without Content-Length"))?;
    Ok((received.len() >= end + 4 + length).then_some(head.status))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink;

    #[test]
    fn due_times_keep_the_rate_without_drift() {
        let schedule = Schedule::new(3, 2);
        let due: Vec<u128> = (0..schedule.requests)
            .map(|number| schedule.due(number).as_nanos())
            .collect();
        assert_eq!(
            due,
            [
                0,
                333_333_333,
                666_666_666,
                1_000_000_000,
                1_333_333_333,
                1_666_666_666
            ]
        );
        assert!(schedule.is_due(0, Duration::ZERO));
        assert!(!schedule.is_due(3, Duration::from_nanos(999_999_999)));
        assert!(schedule.is_due(3, Duration::from_secs(1)));
        assert!(!schedule.is_due(6, Duration::from_secs(9)));
        // One day at a rate that divides no second.
        assert_eq!(
            Schedule::new(7, 1).due(7 * 86_400),
            Duration::from_secs(86_400)
        );
    }

    #[test]
    fn responses_are_complete_with_their_last_byte() {
        let response = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        for cut in 0..response.len() {
            assert_eq!(
                complete_response(&response[..cut]).unwrap(),
                None,
                "{cut} bytes"
            );
        }
        assert_eq!(complete_response(response).unwrap(), Some(200));
        assert!(complete_response(b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\n").is_err());
    }

    /// Each response takes 20 ms, so on one connection request number n, due after n ms, is
    /// answered after 20 (n + 1) ms.
    #[test]
    fn a_delay_counts_for_the_requests_that_wait_behind_it() {
        let backend = sink::listen("slow", |_, _, socket| {
            std::thread::sleep(Duration::from_millis(20));
            socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        });
        let target = Target::plain(backend.unwrap().port(), "localhost", "key").unwrap();
        let schedule = Schedule {
            per_second: 1000,
            requests: 5,
        };
        let outcome = run(&target, 1, schedule).unwrap();
        let least = [20, 39, 58, 77, 96].map(Duration::from_millis);
        assert!(
            outcome
                .sorted
                .iter()
                .zip(least)
                .all(|(latency, least)| *latency >= least),
            "{:?}",
            outcome.sorted
        );
        assert_eq!((outcome.sorted.len(), outcome.refused), (5, 0));
    }
}
