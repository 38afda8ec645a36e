//! Blocks of the files of days, for a search: windows of minutes in which the services have
//! records, each from its newest second to the oldest.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::iter;
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;

use rusqlite::{Connection, params};

use super::lookup::References;
use super::query::ServiceFilter;
use super::{PageEnd, SECONDS_OF_DAY, Search, Source};
use crate::request_log::LogError;
use crate::request_log::block::Unpacker;
use crate::request_log::days::day::Day;
use crate::request_log::days::day_file::{
    Arrived, MIXED, arrival_keys, block_keys, find_service, minute_of_key, present_key,
    second_of_key,
};
use crate::request_log::days::readers::{Reader, Readers, read_arrived};
use crate::request_log::queue::LogCounters;
use crate::request_log::view::CapturedView;

/// Minutes read by one SQL query. SQLite may skip all their rows, so that the query returns nothing
/// for a while. The blocks of this many minutes fit a reader's cache on a gateway with little
/// traffic.
const MINUTES_AT_A_TIME: usize = 5;
/// Work of skipping a second, in rows.
const PASSING: u64 = 4;
const MINUTES_OF_DAY: i64 = SECONDS_OF_DAY as i64 / 60;
/// Number of services above which all minutes are searched, without reading `present`.
const SERVICES_ASKED_FOR: usize = 50;

/// Files of the days that are kept.
pub(crate) struct DayFiles<'a> {
    pub(crate) readers: &'a Readers,
    pub(crate) kept: RangeInclusive<Day>,
    pub(crate) counters: &'a LogCounters,
}

/// File of a day with the labels of the services that are searched.
struct DaySearch<'a> {
    day: Day,
    connection: &'a Connection,
    labels: HashMap<i64, String>,
    counters: &'a LogCounters,
}

impl Source for DayFiles<'_> {
    type Error = LogError;

    fn search_day(
        &self,
        day: Day,
        seconds: RangeInclusive<u32>,
        search: &mut Search,
    ) -> Result<Option<PageEnd>, LogError> {
        let seconds = i64::from(*seconds.start())..=i64::from(*seconds.end());
        let end = self.readers.read(day, &self.kept, |reader| {
            let Reader {
                connection,
                unpacker,
            } = reader;
            let file = DaySearch {
                day,
                labels: labels(connection, &search.criteria.services)?,
                connection,
                counters: self.counters,
            };
            file.run(unpacker, seconds, search)
        });
        match end {
            Err(error) if error.is_damage() => {
                note_damage(self.counters, &error, day);
                Ok(None)
            }
            end => Ok(end?.flatten()),
        }
    }
}

