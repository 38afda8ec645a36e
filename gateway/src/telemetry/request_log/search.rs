//! Searches from the newest second to the oldest, block by block. Blocks whose zone map does not match are skipped.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::iter;
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;

use gw_shared::id::RequestId;
use rusqlite::{Connection, params};

use super::block::{DecodedBlock, SLOT_MS, UnpackedBlock};
use super::day::{DAY_MS, Day, Now};
use super::day_file::{
    MIXED, arrival_keys, block_keys, find_service, minute_of_key, present_key, second_of_key,
};
use super::lookup::{Reader, captured, read_arrived};
use super::query::{Criteria, ServiceFilter};
use super::queue::LogCounters;
use super::readers::Readers;
use super::view::RequestView;
use super::{APEX_LABEL, LogError};
use crate::page::Page;

/// Approximate number of rows that one search reads. Then the page ends early, after one to two seconds.
pub(super) const WORK_MAX: u64 = 2_000_000;
/// Minutes read by one SQL query. SQLite may skip all their rows, so that the query returns nothing for a while. The blocks
/// of this many minutes fit a reader's cache on a gateway with little traffic.
const MINUTES_AT_A_TIME: usize = 5;
/// Work of skipping a second, in rows.
const PASSING: u64 = 4;
const SECONDS_OF_DAY: i64 = (DAY_MS / SLOT_MS) as i64;
const MINUTES_OF_DAY: i64 = SECONDS_OF_DAY / 60;
/// Number of services above which all minutes are searched, without reading `present`.
const SERVICES_ASKED_FOR: usize = 50;

/// A search in progress.
pub(super) struct Search<'a> {
    pub(super) readers: &'a Readers,
    pub(super) now: &'a Now,
    pub(super) counters: &'a LogCounters,
    pub(super) criteria: Criteria,
    /// Remaining rows that may be read.
    pub(super) work: u64,
}

/// End of a page before the end of the records, with the cursor of the next page.
struct PageEnd(String);

