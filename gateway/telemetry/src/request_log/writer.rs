//! Log thread: collects batches for a short time and writes them in one transaction per day.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{fs, io};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use gw_base::process::background;
use gw_shared::telemetry::mask::Masker;
use rusqlite::ErrorCode;
use zstd::bulk::Compressor;

use super::LogError;
use super::access_log::AccessLogQueue;
use super::alarm::Alarm;
use super::block::{Encoder, SLOT_MS};
use super::days::day::{Day, Now};
use super::days::day_file::{DayFile, ORDER_SERVICE_BITS, OrderedRecord, Tools, set_aside};
use super::days::disk::{LogDisk, mark_removed};
use super::days::expiry::Expiry;
use super::days::shares::LeftOut;
use super::queue::{LogCommand, LogCounters, Queued};

/// Time for which batches are collected before they are written together.
const COLLECT: Duration = Duration::from_millis(200);
/// Size in bytes at which collected batches are written at once.
const COLLECT_BYTES: usize = 8 * 1024 * 1024;
/// Interval of maintenance when there is nothing to write.
const IDLE: Duration = Duration::from_secs(1);
/// Interval of checkpoints. A crash of the machine loses the records of at most this time.
const CHECKPOINT: Duration = Duration::from_secs(10);
/// Attempts to write to a file that another process keeps locked.
const BUSY_ATTEMPTS: u32 = 3;
/// Number of files that stay open: today's, and yesterday's for requests that began then.
const OPEN_DAYS: usize = 2;
const COMPRESSION_LEVEL: i32 = 1;

/// State of the log thread.
pub(super) struct Writer {
    folder: PathBuf,
    now: Now,
    /// Bound on the bytes of the files; `None` for the default.
    max_bytes: Option<u64>,
    counters: Arc<LogCounters>,
    files: BTreeMap<Day, DayFile>,
    tools: Tools,
    expiry: Expiry,
    /// Day at the last maintenance, and since when it is that day.
    today: (Day, Instant),
    /// Day on which expiry last began.
    expired_for: Option<Day>,
    /// Time for which the clock must show the same day before files expire.
    settles_within: Duration,
    checkpoint_at: Instant,
    alarm: Alarm,
    /// `None` without an access log.
    access_log: Option<AccessLogQueue>,
}

impl Writer {
    pub(super) fn new(
        folder: PathBuf,
        now: Now,
        counters: Arc<LogCounters>,
        settles_within: Duration,
        masker: Masker,
        access_log: Option<AccessLogQueue>,
        max_bytes: Option<u64>,
    ) -> Result<Self, LogError> {
        let today = (now.today(), Instant::now());
        let tools = Tools {
            encoder: Encoder::new()?,
            compressor: Compressor::new(COMPRESSION_LEVEL)?,
            masker,
        };
        let mut expiry = Expiry::default();
        expiry.resume(&folder)?;
        let files = not_synced(&folder, LogDisk::measure(&folder, max_bytes)?.most)?;
        Ok(Self {
            folder,
            now,
            max_bytes,
            counters,
            files,
            tools,
            expiry,
            today,
            expired_for: None,
            settles_within,
            checkpoint_at: Instant::now() + CHECKPOINT,
            alarm: Alarm::new("request log"),
            access_log,
        })
    }

    /// Runs until [`LogCommand::Close`] is received or all senders are dropped.
    pub(super) fn run(mut self, commands: &Receiver<LogCommand>) {
        let mut ending = false;
        while !ending {
            let mut collected = Vec::new();
            let mut flushes = Vec::new();
            let mut bytes = 0;
            let mut deadline = Instant::now() + IDLE;
            loop {
                let command = if ending {
                    commands.try_recv().map_err(|_| RecvTimeoutError::Timeout)
                } else {
                    commands.recv_deadline(deadline)
                };
                match command {
                    Ok(LogCommand::Write(queued)) => {
                        if collected.is_empty() {
                            deadline = deadline.min(Instant::now() + COLLECT);
                        }
                        bytes += queued.cost.bytes;
                        collected.push(queued);
                        if bytes >= COLLECT_BYTES {
                            break;
                        }
                    }
                    Ok(LogCommand::PassOn(queued)) => self.pass_on(queued),
                    Ok(LogCommand::Flush(done)) => {
                        flushes.push(done);
                        break;
                    }
                    // Batches sent before are still in the queue and are written first.
                    Ok(LogCommand::Close) => ending = true,
                    Err(RecvTimeoutError::Timeout) => break,
                    Err(RecvTimeoutError::Disconnected) => {
                        ending = true;
                        break;
                    }
                }
            }
            self.write_all(collected);
            self.maintain_files();
            for done in flushes {
                // The waiting thread may have ended.
                let _ = done.send(());
            }
        }
    }

