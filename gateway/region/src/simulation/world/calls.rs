//! Calls of hosts to the engine, and the delays and losses of messages.

use super::*;

impl World {
    pub(super) fn execute(&mut self, work: Work) {
        let Work::Execute {
            host,
            process,
            generation,
            call,
        } = work
        else {
            return;
        };
        let is_lost = !self.hosts[host].requests_pass || generation != self.engine.generation;
        let hangs = self.engine.mode == EngineMode::SyncHung && call.statement.is_synchronous();
        if is_lost || self.engine.mode == EngineMode::Down {
            return self.refuse_call(host, process, call.id);
        }
        // A commit that waits for a standby may be visible, without its reply.
        if hangs && self.random.percent(50) {
            return self.lose_call(host);
        }
        let long_outage_end = self.engine.long_outage_end;
        let applied = self.engine.execute(self.now, &call.statement);
        self.note(|| format!("engine: host {host} {:?} applied {applied}", call.statement));
        if applied {
            self.check_statement(&call.statement, long_outage_end);
        }
        if hangs {
            return self.lose_call(host);
        }
        let roster = self.engine.roster();
        let at = self.now + self.engine_delay(host);
        let executed = self.now;
        if !self.hosts[host].replies_pass || self.loses() {
            return self.lose_call(host);
        }
        let result = CallResult::Done { applied, roster };
        self.push(
            at,
            Work::Answer {
                host,
                process,
                call: call.id,
                executed,
                result,
            },
        );
    }

    /// The engine cannot be reached: the call times out, or fails at once.
    pub(super) fn refuse_call(&mut self, host: usize, process: u64, call: u64) {
        self.lose_call(host);
        if self.random.percent(30) {
            let at = self.now + Duration::from_millis(1);
            let result = CallResult::Failed;
            self.push(
                at,
                Work::Answer {
                    host,
                    process,
                    call,
                    executed: self.now,
                    result,
                },
            );
        }
    }

    pub(super) fn lose_call(&mut self, host: usize) {
        self.hosts[host].disturbed = self.now;
        if let Some(process) = &mut self.hosts[host].process {
            process.failed = Some(process.called);
        }
    }

    pub(super) fn loses(&mut self) -> bool {
        self.loss > 0 && self.random.percent(self.loss)
    }

    /// Time of one direction of a call.
    pub(super) fn engine_delay(&mut self, host: usize) -> Duration {
        if self.loses() {
            let delay = self.random.millis(300, 3_000);
            self.lose_call(host);
            self.hosts[host].disturbed = self.now + delay;
            return delay;
        }
        if self.hosts[host].is_slow {
            let delay = self.random.millis(200, 450);
            self.hosts[host].disturbed = self.now + delay;
            return delay;
        }
        Duration::from_micros(100 + self.random.below(5_000))
    }

    pub(super) fn peer_delay(&mut self) -> Duration {
        if self.loses() {
            self.peers_disturbed = true;
            return self.random.millis(100, 4_000);
        }
        Duration::from_micros(50 + self.random.below(5_000))
    }
}