impl Search<'_> {
    pub(super) fn run(mut self) -> Result<Page<RequestView>, LogError> {
        let range = self.criteria.range_ms();
        let kept = self.now.days();
        let newest = Day::of_ms(*range.end()).min(*kept.end());
        let oldest = Day::of_ms(*range.start()).max(*kept.start());
        let mut items = Vec::new();
        for day in (oldest.0..=newest.0).rev().map(Day) {
            let found = self.readers.take(day).and_then(|open| {
                let Some(mut open) = open else {
                    return Ok(None);
                };
                let end = self.day(&mut open.reader, day, &mut items)?;
                self.readers.put(open, &kept);
                Ok(end)
            });
            match found {
                Ok(None) => {}
                Ok(Some(PageEnd(cursor))) => {
                    return Ok(Page {
                        items,
                        next_cursor: Some(cursor),
                    });
                }
                // The file expired during the search.
                Err(_) if !self.readers.has(day) => {}
                Err(error) if error.is_damage() => self.note_damage(&error, day),
                Err(error) => return Err(error),
            }
        }
        Ok(Page {
            items,
            next_cursor: None,
        })
    }

    fn day(
        &mut self,
        reader: &mut Reader,
        day: Day,
        items: &mut Vec<RequestView>,
    ) -> Result<Option<PageEnd>, LogError> {
        let labels = self.labels(reader)?;
        let second = |unix_ms: u64| (unix_ms.saturating_sub(day.start_ms()) / SLOT_MS) as i64;
        let range = self.criteria.range_ms();
        let seconds = second(*range.start())..=second(*range.end()).min(SECONDS_OF_DAY - 1);
        for (from, last) in windows(&self.minutes(reader, &labels)?, seconds) {
            let end = self.window(reader, day, &labels, (from, last), items)?;
            self.work = self.work.saturating_sub(PASSING * (last - from + 1) as u64);
            let end = end.or_else(|| self.end_for_work(day, from));
            if end.is_some() {
                return Ok(end);
            }
        }
        Ok(None)
    }

    /// Minutes of a day in which the services have records, the newest first.
    fn minutes(
        &self,
        reader: &Reader,
        labels: &HashMap<i64, String>,
    ) -> Result<Vec<i64>, LogError> {
        if labels.len() > SERVICES_ASKED_FOR {
            return Ok((0..MINUTES_OF_DAY).rev().collect());
        }
        let mut select = reader
            .connection
            .prepare_cached("SELECT key FROM present WHERE key >= ?1 AND key < ?2")?;
        let mut minutes = BTreeSet::new();
        for service in labels.keys() {
            let keys = [
                present_key(*service, 0),
                present_key(*service, MINUTES_OF_DAY),
            ];
            for key in select.query_map(keys, |row| row.get(0))? {
                minutes.insert(minute_of_key(key?));
            }
        }
        Ok(minutes.into_iter().rev().collect())
    }

    fn labels(&self, reader: &Reader) -> Result<HashMap<i64, String>, LogError> {
        if let ServiceFilter::Label(label) = &self.criteria.services {
            let number = find_service(&reader.connection, label)?;
            return Ok(number
                .map(|number| (number, label.clone()))
                .into_iter()
                .collect());
        }
        let mut select = reader
            .connection
            .prepare("SELECT number, label FROM service")?;
        let all = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let mut all = all.collect::<Result<HashMap<i64, String>, _>>()?;
        if let ServiceFilter::Account(prefix) = &self.criteria.services {
            all.retain(|_, label| label.starts_with(prefix.as_str()));
        } else if matches!(self.criteria.services, ServiceFilter::NotApex) {
            all.retain(|_, label| label != APEX_LABEL);
        }
        Ok(all)
    }

    /// Searches the arrivals of the seconds `from` to `last`.
    fn window(
        &mut self,
        reader: &mut Reader,
        day: Day,
        labels: &HashMap<i64, String>,
        (from, last): (i64, i64),
        items: &mut Vec<RequestView>,
    ) -> Result<Option<PageEnd>, LogError> {
        let (zone, longest_us) = self.zone();
        let Reader {
            connection,
            unpacker,
        } = &mut *reader;
        read_ahead(connection, (from, last), zone == 0 && longest_us == 0)?;
        let mut select = connection.prepare_cached(
            "SELECT key, blocks FROM arrival
             WHERE key >= ?1 AND key < ?2 AND zone & ?3 = ?3 AND longest_us >= ?4 ORDER BY key DESC",
        )?;
        let mut select_block = connection.prepare_cached(
            "SELECT data FROM block WHERE key = ?1 AND zone & ?2 = ?2 AND longest_us >= ?3",
        )?;
        let mut rows = select.query(params![
            arrival_keys(from),
            arrival_keys(last + 1),
            zone,
            longest_us
        ])?;
        let mut second = last;
        let mut current = Vec::new();
        loop {
            let row = rows.next()?;
            let key: Option<i64> = row.map(|row| row.get(0)).transpose()?;
            if key.map(second_of_key) != Some(second) {
                let end = self.second(
                    connection,
                    (day, second),
                    labels,
                    &std::mem::take(&mut current),
                    items,
                )?;
                let end = end.or_else(|| self.end_for_work(day, second));
                if end.is_some() {
                    return Ok(end);
                }
            }
            let (Some(row), Some(key)) = (row, key) else {
                return Ok(None);
            };
            second = second_of_key(key);
            let arrived =
                match read_arrived(row.get_ref(1)?.as_blob().map_err(rusqlite::Error::from)?) {
                    Ok(arrived) => arrived,
                    Err(error) => {
                        self.note_damage(&error, day);
                        continue;
                    }
                };
            self.work = self.work.saturating_sub(1 + arrived.len() as u64);
            for block in arrived {
                if block.service != MIXED && !labels.contains_key(&block.service) {
                    continue;
                }
                let mut found = select_block.query(params![block.key(second), zone, longest_us])?;
                let Some(row) = found.next()? else { continue };
                match unpacker.unpack(row.get_ref(0)?.as_blob().map_err(rusqlite::Error::from)?) {
                    Ok(raw) => {
                        self.work = self.work.saturating_sub(u64::from(block.rows));
                        current.push(raw);
                    }
                    Err(error) => self.note_damage(&error, day),
                }
            }
        }
    }

    /// Adds the matching records in the blocks of one second, the newest first.
    fn second(
        &mut self,
        connection: &Connection,
        (day, second): (Day, i64),
        labels: &HashMap<i64, String>,
        blocks: &[UnpackedBlock],
        items: &mut Vec<RequestView>,
    ) -> Result<Option<PageEnd>, LogError> {
        let mut read = Vec::with_capacity(blocks.len());
        for raw in blocks {
            match DecodedBlock::read(raw, |service| labels.contains_key(&service)) {
                Ok(block) => read.push(block),
                Err(error) => self.note_damage(&error, day),
            }
        }
        let mut matches = Vec::new();
        for block in &read {
            let rows = block
                .rows
                .iter()
                .filter(|(_, row)| self.criteria.matches(block, row));
            matches.extend(rows.map(|(service, row)| (block.id(row), service, block, row)));
        }
        matches.sort_unstable_by_key(|found| Reverse(found.0));
        for (_, service, block, row) in matches {
            let label = labels.get(service).map(String::as_str).unwrap_or_default();
            let mut view = block.view(row, label);
            if let Some(key) = row.capture {
                match captured(connection, key) {
                    Ok((request, response)) => {
                        (view.captured_request, view.captured_response) = (request, response)
                    }
                    Err(error) if error.is_damage() => self.note_damage(&error, day),
                    Err(error) => return Err(error),
                }
            }
            items.push(view);
            if items.len() == self.criteria.limit {
                return Ok(items.last().map(|last| PageEnd(last.id.clone())));
            }
        }
        Ok(self.end_for_work(day, second))
    }

    /// Ends the page if no work is left. All seconds from `second` on were searched.
    fn end_for_work(&self, day: Day, second: i64) -> Option<PageEnd> {
        let begin = day.start_ms() + second as u64 * SLOT_MS;
        (self.work == 0)
            .then(|| RequestId::first_of_ms(begin))
            .map(|id| PageEnd(id.to_string()))
    }

    fn zone(&self) -> (i64, i64) {
        let (bits, min_us) = self.criteria.zone();
        (bits as i64, i64::try_from(min_us).unwrap_or(i64::MAX))
    }

    fn note_damage(&self, error: &LogError, day: Day) {
        self.counters.damaged.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(%day, %error, "request log: a search skips damaged data");
    }
}

