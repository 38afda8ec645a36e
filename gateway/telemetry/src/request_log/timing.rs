//! Where the time of a request went: as workers measure it, as blocks keep it, and as the
//! administration API shows it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where the time went, in microseconds; null of stages that were not reached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Durations)]
// Blocks keep the fields by position: another order or another field is another version of the
// format.
pub struct Timing {
    /// From the request's head until the caller was authenticated; 0 if it was not.
    pub authenticate: u32,
    /// From there until its stream on the tunnel was open.
    pub wait: Option<u32>,
    /// In the agent, until a connection to the backend was had.
    pub agent: Option<u32>,
    /// From there until the backend's response began.
    pub backend_first_byte: Option<u32>,
    /// From the beginning until the response head was at the gateway.
    pub response_head: Option<u32>,
    /// From the request's head until the request ended.
    pub total: u64,
}

/// One stage of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimingStage {
    /// Name of the stage for display.
    pub name: &'static str,
    /// Time from the start of the request.
    pub start_us: u64,
    /// Duration of the stage, in microseconds.
    pub length_us: u64,
}

impl Timing {
    /// Returns the stages reached by the request, in order. The time between the opened stream and
    /// the response head that is neither the agent's nor the backend's is attributed to the tunnel,
    /// for both directions.
    pub fn waterfall(&self) -> Vec<TimingStage> {
        let mut stages = Vec::new();
        let mut start_us = 0;
        let mut stage = |name, length: u64| {
            let length_us = length.min(self.total.saturating_sub(start_us));
            stages.push(TimingStage {
                name,
                start_us,
                length_us,
            });
            start_us += length_us;
        };
        let of = |length: Option<u32>| u64::from(length.unwrap_or(0));
        stage("authenticate", u64::from(self.authenticate));
        if self.wait.is_some() {
            stage("owner and tunnel", of(self.wait));
        }
        if let Some(head) = self.response_head {
            let known = u64::from(self.authenticate)
                + of(self.wait)
                + of(self.agent)
                + of(self.backend_first_byte);
            stage("tunnel", u64::from(head).saturating_sub(known));
        }
        if self.agent.is_some() {
            stage("agent", of(self.agent));
        }
        if self.backend_first_byte.is_some() {
            stage("backend first byte", of(self.backend_first_byte));
        }
        let rest = self.total.saturating_sub(
            stages
                .last()
                .map_or(0, |last| last.start_us + last.length_us),
        );
        let name = if self.response_head.is_some() {
            "response"
        } else {
            "rest"
        };
        stages.push(TimingStage {
            name,
            start_us: self.total - rest,
            length_us: rest,
        });
        stages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_of_a_waterfall_add_up_to_the_total() {
        let whole = Timing {
            authenticate: 10,
            wait: Some(5),
            agent: Some(100),
            backend_first_byte: Some(1000),
            response_head: Some(1315),
            total: 2000,
        };
        let stages = |timing: &Timing| {
            timing
                .waterfall()
                .iter()
                .map(|stage| (stage.name, stage.start_us, stage.length_us))
                .collect::<Vec<_>>()
        };
        let expected = [
            ("authenticate", 0, 10),
            ("owner and tunnel", 10, 5),
            ("tunnel", 15, 200),
            ("agent", 215, 100),
            ("backend first byte", 315, 1000),
            ("response", 1315, 685),
        ];
        assert_eq!(stages(&whole), expected);
        let refused = Timing {
            authenticate: 30,
            total: 50,
            wait: None,
            agent: None,
            ..whole
        };
        let refused = Timing {
            backend_first_byte: None,
            response_head: None,
            ..refused
        };
        assert_eq!(
            stages(&refused),
            [("authenticate", 0, 30), ("rest", 30, 20)]
        );
        // The agent reports more time than the gateway measured.
        let odd = Timing {
            agent: Some(5000),
            ..whole
        };
        assert_eq!(
            stages(&odd).last().map(|(_, start, length)| start + length),
            Some(2000)
        );
    }
}
