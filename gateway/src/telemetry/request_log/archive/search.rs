//! Searches the archived log of a node from the newest minute to the oldest.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use gw_shared::id::RequestId;

use super::super::block::{DecodedBlock, SLOT_MS, Unpacker};
use super::super::day::{DAY_MS, Day};
use super::super::query::{Criteria, ServiceFilter};
use super::super::view::{RequestView, SearchQuery, Side};
use super::super::{APEX_LABEL, LogError};
use super::lookup::captured_view;
use super::name::{HOUR, ObjectName, node_folder};
use super::segment::Segment;
use super::{Archive, ArchiveError};
use crate::page::Page;
use crate::region::NodeSlot;

/// Approximate number of rows that one search reads. Then the page ends early, after some seconds.
pub(super) const WORK_MAX: u64 = 2_000_000;
/// Work of fetching an object, in rows, in addition to that of its rows.
const FETCH: u64 = 10_000;
/// Seconds whose matches are collected and sorted together.
const WINDOW: u32 = 60;
const LAST_SECOND: u64 = DAY_MS / SLOT_MS - 1;

struct Search<'a> {
    archive: &'a Archive,
    node: NodeSlot,
    criteria: Criteria,
    /// Remaining rows that may be read.
    work: u64,
    items: Vec<RequestView>,
}

/// End of a page before the end of the records, with the cursor of the next page.
struct PageEnd(String);

impl Archive {
    pub(super) fn search_within(
        &self,
        node: NodeSlot,
        query: &SearchQuery,
        work: u64,
    ) -> Result<Page<RequestView>, ArchiveError> {
        let criteria = Criteria::check(query)?;
        let mut search = Search {
            archive: self,
            node,
            criteria,
            work,
            items: Vec::new(),
        };
        let end = search.run()?;
        Ok(Page {
            items: search.items,
            next_cursor: end.map(|PageEnd(cursor)| cursor),
        })
    }
}

impl Search<'_> {
    fn run(&mut self) -> Result<Option<PageEnd>, ArchiveError> {
        let range = self.criteria.range_ms();
        let kept = self.archive.now.days();
        let newest = Day::of_ms(*range.end()).min(*kept.end());
        let oldest = Day::of_ms(*range.start()).max(*kept.start());
        for day in (oldest.0..=newest.0).rev().map(Day) {
            // At most the last second of a day.
            let second = |unix_ms: u64| {
                (unix_ms.saturating_sub(day.start_ms()) / SLOT_MS).min(LAST_SECOND) as u32
            };
            let seconds = (second(*range.start()), second(*range.end()));
            let folders =
                self.archive
                    .bucket
                    .folders(&node_folder(&self.archive.region, day, self.node))?;
            let hours: BTreeSet<u32> = folders
                .iter()
                .filter_map(|hour| hour.parse().ok())
                .collect();
            for hour in hours
                .into_iter()
                .rev()
                .filter(|hour| (seconds.0 / HOUR..=seconds.1 / HOUR).contains(hour))
            {
                let end = self.hour(day, hour, seconds)?;
                if end.is_some() {
                    return Ok(end);
                }
            }
        }
        Ok(None)
    }

    fn hour(
        &mut self,
        day: Day,
        hour: u32,
        (from, to): (u32, u32),
    ) -> Result<Option<PageEnd>, ArchiveError> {
        let objects = self.archive.objects_of_hour(self.node, day, hour)?;
        for window in (hour * HOUR / WINDOW..(hour + 1) * HOUR / WINDOW).rev() {
            let seconds = (
                from.max(window * WINDOW),
                to.min(window * WINDOW + WINDOW - 1),
            );
            let within =
                |object: &&ObjectName| object.first <= seconds.1 && seconds.0 <= object.last;
            if seconds.0 > seconds.1 || !objects.iter().any(|object| within(&object)) {
                continue;
            }
            let mut found = BTreeMap::new();
            for object in objects.iter().filter(within) {
                self.object(object, seconds, &mut found)?;
            }
            for (_, view) in found.into_iter().rev() {
                self.items.push(view);
                if self.items.len() == self.criteria.limit {
                    return Ok(self.items.last().map(|last| PageEnd(last.id.clone())));
                }
            }
            if self.work == 0 {
                let begin = RequestId::first_of_ms(day.start_ms() + u64::from(seconds.0) * SLOT_MS);
                return Ok(Some(PageEnd(begin.to_string())));
            }
        }
        Ok(None)
    }

    /// Adds the matching records of an object to `found`, by id: the same record may be in two objects. Keeps as many of
    /// the newest as the page has room for.
    fn object(
        &mut self,
        object: &ObjectName,
        seconds: (u32, u32),
        found: &mut BTreeMap<[u8; 16], RequestView>,
    ) -> Result<(), ArchiveError> {
        self.work = self.work.saturating_sub(FETCH);
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
        if let Err(error) = self.segment(&content, seconds, found) {
            let error = self.archive.damaged(object, error);
            tracing::warn!(%error, "archive: a search skips the rest of an object");
        }
        Ok(())
    }

    fn segment(
        &mut self,
        content: &[u8],
        (from, to): (u32, u32),
        found: &mut BTreeMap<[u8; 16], RequestView>,
    ) -> Result<(), LogError> {
        let segment = Segment::read(content)?;
        let room = self.criteria.limit - self.items.len();
        let (zone, min_us) = self.criteria.zone();
        let mut unpacker = Unpacker::new()?;
        for block in segment
            .blocks
            .iter()
            .filter(|block| (from..=to).contains(&block.second))
        {
            // As in the columns of a zone map.
            let longest_us = u64::try_from(block.longest_us).unwrap_or(0);
            if (block.zone as u64) & zone != zone || longest_us < min_us {
                continue;
            }
            let raw = unpacker.unpack(block.data)?;
            let decoded = DecodedBlock::read(&raw, |service| {
                segment
                    .label(service)
                    .is_ok_and(|label| is_wanted(&self.criteria.services, label))
            })?;
            self.work = self.work.saturating_sub(1 + decoded.rows.len() as u64);
            for (service, row) in decoded
                .rows
                .iter()
                .filter(|(_, row)| self.criteria.matches(&decoded, row))
            {
                let id = decoded.id(row);
                if found.len() >= room
                    && found
                        .first_key_value()
                        .is_some_and(|(oldest, _)| id < *oldest)
                {
                    continue;
                }
                let mut view = decoded.view(row, segment.label(*service)?);
                let message = |side| row.capture.and_then(|key| segment.message(key, side));
                view.captured_request = captured_view(message(Side::Request))?;
                view.captured_response = captured_view(message(Side::Response))?;
                found.insert(id, view);
                if found.len() > room {
                    found.pop_first();
                }
            }
        }
        Ok(())
    }
}

fn is_wanted(services: &ServiceFilter, label: &str) -> bool {
    match services {
        ServiceFilter::All => true,
        ServiceFilter::Account(prefix) => label.starts_with(prefix.as_str()),
        ServiceFilter::Label(wanted) => label == wanted,
        ServiceFilter::NotApex => label != APEX_LABEL,
    }
}
