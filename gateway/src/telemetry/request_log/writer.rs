//! The log thread: collects what workers hand over for a moment and writes it, one transaction for each day.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use gw_shared::telemetry::mask::Masker;
use rusqlite::ErrorCode;
use zstd::bulk::Compressor;

use super::LogError;
use super::block::{Encoder, SLOT_MS};
use super::day::{Day, Now};
use super::day_file::{DayFile, Entry, ORDER_SERVICE_BITS, Tools, set_aside};
use super::expiry::Expiry;
use super::queue::{Command, Counters, Queued};

/// How long a batch waits for others to be written with it.
const COLLECT: Duration = Duration::from_millis(200);
/// Unless they have this much, in bytes.
const COLLECT_BYTES: usize = 8 * 1024 * 1024;
/// How often the thread looks after its files when nothing is to be written.
const IDLE: Duration = Duration::from_secs(1);
/// What is written is on the disk after this, at the latest: what the machine's death may take.
const CHECKPOINT: Duration = Duration::from_secs(10);
/// How often a file is tried that another process keeps busy.
const BUSY_ATTEMPTS: u32 = 3;
/// Days whose files stay open: today, and yesterday for what began then.
const OPEN_DAYS: usize = 2;
/// Shortest time between two lines about writing that fails.
const ALARM: Duration = Duration::from_secs(60);
const COMPRESSION_LEVEL: i32 = 1;

/// All that the log thread has.
pub(super) struct Writer {
    folder: PathBuf,
    now: Now,
    counters: Arc<Counters>,
    files: BTreeMap<Day, DayFile>,
    tools: Tools,
    expiry: Expiry,
    /// The day that it was when it was last looked at, and since when.
    today: (Day, Instant),
    /// The day for which expiry was last begun.
    expired_for: Option<Day>,
    /// How long a day must have lasted before others expire for it.
    settles_within: Duration,
    checkpoint_at: Instant,
    alarm: Alarm,
}

impl Writer {
    pub(super) fn new(
        folder: PathBuf,
        now: Now,
        counters: Arc<Counters>,
        settles_within: Duration,
        masker: Masker,
    ) -> Result<Self, LogError> {
        let today = (now.today(), Instant::now());
        let tools = Tools { encoder: Encoder::new()?, compressor: Compressor::new(COMPRESSION_LEVEL)?, masker };
        let mut expiry = Expiry::default();
        expiry.resume(&folder)?;
        Ok(Self {
            folder,
            now,
            counters,
            files: BTreeMap::new(),
            tools,
            expiry,
            today,
            expired_for: None,
            settles_within,
            checkpoint_at: Instant::now() + CHECKPOINT,
            alarm: Alarm::default(),
        })
    }

