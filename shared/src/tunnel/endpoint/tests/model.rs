//! Random operations on both ends, compared with a simple model of each direction of each stream.

use bytes::Bytes;
use proptest::prelude::*;

use super::util::*;
use crate::tunnel::endpoint::{Closed, Endpoint, OpenError, StreamKey};
use crate::tunnel::frame::Kind;

const STREAMS: usize = 4;
const WINDOW: usize = 100_000;
const BUDGET: usize = 150_000;

/// An operation on a stream at one end, or on the pipes. Streams are numbers into the list of all
/// that were opened.
#[derive(Debug, Clone, Copy)]
enum Operation {
    Open {
        end: bool,
    },
    Respond {
        stream: usize,
        end: bool,
    },
    Send {
        by: End,
        stream: usize,
        bytes: usize,
    },
    Finish {
        by: End,
        stream: usize,
    },
    Trailers {
        by: End,
        stream: usize,
    },
    BreakOff {
        by: End,
        stream: usize,
    },
    Reset {
        by: End,
        stream: usize,
    },
    Report {
        stream: usize,
    },
    Read {
        by: End,
        stream: usize,
    },
    DropSender {
        by: End,
        stream: usize,
    },
    DropReceiver {
        by: End,
        stream: usize,
    },
    Transmit {
        by: End,
    },
    Deliver {
        to: End,
        bytes: usize,
    },
    SetCredit {
        by: End,
        window: usize,
        budget: usize,
    },
    Message {
        by: End,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Gateway,
    Agent,
}

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let by = || prop_oneof![Just(End::Gateway), Just(End::Agent)];
    let on = || (by(), 0usize..8);
    let size = || prop_oneof![0usize..50, 0usize..5000, 0usize..200_000];
    prop_oneof![
        4 => any::<bool>().prop_map(|end| Open { end }),
        4 => (0usize..8, prop::bool::weighted(0.2))
            .prop_map(|(stream, end)| Respond { stream, end }),
        12 => (on(), size()).prop_map(|((by, stream), bytes)| Send { by, stream, bytes }),
        3 => on().prop_map(|(by, stream)| Finish { by, stream }),
        1 => on().prop_map(|(by, stream)| Trailers { by, stream }),
        1 => on().prop_map(|(by, stream)| BreakOff { by, stream }),
        1 => on().prop_map(|(by, stream)| Reset { by, stream }),
        2 => (0usize..8).prop_map(|stream| Report { stream }),
        8 => on().prop_map(|(by, stream)| Read { by, stream }),
        1 => on().prop_map(|(by, stream)| DropSender { by, stream }),
        1 => on().prop_map(|(by, stream)| DropReceiver { by, stream }),
        8 => by().prop_map(|by| Transmit { by }),
        12 => (by(), size()).prop_map(|(to, bytes)| Deliver { to, bytes }),
        1 => (by(), 0usize..300_000, 0usize..300_000)
            .prop_map(|(by, window, budget)| SetCredit { by, window, budget }),
        1 => by().prop_map(|by| Message { by }),
    ]
}

/// One end of a stream, with what it has sent and read.
#[derive(Debug, Default)]
struct Half {
    key: Option<StreamKey>,
    has_sender: bool,
    has_receiver: bool,
    has_responded: bool,
    /// Bytes that were queued. Byte number n is `pattern(n)`.
    sent: usize,
    /// The direction was ended, with everything queued before.
    has_ended: bool,
    /// The request has a body.
    sends_body: bool,
    /// The agent has reported the request body. What it has not read is discarded.
    has_reported: bool,
    /// The stream was reset here, so that anything may be missing.
    has_reset: bool,
    received: usize,
    /// How reading ended.
    end: Option<Result<(), Closed>>,
}

fn pattern(from: usize, count: usize) -> Vec<u8> {
    (from..from + count).map(|n| (n % 251) as u8).collect()
}

struct Model {
    pair: Pair,
    /// Each stream at the gateway and at the agent, in the order in which they were opened.
    streams: Vec<[Half; 2]>,
    accepted: usize,
    /// Messages that were sent and received, by the gateway and by the agent.
    messages: [(usize, usize); 2],
    /// Largest budget that each end had.
    budgets: [usize; 2],
}

impl Model {
    fn new() -> Self {
        let mut pair = Pair::new(STREAMS);
        pair.gateway.set_credit(WINDOW, BUDGET);
        pair.agent.set_credit(WINDOW, BUDGET);
        Self {
            pair,
            streams: Vec::new(),
            accepted: 0,
            messages: [(0, 0); 2],
            budgets: [BUDGET; 2],
        }
    }

    /// The endpoint, the half of the stream, and the opposite half. `None` if this end has no
    /// handle.
    fn half(
        &mut self,
        by: End,
        stream: usize,
    ) -> Option<(&mut Endpoint, StreamKey, &mut Half, &mut Half)> {
        // The latest is 0.
        let stream = self.streams.len().checked_sub(1 + stream)?;
        let [gateway, agent] = &mut self.streams[stream];
        let (endpoint, own, other) = match by {
            End::Gateway => (&mut self.pair.gateway, gateway, agent),
            End::Agent => (&mut self.pair.agent, agent, gateway),
        };
        let key = own.key?;
        (own.has_sender || own.has_receiver).then_some((endpoint, key, own, other))
    }