    fn write_all(&mut self, collected: Vec<Queued>) {
        let records: usize = collected.iter().map(|queued| queued.cost.records).sum();
        let write = || self.write(&collected);
        if records > 0 && background::contained("a write of the request log", write).is_none() {
            self.files.clear();
            self.counters
                .dropped
                .fetch_add(records as u64, Ordering::Relaxed);
            tracing::error!(
                records,
                "request log: a write panicked; its records are lost"
            );
        }
        for queued in collected {
            self.pass_on(queued);
        }
    }

    /// Leaves a batch to the access log, if there is one, and releases its room.
    fn pass_on(&self, Queued { batch, cost }: Queued) {
        if let Some(access_log) = &self.access_log {
            access_log.push(batch);
        }
        self.counters.release(cost);
    }

    fn write(&mut self, collected: &[Queued]) {
        let mut entries = in_order(collected);
        let kept = self.now.days();
        let day_of = |entry: &OrderedRecord<'_>| Day::of_ms(entry.second() * SLOT_MS);
        let all = entries.len();
        let bytes = collected
            .iter()
            .map(|queued| queued.cost.bytes as u64)
            .sum();
        entries.retain(|entry| kept.contains(&day_of(entry)));
        self.counters
            .out_of_range
            .fetch_add((all - entries.len()) as u64, Ordering::Relaxed);
        for entries in entries.chunk_by(|a, b| day_of(a) == day_of(b)) {
            let all = entries.len() as u64;
            let result = self.write_day(day_of(&entries[0]), entries, bytes);
            let LeftOut { records, captures } = *result.as_ref().unwrap_or(&LeftOut::default());
            let lost = if result.is_ok() { 0 } else { all };
            let counters = &self.counters;
            for (counter, count) in [
                (&counters.written, all - lost - records),
                (&counters.dropped, lost),
                (&counters.over_share, records),
                (&counters.captures_over_share, captures),
            ] {
                counter.fetch_add(count, Ordering::Relaxed);
            }
            counters.failing.store(lost > 0, Ordering::Relaxed);
            self.alarm.note(result.as_ref().map(drop), lost);
        }
    }