    /// Until it is told to end, or there is nobody left who could.
    pub(super) fn run(mut self, commands: &Receiver<Command>) {
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
                    Ok(Command::Write(queued)) => {
                        if collected.is_empty() {
                            deadline = deadline.min(Instant::now() + COLLECT);
                        }
                        bytes += queued.cost.bytes;
                        collected.push(queued);
                        if bytes >= COLLECT_BYTES {
                            break;
                        }
                    }
                    Ok(Command::Flush(done)) => {
                        flushes.push(done);
                        break;
                    }
                    // Whatever came before the end of all workers is still in the queue.
                    Ok(Command::Close) => ending = true,
                    Err(RecvTimeoutError::Timeout) => break,
                    Err(RecvTimeoutError::Disconnected) => {
                        ending = true;
                        break;
                    }
                }
            }
            self.write_all(collected);
            self.look_after_files();
            for done in flushes {
                // Whoever waited may have given up.
                let _ = done.send(());
            }
        }
    }

    fn write_all(&mut self, collected: Vec<Queued>) {
        let records: usize = collected.iter().map(|queued| queued.cost.records).sum();
        if records > 0 && catch_unwind(AssertUnwindSafe(|| self.write(&collected))).is_err() {
            self.files.clear();
            self.counters.dropped.fetch_add(records as u64, Ordering::Relaxed);
            tracing::error!(records, "request log: a panic; its records are lost");
        }
        for queued in collected {
            self.counters.release(queued.cost);
        }
    }

    fn write(&mut self, collected: &[Queued]) {
        let mut entries = in_order(collected);
        let kept = self.now.days();
        let day_of = |entry: &Entry<'_>| Day::of_ms(entry.second() * SLOT_MS);
        let all = entries.len();
        entries.retain(|entry| kept.contains(&day_of(entry)));
        self.counters.out_of_range.fetch_add((all - entries.len()) as u64, Ordering::Relaxed);
        for entries in entries.chunk_by(|a, b| day_of(a) == day_of(b)) {
            let result = self.write_day(day_of(&entries[0]), entries);
            let counter = if result.is_ok() { &self.counters.written } else { &self.counters.dropped };
            counter.fetch_add(entries.len() as u64, Ordering::Relaxed);
            self.counters.failing.store(result.is_err(), Ordering::Relaxed);
            self.alarm.note(result.as_ref().map(drop), entries.len() as u64);
        }
    }

    fn write_day(&mut self, day: Day, entries: &[Entry<'_>]) -> Result<(), LogError> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let error = match self.try_write_day(day, entries) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            // A file that failed once is opened anew.
            self.files.remove(&day);
            if is_busy(&error) && attempt < BUSY_ATTEMPTS {
                continue;
            }
            if error.is_damage() && attempt == 1 {
                let name = set_aside(&self.folder, day)?;
                self.counters.damaged.fetch_add(1, Ordering::Relaxed);
                tracing::error!(%day, %error, "request log: the day's file is damaged; kept as {name}, a new one begins");
                continue;
            }
            return Err(error);
        }
    }

    fn try_write_day(&mut self, day: Day, entries: &[Entry<'_>]) -> Result<(), LogError> {
        if !self.files.contains_key(&day) {
            self.files.insert(day, DayFile::open(&self.folder, day)?);
            while self.files.len() > OPEN_DAYS
                && let Some(oldest) = self.files.keys().copied().find(|open| *open != day)
            {
                self.files.remove(&oldest);
            }
        }
        match self.files.get_mut(&day) {
            Some(file) => file.write(entries, &mut self.tools),
            None => Ok(()),
        }
    }

    /// What is due beside writing: a checkpoint, a piece of what has expired.
    fn look_after_files(&mut self) {
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
                    tracing::debug!(%day, %error, "request log: no checkpoint now");
                }
                file.is_there()
            });
        }
    }
}

/// All records, those of one second and service together.
fn in_order(collected: &[Queued]) -> Vec<Entry<'_>> {
    let mut services: HashMap<&str, u64> = HashMap::new();
    let mut entries = Vec::with_capacity(collected.iter().map(|queued| queued.cost.records).sum());
    for (label, records) in collected.iter().flat_map(|queued| &queued.batch.services) {
        let next = services.len() as u64;
        let service = *services.entry(label.as_ref()).or_insert(next);
        let order = |unix_ms: u64| (unix_ms / SLOT_MS) << ORDER_SERVICE_BITS | service;
        entries.extend(records.iter().map(|record| Entry { order: order(record.id.unix_ms()), label, record }));
    }
    // Stable: of what is nearly in order, as it is here, that is the faster sort.
    entries.sort_by_key(|entry| entry.order);
    entries
}

fn is_busy(error: &LogError) -> bool {
    let LogError::Sqlite(error) = error else { return false };
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// Says when writing begins to fail, and when it works again.
#[derive(Default)]
struct Alarm {
    failing: bool,
    lost: u64,
    said_at: Option<Instant>,
    /// The beginning was said: its end will be.
    said: bool,
}

impl Alarm {
    fn note(&mut self, result: Result<(), &LogError>, records: u64) {
        match result {
            Err(error) => {
                self.lost += records;
                if !self.failing && self.said_at.is_none_or(|at| at.elapsed() >= ALARM) {
                    self.said_at = Some(Instant::now());
                    self.said = true;
                    tracing::error!(%error, "request log: records are being lost until this is over");
                }
                self.failing = true;
            }
            Ok(()) => {
                if std::mem::take(&mut self.failing) && std::mem::take(&mut self.said) {
                    tracing::warn!(lost = std::mem::take(&mut self.lost), "request log: records are written again");
                }
            }
        }
    }
}
