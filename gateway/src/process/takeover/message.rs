//! Messages between the two processes, as lines of JSON.

use std::collections::BTreeMap;
use std::io;

use gw_control_plane::members::CarriedNode;
use gw_interface::rate_limit::Level;
use gw_store::{Position, Revision, Step};
use serde::{Deserialize, Serialize};

use super::{LINE_MAX, TakeoverError};

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
        /// Position of the predecessor's records.
        position: Position,
        /// By how much the followed clock is ahead of the kernel's, in microseconds; absent if none
        /// is followed.
        #[serde(default)]
        clock_ahead_us: Option<i64>,
        /// Whether the predecessor sends [`Self::Applied`] if the successor asks for it.
        #[serde(default)]
        acknowledges: bool,
        /// Number of workers of the predecessor that have links. The successor serves the first one
        /// of each at once, and the next ones when its worker starts again. Absent if each has one.
        #[serde(default)]
        linked_workers: Option<usize>,
    },
    Serving {
        /// Whether the predecessor is to send [`Self::Applied`].
        #[serde(default)]
        acknowledge: bool,
    },
    Levels {
        levels: Vec<Level>,
    },
    /// A step of the change that the next [`Self::Change`] completes.
    Step {
        step: Step,
    },
    /// The steps since the last change are a change of the records.
    Change {
        /// Position after the change.
        position: Position,
    },
    /// The predecessor uses the changes up to this revision.
    Applied {
        revision: Revision,
    },
    Charge {
        number: u64,
        /// Label of the service.
        service: String,
    },
    Answer {
        /// Number of the charge.
        number: u64,
        /// Time until the request could be admitted; `None` if it is admitted.
        wait_ms: Option<u64>,
    },
    /// The process sends nothing more.
    End {
        reason: String,
    },
}

impl TakeoverMessage {
    pub(super) fn line(&self) -> Result<Vec<u8>, TakeoverError> {
        let mut line = serde_json::to_vec(self).map_err(io::Error::from)?;
        line.push(b'\n');
        Ok(line)
    }

    /// Parses a line. Fails with its reason if it is an end.
    pub(super) fn of_line(line: &[u8]) -> Result<Self, TakeoverError> {
        if !line.ends_with(b"\n") {
            let is_full = line.len() as u64 >= LINE_MAX;
            return Err(if is_full {
                TakeoverError::TooLong
            } else {
                TakeoverError::Ended
            });
        }
        match serde_json::from_slice(line) {
            Ok(Self::End { reason }) => Err(TakeoverError::Failed(reason)),
            Ok(message) => Ok(message),
            Err(error) => Err(TakeoverError::Unexpected(error.to_string())),
        }
    }

    /// The error that this message is not of the kind that was due.
    pub(super) fn unexpected(&self) -> TakeoverError {
        TakeoverError::Unexpected(format!("{self:?}"))
    }
}

#[cfg(test)]
mod tests {
    use gw_base::service::rate::Rate;

    use super::*;
    use crate::later_member::pass;

    #[test]
    fn messages_take_a_member_of_a_later_version() {
        let none: [String; 0] = [];
        let levels = vec![Level {
            service: "acme--api".into(),
            rate: Rate::new(1, 1).unwrap(),
            until_full_ms: 1,
        }];
        assert_eq!(pass(&TakeoverMessage::Levels { levels }, &[]), none);
        let position = Position::default();
        let change = TakeoverMessage::Change {
            position: position.clone(),
        };
        assert_eq!(pass(&change, &[]), none);
        let store = TakeoverMessage::Store {
            tunnels: BTreeMap::new(),
            membership: None,
            position,
            clock_ahead_us: None,
            acknowledges: true,
            linked_workers: Some(1),
        };
        assert_eq!(pass(&store, &["/tunnels"]), none);
        for text in [
            r#"{"type":"ready"}"#,
            r#"{"type":"serving"}"#,
            r#"{"type":"serving","acknowledge":true}"#,
            r#"{"type":"applied","revision":1}"#,
            r#"{"type":"charge","number":1,"service":"acme--api"}"#,
            r#"{"type":"answer","number":1,"wait_ms":2}"#,
        ] {
            let message: TakeoverMessage = serde_json::from_str(text).unwrap();
            assert_eq!(pass(&message, &[]), none, "{text}");
        }
    }
}