    /// Writes `entries`, which take at most `bytes`.
    fn write_day(
        &mut self,
        day: Day,
        entries: &[OrderedRecord<'_>],
        bytes: u64,
    ) -> Result<LeftOut, LogError> {
        let disk = self.make_room(bytes)?;
        let mut attempt = 0;
        loop {
            attempt += 1;
            let error = match self.try_write_day(day, entries, &disk) {
                Ok(left_out) => return Ok(left_out),
                Err(error) => error,
            };
            // After an error the file is opened again.
            self.files.remove(&day);
            if is_busy(&error) && attempt < BUSY_ATTEMPTS {
                continue;
            }
            if error.is_damage() && attempt == 1 {
                let name = set_aside(&self.folder, day)?;
                self.counters.damaged.fetch_add(1, Ordering::Relaxed);
                tracing::error!(%day, %error,
                    "request log: the file of the day is damaged; it is kept as {name} and a new \
                     one is created");
                continue;
            }
            return Err(error);
        }
    }

    /// Checks that there is room for `bytes`. Removes the oldest days first if the files are larger
    /// than their bound, which shares prevent unless it was lowered.
    fn make_room(&mut self, bytes: u64) -> Result<LogDisk, LogError> {
        loop {
            let disk = LogDisk::measure(&self.folder, self.max_bytes)?;
            let is_old = |day: &Day| *day < self.now.today();
            let Some(day) = disk.oldest.filter(is_old).filter(|_| disk.used > disk.most) else {
                disk.check(bytes)?;
                return Ok(disk);
            };
            tracing::warn!(%day, bytes = disk.used, request_log_max_bytes = disk.most,
                "request log: the files are too large, the oldest day is removed; raise \
                 request_log_max_bytes");
            self.files.retain(|open, _| *open > day);
            self.expiry.begin(&self.folder, Day(day.0 + 1))?;
            self.counters.days_removed.fetch_add(1, Ordering::Relaxed);
            if let Err(error) = mark_removed(&self.folder, day) {
                tracing::warn!(%day, %error,
                    "request log: the removal of the day is not marked, so `doctor` does not tell \
                     of it");
            }
        }
    }

    fn try_write_day(
        &mut self,
        day: Day,
        entries: &[OrderedRecord<'_>],
        disk: &LogDisk,
    ) -> Result<LeftOut, LogError> {
        if !self.files.contains_key(&day) {
            let file = DayFile::open(&self.folder, day, disk.most)?;
            self.files.insert(day, file);
            while self.files.len() > OPEN_DAYS
                && let Some(oldest) = self.files.keys().copied().find(|open| *open != day)
            {
                self.files.remove(&oldest);
            }
        }
        let Some(file) = self.files.get_mut(&day) else {
            return Ok(LeftOut::default());
        };
        let admitted = file.shares.admit(entries, disk.of_day());
        file.write(&admitted, &mut self.tools)?;
        Ok(file.shares.left_out)
    }

    /// Does the due maintenance: a checkpoint, and one step of removing expired files.
    fn maintain_files(&mut self) {
        let today = self.now.today();
        let oldest = *self.now.days().start();
        if self.today.0 != today {
            self.today = (today, Instant::now());
        }
        if self.expired_for != Some(today) && self.today.1.elapsed() >= self.settles_within {
            self.expired_for = Some(today);
            self.files.retain(|day, _| *day >= oldest);
            if let Err(error) = self.expiry.begin(&self.folder, oldest) {
                tracing::warn!(%error, "request log: expired files cannot be removed");
            }
        }
        if let Err(error) = self.expiry.step() {
            tracing::warn!(%error, "request log: an expired file cannot be removed");
        }
        if Instant::now() >= self.checkpoint_at {
            self.checkpoint_at = Instant::now() + CHECKPOINT;
            self.files.retain(|day, file| {
                if file.dirty
                    && let Err(error) = file.checkpoint()
                {
                    tracing::debug!(%day, %error,
                        "request log: the checkpoint failed and is tried again later");
                }
                file.is_there()
            });
        }
    }
}

/// Opens the newest files with a write-ahead log. A process that was killed has not synced it, and
/// there may be no more records of these days, with which it would be. A damaged file is found by
/// its next reader or writer.
fn not_synced(folder: &Path, most: u64) -> io::Result<BTreeMap<Day, DayFile>> {
    let mut days = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let Some(name) = name.to_str().and_then(|name| name.strip_suffix("-wal")) else {
            continue;
        };
        // Not the file of a damaged one that is kept.
        days.extend(Day::of_file_name(name).filter(|day| day.file_name() == name));
    }
    days.sort_unstable();
    let newest = days.into_iter().rev().take(OPEN_DAYS);
    Ok(newest
        .filter_map(|day| Some((day, DayFile::open(folder, day, most).ok()?)))
        .collect())
}

/// Returns all records, sorted by second and service.
fn in_order(collected: &[Queued]) -> Vec<OrderedRecord<'_>> {
    let mut services: HashMap<&str, u64> = HashMap::new();
    let mut entries = Vec::with_capacity(collected.iter().map(|queued| queued.cost.records).sum());
    for (label, records) in collected.iter().flat_map(|queued| &queued.batch.services) {
        let next = services.len() as u64;
        let service = *services.entry(label.as_ref()).or_insert(next);
        let order = |unix_ms: u64| (unix_ms / SLOT_MS) << ORDER_SERVICE_BITS | service;
        entries.extend(records.iter().map(|record| OrderedRecord {
            order: order(record.id.unix_ms()),
            label,
            record,
        }));
    }
    // The stable sort is faster for nearly sorted input, such as this.
    entries.sort_by_key(|entry| entry.order);
    entries
}

fn is_busy(error: &LogError) -> bool {
    let LogError::Sqlite(error) = error else {
        return false;
    };
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked)
    )
}