    fn sender(
        &mut self,
        by: End,
        stream: usize,
    ) -> Option<(&mut Endpoint, StreamKey, &mut Half, &mut Half)> {
        let found = self.half(by, stream)?;
        let may_send = found.2.has_sender
            && !found.2.has_ended
            && (by == End::Gateway || found.2.has_responded);
        may_send.then_some(found)
    }

    fn apply(&mut self, operation: Operation) {
        match operation {
            Operation::Open { end } => match self
                .pair
                .gateway
                .open(WINDOW, end, |head| head.extend_from_slice(b"h"))
            {
                Ok(key) => {
                    let gateway = Half {
                        key: Some(key),
                        has_sender: true,
                        has_receiver: true,
                        has_ended: end,
                        sends_body: !end,
                        ..Half::default()
                    };
                    self.streams.push([gateway, Half::default()]);
                }
                Err(error) => {
                    assert_eq!(error, OpenError::StreamLimit);
                    assert_eq!(self.pair.gateway.open_streams(), STREAMS);
                }
            },
            Operation::Respond { stream, end } => {
                let Some((agent, key, half, _)) = self.half(End::Agent, stream) else {
                    return;
                };
                if half.has_sender && !half.has_responded && !half.has_ended {
                    half.has_responded = true;
                    let sent = agent.send_head(key, Kind::Response, end, |out| {
                        out.extend_from_slice(&response(b"r"));
                    });
                    half.has_ended = end && sent.is_ok();
                }
            }
            Operation::Send { by, stream, bytes } => {
                let Some((endpoint, key, half, _)) = self.sender(by, stream) else {
                    return;
                };
                half.sent += send(endpoint, key, &pattern(half.sent, bytes));
            }
            Operation::Finish { by, stream } => {
                let Some((endpoint, key, half, _)) = self.sender(by, stream) else {
                    return;
                };
                half.has_ended = endpoint.send_data(key, Bytes::new(), true).is_ok();
            }
            Operation::Trailers { by, stream } => {
                let Some((endpoint, key, half, _)) = self.sender(by, stream) else {
                    return;
                };
                let trailers = Bytes::from_static(b"\r\n");
                half.has_ended = endpoint.send_trailers(key, trailers).is_ok();
            }
            Operation::BreakOff { by, stream } => {
                let Some((endpoint, key, half, _)) = self.sender(by, stream) else {
                    return;
                };
                if endpoint.break_off(key, "GW_CODE").is_ok() {
                    half.has_ended = true;
                    half.has_reset = true;
                }
            }
            Operation::Reset { by, stream } => {
                let Some((endpoint, key, half, _)) = self.half(by, stream) else {
                    return;
                };
                endpoint.reset(key, "GW_CODE");
                half.has_reset = true;
            }
            Operation::Report { stream } => {
                let Some((agent, key, half, _)) = self.half(End::Agent, stream) else {
                    return;
                };
                if half.has_sender {
                    agent.report_upload(key, Some(half.received as u64));
                    half.has_reported = true;
                }
            }
            Operation::Read { by, stream } => self.read(by, stream),
            Operation::DropSender { by, stream } => {
                let Some((endpoint, key, half, other)) = self.half(by, stream) else {
                    return;
                };
                if half.has_sender {
                    endpoint.drop_sender(key);
                    half.has_sender = false;
                    let owes_report = by == End::Agent && other.sends_body && !half.has_reported;
                    half.has_reset |= !half.has_ended || owes_report;
                }
            }
            Operation::DropReceiver { by, stream } => {
                let Some((endpoint, key, half, _)) = self.half(by, stream) else {
                    return;
                };
                if half.has_receiver {
                    endpoint.drop_receiver(key);
                    half.has_receiver = false;
                    half.has_reset = true;
                }
            }
            Operation::Transmit { by: End::Gateway } => {
                transmit_turn(&mut self.pair.gateway, &mut self.pair.to_agent);
            }
            Operation::Transmit { by: End::Agent } => {
                transmit_turn(&mut self.pair.agent, &mut self.pair.to_gateway);
            }
            Operation::Deliver { to, bytes } => {
                let (endpoint, pipe) = match to {
                    End::Gateway => (&mut self.pair.gateway, &mut self.pair.to_gateway),
                    End::Agent => (&mut self.pair.agent, &mut self.pair.to_agent),
                };
                let now: Vec<u8> = pipe.drain(..bytes.min(pipe.len())).collect();
                endpoint.receive(&now).unwrap();
                self.accept();
            }
            Operation::SetCredit { by, window, budget } => {
                let (endpoint, largest) = match by {
                    End::Gateway => (&mut self.pair.gateway, &mut self.budgets[0]),
                    End::Agent => (&mut self.pair.agent, &mut self.budgets[1]),
                };
                endpoint.set_credit(window, budget);
                *largest = budget.max(*largest);
            }
            Operation::Message { by } => {
                let (endpoint, count) = match by {
                    End::Gateway => (&mut self.pair.gateway, &mut self.messages[0].0),
                    End::Agent => (&mut self.pair.agent, &mut self.messages[1].0),
                };
                let text = Bytes::from(format!("{count}"));
                *count += usize::from(endpoint.send_message(text, 200).is_ok());
            }
        }
        self.check();
    }

