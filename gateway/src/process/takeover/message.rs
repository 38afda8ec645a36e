//! Messages between the two processes, as lines of JSON.

use std::collections::BTreeMap;
use std::io;

use serde::{Deserialize, Serialize};

use super::{LINE_MAX, TakeoverError};
use crate::members::CarriedNode;
use crate::rate_limit::Level;
use crate::store::{Position, Step, StoredRecord};

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum TakeoverMessage {
    Ready,
    Store {
        /// Number of live tunnels by label of their service.
        tunnels: BTreeMap<String, usize>,
        /// Present in a region of several nodes.
        #[serde(default)]
        membership: Option<CarriedNode>,
        /// Position of the predecessor's records. Absent if it reads `records` only.
        #[serde(default)]
        position: Option<Position>,
        /// By how much the followed clock is ahead of the kernel's, in microseconds; absent if none is followed.
        #[serde(default)]
        clock_ahead_us: Option<i64>,
    },
    Serving,
    Failed {
        reason: String,
    },
    Levels {
        levels: Vec<Level>,
    },
    /// All records.
    Records {
        records: Vec<StoredRecord>,
    },
    /// Steps of a change of the records.
    Change {
        steps: Vec<Step>,
        /// Position after the change; absent if more of its steps follow.
        #[serde(default)]
        position: Option<Position>,
    },
    Charge {
        number: u64,
        /// Label of the service.
        service: String,
    },
    Charged {
        number: u64,
        /// Time until the request could be admitted; `None` if it is admitted.
        wait_ms: Option<u64>,
    },
}

impl TakeoverMessage {
    /// Appends the message to `lines`. Leaves `lines` unchanged if the message is too long.
    pub(super) fn write_to(&self, lines: &mut Vec<u8>) -> Result<(), TakeoverError> {
        self.write_within(lines, LINE_MAX)
    }

    pub(super) fn write_within(&self, lines: &mut Vec<u8>, most: u64) -> Result<(), TakeoverError> {
        let begin = lines.len();
        serde_json::to_writer(&mut *lines, self).map_err(io::Error::from)?;
        lines.push(b'\n');
        if (lines.len() - begin) as u64 > most {
            lines.truncate(begin);
            return Err(TakeoverError::TooLong);
        }
        Ok(())
    }
}
