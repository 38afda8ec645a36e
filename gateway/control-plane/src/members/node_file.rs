//! The file in the data folder with what this node must remember over a restart: its slot, its
//! membership for a start while PostgreSQL does not answer, and the primaries, so that it uses no
//! older one.

use std::io;
use std::path::{Path, PathBuf};

use gw_interface::config::{Config, StoreSettings};
use gw_region::{CarriedMembership, NodeSlot};
use gw_shared::files;
use gw_shared::version::later_members::LaterMembers;
use gw_store::Primary;
use serde::{Deserialize, Serialize};

use super::messages::CarriedNode;

const FILE: &str = "node.json";

pub(super) struct NodeFile {
    path: PathBuf,
    /// As last written or read.
    contents: Option<NodeFileContents>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct NodeFileContents {
    slot: u16,
    /// Absent after the node has left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    membership: Option<CarriedNode>,
    /// The one in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    primary: Option<Primary>,
    /// Those that the node has reached.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    reached: Vec<Primary>,
    #[serde(flatten)]
    later: LaterMembers,
}

/// Has this process use the primary that the last process of the node has used, or a newer one. An
/// invalid file is reported when the node joins.
pub fn remember_primary(config: &Config) {
    if let StoreSettings::Postgres(settings) = &config.store {
        let file = NodeFile::open(&config.data_dir).ok();
        let known = file.and_then(|it| it.contents).map(|contents| {
            let primary = contents.primary.into_iter();
            primary.chain(contents.reached).collect()
        });
        settings.remember(known.unwrap_or_default());
    }
}

impl NodeFile {
    /// Reads the file, if there is one.
    pub(super) fn open(data_dir: &Path) -> io::Result<Self> {
        let path = data_dir.join(FILE);
        let contents = if path.exists() {
            Some(read(&path)?)
        } else {
            None
        };
        Ok(Self { path, contents })
    }

    pub(super) fn slot(&self) -> Option<NodeSlot> {
        NodeSlot::new(self.contents.as_ref()?.slot)
    }

    /// The membership of the process that wrote the file and has ended since.
    pub(super) fn membership(&self) -> Option<CarriedMembership> {
        let carried = self.contents.as_ref()?.membership.clone()?;
        Some(CarriedMembership {
            has_lease: false,
            ..carried.try_into().ok()?
        })
    }

    /// Stores slot and membership if they have changed. A failure is logged.
    pub(super) fn keep(&mut self, slot: NodeSlot, membership: Option<CarriedMembership>) {
        let membership = membership.map(|carried| {
            CarriedMembership {
                has_lease: false,
                ..carried
            }
            .into()
        });
        let before = self.contents.as_ref();
        let contents = NodeFileContents {
            slot: slot.get(),
            membership,
            primary: before.and_then(|it| it.primary.clone()),
            reached: before.map(|it| it.reached.clone()).unwrap_or_default(),
            later: before.map(|it| it.later.clone()).unwrap_or_default(),
        };
        self.write(contents);
    }

    /// As [`Self::keep`], once the node has a slot.
    pub(super) fn keep_primaries(&mut self, known: Vec<Primary>) {
        let mut known = known.into_iter().map(Primary::remembered);
        if let Some(before) = self.contents.clone() {
            self.write(NodeFileContents {
                primary: known.next(),
                reached: known.collect(),
                ..before
            });
        }
    }

    fn write(&mut self, contents: NodeFileContents) {
        if self.contents.as_ref() == Some(&contents) {
            return;
        }
        let written = serde_json::to_vec(&contents).map_err(io::Error::from);
        match written.and_then(|json| files::write_private(&self.path, &json)) {
            Ok(()) => self.contents = Some(contents),
            Err(error) => {
                tracing::error!(path = %self.path.display(), %error,
                    "cannot store the slot of this node");
            }
        }
    }
}

fn read(path: &Path) -> io::Result<NodeFileContents> {
    let problem = |error: &dyn std::fmt::Display| {
        let advice = "delete it to join the region as a new node, in another slot";
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{}: {error}; {advice}", path.display()),
        )
    };
    let contents: NodeFileContents =
        serde_json::from_str(&files::read_text(path)?).map_err(|error| problem(&error))?;
    match NodeSlot::new(contents.slot) {
        Some(_) => Ok(contents),
        None => Err(problem(&format!(
            "{} is not a slot from 0 to {}",
            contents.slot,
            NodeSlot::MAX
        ))),
    }
}

#[cfg(test)]
mod tests {
    use gw_region::Roster;

    use super::*;

    #[test]
    fn slot_and_membership_are_kept_over_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = NodeFile::open(folder.path()).unwrap();
        assert_eq!((file.slot(), file.membership()), (None, None));
        let slot = NodeSlot::new(7).unwrap();
        let roster = Roster {
            epoch: 3,
            rows: Vec::new(),
        };
        let carried = CarriedMembership {
            slot,
            session: 5,
            beats: 9,
            roster,
            has_lease: true,
        };
        file.keep(slot, Some(carried.clone()));
        let read = NodeFile::open(folder.path()).unwrap();
        assert_eq!(
            (read.slot(), read.membership()),
            (
                Some(slot),
                Some(CarriedMembership {
                    has_lease: false,
                    ..carried
                })
            )
        );
        file.keep(slot, None);
        let read = NodeFile::open(folder.path()).unwrap();
        assert_eq!((read.slot(), read.membership()), (Some(slot), None));
    }

    #[test]
    fn the_primary_is_kept_beside_the_membership() {
        let folder = tempfile::tempdir().unwrap();
        let slot = NodeSlot::new(7).unwrap();
        let primary: Primary = serde_json::from_str(r#"{"host":"db","timeline":2}"#).unwrap();
        let mut file = NodeFile::open(folder.path()).unwrap();
        let known = vec![primary.clone(), primary.clone()];
        file.keep_primaries(known.clone());
        assert!(!folder.path().join(FILE).exists(), "without a slot");
        file.keep(slot, None);
        file.keep_primaries(known);
        file.keep(slot, None);
        let read = NodeFile::open(folder.path()).unwrap().contents.unwrap();
        assert_eq!((read.slot, read.primary), (7, Some(primary.clone())));
        assert_eq!(read.reached, [primary]);
    }

    #[test]
    fn a_member_of_a_later_version_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        std::fs::write(&path, r#"{"slot":7,"rack":{"row":1}}"#).unwrap();
        let slot = NodeSlot::new(7).unwrap();
        let carried = CarriedMembership {
            slot,
            session: 5,
            beats: 9,
            roster: Roster {
                epoch: 3,
                rows: Vec::new(),
            },
            has_lease: false,
        };
        let mut file = NodeFile::open(folder.path()).unwrap();
        file.keep(slot, Some(carried));
        let written = std::fs::read_to_string(&path).unwrap();
        assert!(
            written.contains("membership") && written.contains(r#""rack":{"row":1}"#),
            "{written}"
        );
        let contents = read(&path).unwrap();
        // The value of an unknown member is kept as a whole.
        assert_eq!(crate::later_member::pass(&contents, &["/rack"]), [""]);
    }

    #[test]
    fn unusable_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        for (text, problem) in [
            ("{}", "missing field `slot`"),
            ("{\"slot\":1024}", "1024 is not a slot"),
        ] {
            std::fs::write(folder.path().join(FILE), text).unwrap();
            let error = NodeFile::open(folder.path()).err().unwrap().to_string();
            assert!(
                error.contains("node.json") && error.contains(problem),
                "{error}"
            );
        }
    }
}
