//! Log lines about an output that cannot be written: one when writes begin to fail, and one when
//! they succeed again.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// Shortest time between two log lines about failing writes.
const ALARM: Duration = Duration::from_secs(60);

/// Logs when writes begin to fail and when they succeed again.
pub(super) struct Alarm {
    /// The output, as log lines name it.
    output: String,
    failing: bool,
    lost: u64,
    logged_at: Option<Instant>,
    /// The current failure was logged; its end will be logged too.
    is_logged: bool,
}

impl Alarm {
    pub(super) fn new(output: impl Into<String>) -> Self {
        Self {
            output: output.into(),
            failing: false,
            lost: 0,
            logged_at: None,
            is_logged: false,
        }
    }

    /// Notes the result of a write of which `lost` records were not written.
    pub(super) fn note(&mut self, result: Result<(), &impl Display>, lost: u64) {
        let output = &self.output;
        match result {
            Err(error) => {
                self.lost += lost;
                if !self.failing && self.logged_at.is_none_or(|at| at.elapsed() >= ALARM) {
                    self.logged_at = Some(Instant::now());
                    self.is_logged = true;
                    tracing::error!(%error,
                        "{output}: writing fails; records are lost until it succeeds");
                }
                self.failing = true;
            }
            Ok(()) => {
                if std::mem::take(&mut self.failing) && std::mem::take(&mut self.is_logged) {
                    tracing::warn!(
                        lost = std::mem::take(&mut self.lost),
                        "{output}: records are written again"
                    );
                }
            }
        }
    }
}
