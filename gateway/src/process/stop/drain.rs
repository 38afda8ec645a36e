//! Drain: running requests finish, then the gateway stops.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use crate::limits;
use crossbeam_channel::Sender;
use gw_data_plane::worker::WorkerMessage;
use gw_interface::rate_limit::Level;
use gw_telemetry::counters::WorkerReport;

use super::last_stop::LastStop;
use crate::process::gateway::Gateway;

/// Interval between checks for the end of the last request, in the first second of a drain.
const DRAIN_TICK_FIRST: Duration = Duration::from_millis(4);
/// Interval between these checks after the first second.
const DRAIN_TICK: Duration = Duration::from_millis(20);

/// Time after which tunnels are moved once more that were accepted at the last moment. A node that
/// leaves accepts them until its services have moved.
const LATE_TUNNELS: Duration = Duration::from_secs(1);

impl Gateway {
    /// Accepts no new connections, serves existing ones until they end (up to the configured time),
    /// tells the agents to end their tunnels, then stops.
    pub fn drain(mut self) {
        self.drain.begun.store(true, Ordering::Relaxed);
        let successor = self.drain.has_successor;
        let began = Instant::now();
        let tunnels = if self.node.settings.is_some() {
            BTreeMap::new()
        } else {
            self.live_tunnels()
        };
        if !successor {
            self.leave_region();
        }
        // First, so that a worker that panics now is either started again before it is told of the
        // drain, or not at all.
        if let Some(workers) = &self.workers {
            workers.drain();
        }
        self.handles.tell_all(|| WorkerMessage::Drain { successor });
        self.listeners = None;
        self.move_spliced_tunnels();
        let is_last = Cell::new(false);
        self.wait_within(self.drain.within, || {
            if began.elapsed() >= LATE_TUNNELS && !is_last.replace(true) {
                self.move_spliced_tunnels();
            }
            if !successor {
                self.end_quiet_connections();
            }
            self.all_report(|report| {
                report.connections == 0 && report.crossings_served == 0 && report.node_requests == 0
            })
        });
        if successor && let Some(predecessor) = &self.drain.predecessor {
            // This process relays the successor's records to its own predecessor, so it waits for
            // the predecessor's end. The channel carries no messages.
            let _ = predecessor.recv_timeout(self.drain.within.saturating_sub(began.elapsed()));
        }
        self.handles.tell_all(|| WorkerMessage::End);
        self.wait_within(limits::TUNNELS_END, || {
            self.all_report(|report| report.tunnels.is_empty())
        });
        if !successor {
            self.store_last_stop(tunnels);
        }
        // Before the workers stop, so that their last counts are recorded.
        self.tasks.recording.stop(limits::SERIES_END);
        if let Some(workers) = &self.workers {
            workers.stopping();
        }
        self.handles.tell_all(|| WorkerMessage::Stop);
        self.tasks.control_plane.stop(limits::CONTROL_PLANE_END);
        // Not left to the last user of the control plane: the runtime drops its tasks later, on its
        // own threads.
        if self.control.has_store() {
            self.control.close_store();
        }
        if let Some(workers) = &self.workers {
            workers.join();
        }
        if let Some(exporter) = self.tasks.exporter.take() {
            exporter.stop(limits::SPANS_END);
        }
        self.request_log.close();
        self.node.members = None;
        self.tasks.helpers.stop(limits::HELPERS_END);
    }

    /// Stores the levels of rate limits and the services with tunnels for the next start.
    fn store_last_stop(&self, tunnels: BTreeMap<String, usize>) {
        let path = &self.drain.last_stop_path;
        let levels = self.bucket_levels(WorkerMessage::ReportLevels);
        if let Err(error) = (LastStop { levels, tunnels }).store(path, SystemTime::now()) {
            tracing::error!(path = %path.display(), %error,
                "cannot store state for the next start: rate limits start full");
        }
    }

    /// Collects the levels of the buckets from the workers. Logs the number of workers that did not
    /// answer.
    pub(crate) fn bucket_levels(
        &self,
        question: impl Fn(Sender<Vec<Level>>) -> WorkerMessage,
    ) -> Vec<Level> {
        let levels = self.handles.ask_all_within(limits::LEVELS_WITHIN, question);
        let missing = self.handles.mailboxes.len() - levels.len();
        if missing > 0 {
            tracing::warn!(
                "{missing} workers did not report the levels of their rate limits: these start full"
            );
        }
        levels.concat()
    }

    /// Ends idle connections once no worker has a running request.
    fn end_quiet_connections(&self) {
        let quiet = self.handles.ask_all(WorkerMessage::ReportQuiet);
        if quiet.len() == self.handles.running() && !quiet.contains(&false) {
            self.handles.tell_all(|| WorkerMessage::EndQuiet);
        }
    }

    fn all_report(&self, holds: impl Fn(&WorkerReport) -> bool) -> bool {
        let reports = self.control.reports();
        reports.len() == self.handles.running() && reports.iter().all(holds)
    }

    fn wait_within(&self, limit: Duration, is_done: impl Fn() -> bool) {
        let began = Instant::now();
        // Twice in a row: one check misses a connection that moves from one worker to another.
        let mut times_done = 0;
        loop {
            times_done = if is_done() { times_done + 1 } else { 0 };
            if times_done == 2 || began.elapsed() >= limit {
                return;
            }
            let is_first_second = began.elapsed() < Duration::from_secs(1);
            std::thread::sleep(if is_first_second {
                DRAIN_TICK_FIRST
            } else {
                DRAIN_TICK
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gw_store::{SqliteStore, StoreSource};

    use super::*;
    use crate::demo::Options;

    #[test]
    fn a_gateway_that_has_stopped_leaves_its_records_to_other_programs() {
        let folder = tempfile::tempdir().unwrap();
        let config = Options::default().config(folder.path().to_owned());
        let gateway = Gateway::start(&config).unwrap();
        // As a task of the runtime that is dropped after the stop.
        let control = Arc::clone(gateway.control());
        gateway.drain();
        SqliteStore::open_existing(&StoreSource::sqlite_in(folder.path())).unwrap();
        drop(control);
    }
}
