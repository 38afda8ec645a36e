//! Searches from the newest second to the oldest, block by block, wherever the blocks are: in the
//! files of days or in the archive.

pub(super) mod day_search;
pub(super) mod lookup;
pub(super) mod query;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use gw_base::page::Page;
use gw_shared::id::RequestId;

use self::lookup::{References, add_captured};
use self::query::Criteria;
use super::LogError;
use super::block::{DecodedBlock, SLOT_MS, UnpackedBlock};
use super::days::day::{DAY_MS, Day};
use super::names::NamesNow;
use super::record::RequestView;

/// Approximate number of rows that one search reads. Then the page ends early, after one to two
/// seconds, or some seconds in the archive.
pub(super) const WORK_MAX: u64 = 2_000_000;
pub(super) const SECONDS_OF_DAY: u32 = (DAY_MS / SLOT_MS) as u32;

/// A search in progress.
pub(super) struct Search {
    pub(super) criteria: Criteria,
    names: NamesNow,
    /// Remaining rows that may be read.
    work: u64,
    items: Vec<RequestView>,
    /// Matches of the seconds that are searched now, by id: the same record may be in two archived
    /// objects. As many of the newest as the page has room for.
    matches: BTreeMap<[u8; 16], RequestView>,
}

/// Log that is searched.
pub(super) trait Source {
    type Error;

    /// Passes the blocks of the `seconds` of `day` to [`Search::add`], roughly from the newest to
    /// the oldest, and tells [`Search::has_searched`] how far it is. Skips blocks whose zone map
    /// does not match. Returns the end of the page.
    fn search_day(
        &self,
        day: Day,
        seconds: RangeInclusive<u32>,
        search: &mut Search,
    ) -> Result<Option<PageEnd>, Self::Error>;
}

/// End of a page before the end of the records, with the cursor of the next page.
pub(super) struct PageEnd(String);

impl Search {
    pub(super) fn new(criteria: Criteria, work: u64, names: NamesNow) -> Self {
        Self {
            criteria,
            names,
            work,
            items: Vec::new(),
            matches: BTreeMap::new(),
        }
    }

    /// Searches the days of `source` that are `kept`.
    pub(super) fn run<S: Source>(
        mut self,
        source: &S,
        kept: &RangeInclusive<Day>,
    ) -> Result<Page<RequestView>, S::Error> {
        let range = self.criteria.range_ms();
        let newest = Day::of_ms(*range.end()).min(*kept.end());
        let oldest = Day::of_ms(*range.start()).max(*kept.start());
        let mut end = None;
        for day in (oldest.0..=newest.0).rev().map(Day) {
            let second = |unix_ms: u64| {
                let second = unix_ms.saturating_sub(day.start_ms()) / SLOT_MS;
                second.min(u64::from(SECONDS_OF_DAY) - 1) as u32
            };
            let seconds = second(*range.start())..=second(*range.end());
            end = source.search_day(day, seconds, &mut self)?;
            if end.is_some() {
                break;
            }
        }
        Ok(Page {
            items: self.items,
            next_cursor: end.map(|PageEnd(cursor)| cursor),
        })
    }

    /// Adds the matching records of a block to the matches. Returns the number of rows that were
    /// read. Adds a record whose captured messages are damaged without them, and returns that error
    /// in the end.
    pub(super) fn add(
        &mut self,
        block: &UnpackedBlock,
        references: &impl References,
    ) -> Result<u64, LogError> {
        let room = self.criteria.limit - self.items.len();
        let services = &self.criteria.services;
        let block = DecodedBlock::read(block, |service| {
            references
                .label(service)
                .is_ok_and(|label| services.includes(&label))
        })?;
        let mut damage = None;
        // Newest first, so that most records for which the page has no room are skipped.
        for (service, row) in block.rows.iter().rev() {
            let id = block.id(row);
            let is_older = |(oldest, _): (&[u8; 16], _)| id < *oldest;
            let is_too_old =
                self.matches.len() >= room && self.matches.first_key_value().is_some_and(is_older);
            if is_too_old || !self.criteria.matches(&block, row) {
                continue;
            }
            let label = references.label(*service)?;
            let Some(capture) = self.names.shown(&label, block.unix_ms(row), row.capture) else {
                continue;
            };
            let mut view = block.columns(row, &label).view();
            match add_captured(&mut view, capture, references) {
                Err(error) if error.is_damage() => damage = Some(error),
                result => result?,
            }
            self.matches.insert(id, view);
            if self.matches.len() > room {
                self.matches.pop_first();
            }
        }
        damage.map_or(Ok(block.rows.len() as u64), Err)
    }

    /// Counts work, in rows.
    pub(super) fn spend(&mut self, rows: u64) {
        self.work = self.work.saturating_sub(rows);
    }

    /// Moves the matches to the page, after all seconds of `day` from `second` on were searched.
    /// Returns the end of the page if it is full or no work is left.
    pub(super) fn has_searched(&mut self, day: Day, second: u32) -> Option<PageEnd> {
        while let Some((_, view)) = self.matches.pop_last() {
            self.items.push(view);
            if self.items.len() == self.criteria.limit {
                return self.items.last().map(|last| PageEnd(last.id.clone()));
            }
        }
        let begin = RequestId::first_of_ms(day.start_ms() + u64::from(second) * SLOT_MS);
        (self.work == 0).then(|| PageEnd(begin.to_string()))
    }
}
