//! When a backend is asked for a sign of life by a PING (RFC 9113 §6.7). Pure: counts looks at the
//! connection, one a second.

/// Consecutive looks without a byte from the backend while a request awaits its response, after
/// which a PING is sent.
const SILENT_LOOKS: u32 = 5;

/// Further looks without a byte after which the PING counts as unanswered.
const UNANSWERED_LOOKS: u32 = 5;

/// PINGs until the backend sends HEADERS or DATA. gRPC servers end a connection with more (GOAWAY
/// `too_many_pings`).
const PINGS_MAX: u32 = 2;

/// Looks between two PINGs beyond [`PINGS_MAX`]. gRPC servers accept one in five minutes.
const LATER_PING_LOOKS: u32 = 6 * 60;

/// The observations of a look at a connection.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Look {
    /// A request has no response head yet.
    pub(super) awaits_response: bool,
    /// Bytes have arrived since the look before.
    pub(super) has_received: bool,
    /// HEADERS or DATA have arrived since the look before.
    pub(super) has_message: bool,
}

/// The result of a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Waits,
    SendPing,
    /// A PING was not answered.
    Unanswered,
}

/// The silence of one backend on one connection.
#[derive(Debug, Default)]
pub(super) struct Silence {
    /// Consecutive looks at which a response was due and no byte had arrived.
    looks: u32,
    /// A PING was sent in this silence.
    is_asked: bool,
    /// PINGs since the last HEADERS or DATA.
    pings: u32,
    looks_since_ping: u32,
}

impl Silence {
    pub(super) fn look(&mut self, look: Look) -> Verdict {
        self.looks_since_ping = self.looks_since_ping.saturating_add(1);
        if look.has_message {
            self.pings = 0;
        }
        if look.has_received || !look.awaits_response {
            self.looks = 0;
            self.is_asked = false;
            return Verdict::Waits;
        }
        self.looks += 1;
        if self.is_asked {
            return match self.looks_since_ping {
                UNANSWERED_LOOKS => Verdict::Unanswered,
                _ => Verdict::Waits,
            };
        }
        // The first look may come right after the request.
        let may_ask = self.pings < PINGS_MAX || self.looks_since_ping >= LATER_PING_LOOKS;
        if self.looks <= SILENT_LOOKS || !may_ask {
            return Verdict::Waits;
        }
        self.is_asked = true;
        self.pings += 1;
        self.looks_since_ping = 0;
        Verdict::SendPing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENT: Look = Look {
        awaits_response: true,
        has_received: false,
        has_message: false,
    };

    /// The numbers of the looks with another verdict than [`Verdict::Waits`], beginning with 1.
    fn verdicts(looks: impl IntoIterator<Item = Look>) -> Vec<(usize, Verdict)> {
        let mut silence = Silence::default();
        let verdicts = looks.into_iter().map(|look| silence.look(look));
        (1..)
            .zip(verdicts)
            .filter(|(_, verdict)| *verdict != Verdict::Waits)
            .collect()
    }

    #[test]
    fn a_ping_follows_five_seconds_of_silence_and_is_unanswered_after_five_more() {
        let expected = [(6, Verdict::SendPing), (11, Verdict::Unanswered)];
        assert_eq!(verdicts([SILENT; 1000]), expected);
        // Without a request nothing is due.
        assert_eq!(verdicts([Look::default(); 100]), []);
        // Any byte is a sign of life.
        let received = Look {
            has_received: true,
            ..SILENT
        };
        let slow = (0..100).map(|at| if at % 5 == 0 { received } else { SILENT });
        assert_eq!(verdicts(slow), []);
    }

    #[test]
    fn a_silent_backend_that_answers_pings_gets_no_more_than_grpc_servers_accept() {
        let mut silence = Silence::default();
        let mut pings = Vec::new();
        let mut has_received = false;
        for at in 0..1000 {
            let verdict = silence.look(Look {
                has_received: std::mem::take(&mut has_received),
                ..SILENT
            });
            assert_ne!(verdict, Verdict::Unanswered);
            if verdict == Verdict::SendPing {
                has_received = true;
                pings.push(at);
            }
        }
        assert_eq!(pings, [5, 12, 372, 732]);

        // A message lets it be asked twice again.
        silence.look(Look {
            has_received: true,
            has_message: true,
            ..SILENT
        });
        let asked = (0..6).map(|_| silence.look(SILENT)).last();
        assert_eq!(asked, Some(Verdict::SendPing));
    }
}