    /// Accepts what the gateway has opened, in its order, and receives the messages of both ends.
    fn accept(&mut self) {
        while let Some(key) = accept(&mut self.pair.agent) {
            let half = &mut self.streams[self.accepted][1];
            (half.key, half.has_sender, half.has_receiver) = (Some(key), true, true);
            self.accepted += 1;
        }
        let [of_gateway, of_agent] = &mut self.messages;
        for (endpoint, received) in [
            (&mut self.pair.agent, &mut of_gateway.1),
            (&mut self.pair.gateway, &mut of_agent.1),
        ] {
            while let std::task::Poll::Ready(Some(message)) = endpoint.poll_message(&mut context())
            {
                assert_eq!(message, format!("{received}"));
                *received += 1;
            }
        }
    }

    fn read(&mut self, by: End, stream: usize) {
        let Some((endpoint, key, half, other)) = self.half(by, stream) else {
            return;
        };
        if !half.has_receiver {
            return;
        }
        let parts = read(endpoint, key);
        let expected = pattern(half.received, parts.data.len());
        assert_eq!(parts.data, expected, "lost, reordered or duplicated");
        half.received += parts.data.len();
        assert!(half.received <= other.sent);
        if let Some(end) = parts.end {
            if end.is_ok() {
                assert!(other.has_ended, "an end that the peer did not send");
                assert_eq!(half.received, other.sent, "the end before all data");
            }
            half.end = Some(end);
        }
    }

    fn check(&self) {
        for (endpoint, budget) in [
            (&self.pair.gateway, self.budgets[0]),
            (&self.pair.agent, self.budgets[1]),
        ] {
            let streams = endpoint.streams.iter();
            let credits = streams.map(|(_, stream)| stream.committed());
            assert_eq!(credits.sum::<usize>(), endpoint.committed());
            assert!(endpoint.unread() <= endpoint.committed());
            // Closed streams keep their unread bytes, but no credit.
            assert!(endpoint.committed() <= budget + endpoint.streams.len() * LEAST);
            assert!(endpoint.open_streams() <= STREAMS);
        }
    }

    /// Reads everything and moves all bytes until nothing changes.
    fn settle(&mut self) {
        loop {
            self.pair.transmit();
            if self.pair.to_agent.is_empty() && self.pair.to_gateway.is_empty() {
                break;
            }
            self.pair.deliver_to_agent();
            self.pair.deliver_to_gateway();
            self.accept();
            self.read_all();
            self.check();
        }
    }

    fn read_all(&mut self) {
        let streams = std::mem::take(&mut self.streams);
        for stream in streams {
            self.streams.push(stream);
            for by in [End::Gateway, End::Agent] {
                self.read(by, 0);
            }
        }
    }

    /// Ends the test: drains the pipes, checks each stream, then closes all.
    fn finish(mut self) {
        self.settle();
        self.read_all();
        self.settle();
        assert_eq!(self.accepted, self.streams.len());
        let (at_gateway, at_agent) = self.pair.open_streams();
        assert_eq!(at_gateway, at_agent);
        for (sent, received) in self.messages {
            assert_eq!(sent, received);
        }
        let Self {
            mut pair, streams, ..
        } = self;
        for [gateway, agent] in &streams {
            for (own, other) in [(gateway, agent), (agent, gateway)] {
                let is_whole =
                    !own.has_reset && !other.has_reset && own.has_receiver && !own.has_reported;
                if is_whole {
                    assert_eq!(own.received, other.sent, "all that was sent arrives");
                    assert_eq!(own.end == Some(Ok(())), other.has_ended);
                }
            }
        }
        for [gateway, agent] in streams {
            for (endpoint, half) in [(&mut pair.gateway, gateway), (&mut pair.agent, agent)] {
                let Some(key) = half.key else { continue };
                if half.has_sender {
                    endpoint.drop_sender(key);
                }
                if half.has_receiver {
                    endpoint.drop_receiver(key);
                }
            }
        }
        pair.run();
        pair.assert_idle();
        // Everything still works.
        let (at_gateway, at_agent) = pair.open_with_response(true);
        send(&mut pair.agent, at_agent, b"works");
        pair.run();
        assert_eq!(read(&mut pair.gateway, at_gateway).data, b"works");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn both_ends_agree_whatever_happens(operations in prop::collection::vec(operation(), 1..250)) {
        let mut model = Model::new();
        for operation in operations {
            model.apply(operation);
        }
        model.finish();
    }
}
