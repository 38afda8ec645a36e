//! Blocks of one node in the archive, for a search: the objects of each minute, from the newest to
//! the oldest.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use gw_region::NodeSlot;

use super::super::LogError;
use super::super::block::Unpacker;
use super::super::search::{PageEnd, Search, Source};
use super::name::{HOUR, ObjectName, node_folder};
use super::segment::Segment;
use super::{Archive, ArchiveError};
use crate::request_log::days::day::Day;

/// Work of fetching an object, in rows, in addition to that of its rows.
const FETCH: u64 = 10_000;
/// Seconds whose matches are collected together.
const WINDOW: u32 = 60;

/// Archived log of a node.
pub(super) struct ArchivedNode<'a> {
    pub(super) archive: &'a Archive,
    pub(super) node: NodeSlot,
}

impl Source for ArchivedNode<'_> {
    type Error = ArchiveError;

    fn search_day(
        &self,
        day: Day,
        seconds: RangeInclusive<u32>,
        search: &mut Search,
    ) -> Result<Option<PageEnd>, ArchiveError> {
        let folder = node_folder(&self.archive.region, day, self.node);
        let folders = self.archive.bucket.folders(&folder)?;
        let hours: BTreeSet<u32> = folders
            .iter()
            .filter_map(|hour| hour.parse().ok())
            .collect();
        let wanted = seconds.start() / HOUR..=seconds.end() / HOUR;
        for hour in hours.into_iter().rev().filter(|hour| wanted.contains(hour)) {
            let end = self.hour(day, hour, &seconds, search)?;
            if end.is_some() {
                return Ok(end);
            }
        }
        Ok(None)
    }
}

impl ArchivedNode<'_> {
    fn hour(
        &self,
        day: Day,
        hour: u32,
        wanted: &RangeInclusive<u32>,
        search: &mut Search,
    ) -> Result<Option<PageEnd>, ArchiveError> {
        let objects = self.archive.objects_of_hour(self.node, day, hour)?;
        for window in (hour * HOUR / WINDOW..(hour + 1) * HOUR / WINDOW).rev() {
            let from = window * WINDOW;
            let seconds = from.max(*wanted.start())..=(from + WINDOW - 1).min(*wanted.end());
            let mut within = objects
                .iter()
                .filter(|object| object.first <= *seconds.end() && *seconds.start() <= object.last)
                .peekable();
            if seconds.is_empty() || within.peek().is_none() {
                continue;
            }
            for object in within {
                self.object(object, &seconds, search)?;
            }
            let end = search.has_searched(day, *seconds.start());
            if end.is_some() {
                return Ok(end);
            }
        }
        Ok(None)
    }

    /// Searches an object, or skips it if it is refused.
    fn object(
        &self,
        object: &ObjectName,
        seconds: &RangeInclusive<u32>,
        search: &mut Search,
    ) -> Result<(), ArchiveError> {
        search.spend(FETCH);
        let content = match self.archive.records(object) {
            Ok(Some(content)) => content,
            // Expired since it was listed.
            Ok(None) => return Ok(()),
            Err(error) if error.is_refusal() => {
                tracing::warn!(%error, "archive: a search skips an object");
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        if let Err(error) = search_segment(&content, seconds, search) {
            let error = self.archive.damaged(object, error);
            tracing::warn!(%error, "archive: a search skips the rest of an object");
        }
        Ok(())
    }
}

fn search_segment(
    content: &[u8],
    seconds: &RangeInclusive<u32>,
    search: &mut Search,
) -> Result<(), LogError> {
    let segment = Segment::read(content)?;
    let [zone, longest_us] = search.criteria.zone();
    let mut unpacker = Unpacker::new()?;
    for block in segment.blocks.iter().rev() {
        let may_match = block.zone & zone == zone && block.longest_us >= longest_us;
        if seconds.contains(&block.second) && may_match {
            let rows = search.add(&unpacker.unpack(&block.data)?, &segment)?;
            search.spend(1 + rows);
        }
    }
    Ok(())
}
