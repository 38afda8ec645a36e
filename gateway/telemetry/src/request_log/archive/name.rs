//! Names of objects: `{region}/{day}/{slot}/{hour}/{first}-{last}-{digest}.{kind}`.

use std::fmt;

use gw_region::NodeSlot;

use crate::request_log::days::day::Day;

/// Seconds of one folder.
pub(super) const HOUR: u32 = 3600;
/// Hexadecimal digits of the digest in a name.
pub(super) const DIGEST_DIGITS: usize = 16;

/// Object with records of one node that began within one hour. A name is a function of the content,
/// so that a repeated upload writes the same object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct ObjectName {
    pub(super) day: Day,
    pub(super) slot: NodeSlot,
    /// First second of the day in which a record began.
    pub(super) first: u32,
    pub(super) last: u32,
    pub(super) digest: String,
}

/// Part of an upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ObjectKind {
    /// Records, and heads of captured messages.
    Blocks,
    /// Captured bodies.
    Bodies,
}

impl ObjectName {
    pub(super) fn path(&self, region: &str, kind: ObjectKind) -> String {
        let Self {
            day,
            slot,
            first,
            last,
            digest,
        } = self;
        let folder = hour_folder(region, *day, *slot, first / HOUR);
        format!("{folder}/{first:05}-{last:05}-{digest}.{kind}")
    }

    /// Parses the last part of the name of an object with records. `None` for other objects.
    pub(super) fn parse(day: Day, slot: NodeSlot, file: &str) -> Option<Self> {
        let mut parts = file.strip_suffix(".blocks")?.splitn(3, '-');
        let mut second = || {
            let part = parts.next().filter(|part| part.len() == 5)?;
            part.parse::<u32>()
                .ok()
                .filter(|second| *second < 24 * HOUR)
        };
        let first = second()?;
        let last = second()?;
        let digest = parts.next().filter(|digest| {
            digest.len() == DIGEST_DIGITS
                && digest
                    .bytes()
                    .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        })?;
        (first <= last && first / HOUR == last / HOUR).then(|| Self {
            day,
            slot,
            first,
            last,
            digest: digest.to_owned(),
        })
    }
}

/// Folder of all nodes' objects of a day.
pub(super) fn day_folder(region: &str, day: Day) -> String {
    format!("{region}/{day}")
}

pub(super) fn node_folder(region: &str, day: Day, slot: NodeSlot) -> String {
    format!("{}/{:04}", day_folder(region, day), slot.get())
}

pub(super) fn hour_folder(region: &str, day: Day, slot: NodeSlot, hour: u32) -> String {
    format!("{}/{hour:02}", node_folder(region, day, slot))
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Blocks => "blocks",
            Self::Bodies => "bodies",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_contain_day_node_and_seconds() {
        let day = Day::of_file_name("2026-11-21.").unwrap();
        let slot = NodeSlot::new(7).unwrap();
        let name = ObjectName {
            day,
            slot,
            first: 3599,
            last: 3599,
            digest: "0123456789abcdef".to_owned(),
        };
        let path = name.path("eu1.example.com", ObjectKind::Blocks);
        assert_eq!(
            path,
            "eu1.example.com/2026-11-21/0007/00/03599-03599-0123456789abcdef.blocks"
        );
        assert_eq!(
            ObjectName::parse(day, slot, path.rsplit('/').next().unwrap()),
            Some(name)
        );
        for other in [
            "",
            "03599-03599-0123456789abcdef.bodies",
            "03599-03600-0123456789abcdef.blocks",
            "03599-03598-0123456789abcdef.blocks",
            "90000-90000-0123456789abcdef.blocks",
            "3599-3599-0123456789abcdef.blocks",
            "03599-03599-0123456789abcde/.blocks",
            "03599-03599.blocks",
        ] {
            assert_eq!(ObjectName::parse(day, slot, other), None, "{other}");
        }
    }
}