/// Scans the range forwards once, because the kernel reads ahead in that direction only and the search reads backwards. The
/// cost is small if the pages are cached.
fn read_ahead(
    connection: &Connection,
    (from, last): (i64, i64),
    blocks: bool,
) -> Result<(), LogError> {
    // The zone map is on the row's first page, which contains small blocks completely.
    let touch = |select: &str, keys: [i64; 2]| {
        connection
            .prepare_cached(select)?
            .query_row(keys, |row| row.get::<_, Option<i64>>(0))
    };
    let arrivals = [arrival_keys(from), arrival_keys(last + 1)];
    touch(
        "SELECT max(zone) FROM arrival WHERE key >= ?1 AND key < ?2",
        arrivals,
    )?;
    if blocks {
        let mixed = [block_keys(MIXED, from), block_keys(MIXED, last + 1)];
        touch(
            "SELECT max(zone) FROM block WHERE key >= ?1 AND key < ?2",
            mixed,
        )?;
    }
    Ok(())
}

/// Returns the first and last second of each window to search. Adjacent minutes of `minutes`, which are in descending
/// order, are joined, and windows are limited to `seconds`. The first windows are short, since they may have all records
/// that the page needs.
fn windows(mut minutes: &[i64], seconds: RangeInclusive<i64>) -> impl Iterator<Item = (i64, i64)> {
    let mut most = 1;
    let groups = iter::from_fn(move || {
        let together = minutes
            .windows(2)
            .take(most - 1)
            .take_while(|pair| pair[0] - 1 == pair[1])
            .count()
            + 1;
        let (group, rest) = minutes.split_at_checked(together)?;
        minutes = rest;
        most = (2 * most).min(MINUTES_AT_A_TIME);
        Some((group[together - 1], group[0]))
    });
    groups.filter_map(move |(first, last)| {
        let from = (first * 60).max(*seconds.start());
        let last = (last * 60 + 59).min(*seconds.end());
        (from <= last).then_some((from, last))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_cover_the_minutes_within_the_seconds() {
        let of = |minutes: &[i64], seconds| windows(minutes, seconds).collect::<Vec<_>>();
        assert_eq!(
            of(&[10, 9, 8, 7, 3], 0..=86_399),
            [(600, 659), (480, 599), (420, 479), (180, 239)]
        );
        assert_eq!(of(&[9, 8, 3], 200..=500), [(480, 500), (200, 239)]);
        assert_eq!(of(&[9, 8, 3], 300..=400), []);
        let all: Vec<i64> = (0..MINUTES_OF_DAY).rev().collect();
        let windows = of(&all, 0..=SECONDS_OF_DAY - 1);
        assert!(windows.windows(2).all(|pair| pair[0].0 - 1 == pair[1].1));
        assert_eq!(
            (windows[0], windows[4], windows.last()),
            ((86_340, 86_399), (85_380, 85_679), Some(&(0, 179)))
        );
    }
}
