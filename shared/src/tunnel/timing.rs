//! Timing of a request at the agent, sent with every response head: `X-Gw-Timing`.

use std::io::Write;
use std::time::Duration;

use http::HeaderValue;

/// Durations of two stages, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AgentTiming {
    /// From the arrival of the request until the agent has a backend connection, or has given up.
    pub agent_us: u32,
    /// From then until the backend's final response begins, if it does.
    pub backend_first_byte_us: Option<u32>,
}

/// Digits of the largest number.
const DIGITS: usize = 10;

impl AgentTiming {
    pub fn new(agent: Duration, backend_first_byte: Option<Duration>) -> Self {
        Self { agent_us: micros(agent), backend_first_byte_us: backend_first_byte.map(micros) }
    }

    /// Limits the stages to the duration of the whole request: the agent may report wrong values.
    pub fn within(self, whole: Duration) -> Self {
        let whole = micros(whole);
        let agent_us = self.agent_us.min(whole);
        let backend_first_byte_us = self.backend_first_byte_us.map(|first_byte| first_byte.min(whole - agent_us));
        Self { agent_us, backend_first_byte_us }
    }

    /// Field value: `<agent_us>,<backend_first_byte_us>`, or only `<agent_us>`.
    ///
    /// Marked sensitive: each value is different and must not evict others from HPACK's table (RFC 7541 §7.1.3).
    pub fn to_value(self) -> HeaderValue {
        let mut text = [0; 2 * DIGITS + 1];
        let mut rest = &mut text[..];
        // The buffer has room for the largest values.
        let _ = match self.backend_first_byte_us {
            Some(first_byte) => write!(rest, "{},{first_byte}", self.agent_us),
            None => write!(rest, "{}", self.agent_us),
        };
        let unused = rest.len();
        let length = text.len() - unused;
        // Digits and a comma are a valid value.
        let mut value = HeaderValue::from_bytes(&text[..length]).unwrap_or_else(|_| HeaderValue::from_static("0"));
        value.set_sensitive(true);
        value
    }

    /// Parses a value of [`Self::to_value`]; `None` for any other.
    pub fn parse(value: &HeaderValue) -> Option<Self> {
        let text = value.to_str().ok()?;
        let (agent, first_byte) = match text.split_once(',') {
            Some((agent, first_byte)) => (agent, Some(number(first_byte)?)),
            None => (text, None),
        };
        Some(Self { agent_us: number(agent)?, backend_first_byte_us: first_byte })
    }
}

/// Converts to microseconds, at most `u32::MAX` (71 minutes).
pub fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

/// Parses digits. `parse` alone would accept a sign.
fn number(text: &str) -> Option<u32> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn malformed_values_are_ignored() {
        for bad in ["", ",", "1,", ",1", "1,2,3", "+1", "-1,2", "1, 2", "4294967296", "a", "1,b"] {
            assert_eq!(AgentTiming::parse(&HeaderValue::from_static(bad)), None, "{bad}");
        }
    }

    #[test]
    fn durations_are_limited_to_u32() {
        let longest = AgentTiming::new(Duration::from_secs(1 << 40), Some(Duration::MAX));
        assert_eq!(longest.to_value(), "4294967295,4294967295");
        assert!(longest.to_value().is_sensitive());
        assert_eq!(AgentTiming::new(Duration::from_nanos(1999), None).to_value(), "1");
    }

    #[test]
    fn stages_are_limited_to_the_duration_of_the_request() {
        let timing = |agent_us, backend_first_byte_us| AgentTiming { agent_us, backend_first_byte_us };
        let whole = Duration::from_micros(100);
        assert_eq!(timing(10, Some(90)).within(whole), timing(10, Some(90)));
        assert_eq!(timing(60, Some(60)).within(whole), timing(60, Some(40)));
        assert_eq!(timing(u32::MAX, Some(u32::MAX)).within(whole), timing(100, Some(0)));
        assert_eq!(timing(u32::MAX, None).within(whole), timing(100, None));
    }

    proptest! {
        #[test]
        fn values_parse_back(agent_us: u32, backend_first_byte_us: Option<u32>) {
            let timing = AgentTiming { agent_us, backend_first_byte_us };
            prop_assert_eq!(AgentTiming::parse(&timing.to_value()), Some(timing));
        }
    }
}
