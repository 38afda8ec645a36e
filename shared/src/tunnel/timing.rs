//! Timing of a request at the agent, sent with every RESPONSE and REFUSED.

use std::time::Duration;

/// Durations of two stages, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AgentTiming {
    /// From the arrival of the request until the agent has a backend connection, or has given up.
    pub agent_us: u32,
    /// From then until the backend's final response begins, if it does.
    pub backend_first_byte_us: Option<u32>,
}

impl AgentTiming {
    pub fn new(agent: Duration, backend_first_byte: Option<Duration>) -> Self {
        Self {
            agent_us: micros(agent),
            backend_first_byte_us: backend_first_byte.map(micros),
        }
    }

    /// Limits the stages to the duration of the whole request: the agent may report wrong values.
    pub fn within(self, whole: Duration) -> Self {
        let whole = micros(whole);
        let agent_us = self.agent_us.min(whole);
        let backend_first_byte_us = self
            .backend_first_byte_us
            .map(|first_byte| first_byte.min(whole - agent_us));
        Self {
            agent_us,
            backend_first_byte_us,
        }
    }
}

/// Converts to microseconds, at most `u32::MAX` (71 minutes).
pub fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_limited_to_u32() {
        let longest = AgentTiming::new(Duration::from_secs(1 << 40), Some(Duration::MAX));
        assert_eq!(longest.agent_us, u32::MAX);
        assert_eq!(longest.backend_first_byte_us, Some(u32::MAX));
        let short = AgentTiming::new(Duration::from_nanos(1999), None);
        assert_eq!(short.agent_us, 1);
    }

    #[test]
    fn stages_are_limited_to_the_duration_of_the_request() {
        let timing = |agent_us, backend_first_byte_us| AgentTiming {
            agent_us,
            backend_first_byte_us,
        };
        let whole = Duration::from_micros(100);
        for (found, limited) in [
            (timing(10, Some(90)), timing(10, Some(90))),
            (timing(60, Some(60)), timing(60, Some(40))),
            (timing(u32::MAX, Some(u32::MAX)), timing(100, Some(0))),
            (timing(u32::MAX, None), timing(100, None)),
        ] {
            assert_eq!(found.within(whole), limited);
        }
    }
}