impl DaySearch<'_> {
    fn run(
        &self,
        unpacker: &mut Unpacker,
        seconds: RangeInclusive<i64>,
        search: &mut Search,
    ) -> Result<Option<PageEnd>, LogError> {
        for (from, last) in windows(&self.minutes()?, seconds) {
            let mut end = self.window(unpacker, (from, last), search)?;
            if end.is_none() {
                search.spend(PASSING * (last - from + 1) as u64);
                end = search.has_searched(self.day, from as u32);
            }
            if end.is_some() {
                return Ok(end);
            }
        }
        Ok(None)
    }

    /// Minutes of a day in which the services have records, the newest first.
    fn minutes(&self) -> Result<Vec<i64>, LogError> {
        if self.labels.len() > SERVICES_ASKED_FOR {
            return Ok((0..MINUTES_OF_DAY).rev().collect());
        }
        let mut select = self
            .connection
            .prepare_cached("SELECT key FROM present WHERE key >= ?1 AND key < ?2")?;
        let mut minutes = BTreeSet::new();
        for service in self.labels.keys() {
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

    /// Searches the arrivals of the seconds `from` to `last`.
    fn window(
        &self,
        unpacker: &mut Unpacker,
        (from, last): (i64, i64),
        search: &mut Search,
    ) -> Result<Option<PageEnd>, LogError> {
        let [zone, longest_us] = search.criteria.zone();
        self.read_ahead((from, last), zone == 0 && longest_us == 0)?;
        let mut select = self.connection.prepare_cached(
            "SELECT key, blocks FROM arrival
             WHERE key >= ?1 AND key < ?2 AND zone & ?3 = ?3 AND longest_us >= ?4
             ORDER BY key DESC",
        )?;
        let keys = [arrival_keys(from), arrival_keys(last + 1)];
        let mut rows = select.query(params![keys[0], keys[1], zone, longest_us])?;
        let mut second = last;
        while let Some(row) = rows.next()? {
            let key = second_of_key(row.get(0)?);
            if key != second {
                let end = search.has_searched(self.day, second as u32);
                if end.is_some() {
                    return Ok(end);
                }
                second = key;
            }
            let blocks = row.get_ref(1)?.as_blob().map_err(rusqlite::Error::from)?;
            match read_arrived(blocks) {
                Ok(arrived) => self.arrival(unpacker, second, &arrived, search)?,
                Err(error) => note_damage(self.counters, &error, self.day),
            }
        }
        Ok(search.has_searched(self.day, second as u32))
    }

    /// Searches the blocks of an arrival.
    fn arrival(
        &self,
        unpacker: &mut Unpacker,
        second: i64,
        arrived: &[Arrived],
        search: &mut Search,
    ) -> Result<(), LogError> {
        search.spend(1 + arrived.len() as u64);
        let [zone, longest_us] = search.criteria.zone();
        let mut select = self.connection.prepare_cached(
            "SELECT data FROM block WHERE key = ?1 AND zone & ?2 = ?2 AND longest_us >= ?3",
        )?;
        for block in arrived.iter().rev() {
            if block.service != MIXED && !self.labels.contains_key(&block.service) {
                continue;
            }
            let mut found = select.query(params![block.key(second), zone, longest_us])?;
            let Some(row) = found.next()? else { continue };
            let data = row.get_ref(0)?.as_blob().map_err(rusqlite::Error::from)?;
            let read = unpacker.unpack(data).and_then(|unpacked| {
                search.spend(u64::from(block.rows));
                search.add(&unpacked, self).map(drop)
            });
            match read {
                Err(error) if error.is_damage() => note_damage(self.counters, &error, self.day),
                read => read?,
            }
        }
        Ok(())
    }

    /// Scans the range forwards once, because the kernel reads ahead in that direction only and the
    /// search reads backwards. The cost is small if the pages are cached.
    fn read_ahead(&self, (from, last): (i64, i64), blocks: bool) -> Result<(), LogError> {
        // The zone map is on the row's first page, which contains small blocks completely.
        let touch = |select: &str, keys: [i64; 2]| {
            self.connection
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
}

impl References for DaySearch<'_> {
    fn label(&self, service: i64) -> Result<Cow<'_, str>, LogError> {
        let label = self.labels.get(&service);
        label
            .map(|label| Cow::Borrowed(label.as_str()))
            .ok_or(LogError::Damaged("a service is missing"))
    }

    fn captured(&self, key: i64) -> Result<(Option<CapturedView>, Option<CapturedView>), LogError> {
        self.connection.captured(key)
    }
}

fn note_damage(counters: &LogCounters, error: &LogError, day: Day) {
    counters.damaged.fetch_add(1, Ordering::Relaxed);
    tracing::warn!(%day, %error, "request log: a search skips damaged data");
}

/// Numbers and labels of the services that are searched.
fn labels(
    connection: &Connection,
    services: &ServiceFilter,
) -> Result<HashMap<i64, String>, LogError> {
    if let ServiceFilter::Label(label) = services {
        let number = find_service(connection, label)?;
        return Ok(number
            .map(|number| (number, label.clone()))
            .into_iter()
            .collect());
    }
    let mut select = connection.prepare("SELECT number, label FROM service")?;
    let all = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let mut all = all.collect::<Result<HashMap<i64, String>, _>>()?;
    all.retain(|_, label| services.includes(label));
    Ok(all)
}

/// Returns the first and last second of each window to search. Adjacent minutes of `minutes`, which
/// are in descending order, are joined, and windows are limited to `seconds`. The first windows are
/// short, since they may have all records that the page needs.
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
        let windows = of(&all, 0..=i64::from(SECONDS_OF_DAY) - 1);
        assert!(windows.windows(2).all(|pair| pair[0].0 - 1 == pair[1].1));
        assert_eq!(
            (windows[0], windows[4], windows.last()),
            ((86_340, 86_399), (85_380, 85_679), Some(&(0, 179)))
        );
    }
}
