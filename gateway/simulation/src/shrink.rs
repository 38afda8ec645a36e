//! Makes a scenario smaller, as long as it still fails in the same way.
//!
//! The order of the attempts is fixed, so the same scenario always shrinks to the same one. First
//! lists lose elements, many at once, then what is left becomes simpler. This repeats until nothing
//! changes, or the attempts are used up.

use std::time::Duration;

use crate::scenario::{
    Affinity, Agent, Caller, Conduct, Fault, FaultKind, Framing, Method, Request, Response,
    ResponseFault, Scenario, Service, Upload,
};

/// What came of shrinking.
#[derive(Debug, Clone, PartialEq)]
pub struct Shrunk {
    /// The smallest scenario that was found to fail.
    pub scenario: Scenario,
    /// Scenarios that were tried.
    pub attempts: usize,
    /// There was no smaller one to try.
    pub is_minimal: bool,
}

/// Shrinks a scenario that fails. `fails` runs a scenario and says whether it fails in the same
/// way; it is called at most `attempts_max` times.
pub fn shrink(
    scenario: &Scenario,
    attempts_max: usize,
    fails: impl FnMut(&Scenario) -> bool,
) -> Shrunk {
    let mut search = Search {
        best: scenario.clone(),
        attempts_left: attempts_max,
        seeds: 1,
        fails,
    };
    loop {
        let before = search.best.clone();
        search.seeds = SEEDS;
        search.shorten();
        search.seeds = 1;
        search.simplify();
        let is_minimal = search.best == before;
        if is_minimal || search.attempts_left == 0 {
            return Shrunk {
                attempts: attempts_max - search.attempts_left,
                is_minimal: is_minimal && search.attempts_left > 0,
                scenario: search.best,
            };
        }
    }
}

/// Seeds of the kernel to try for a shorter scenario: without what was removed the same seed makes
/// other choices.
const SEEDS: u64 = 3;

struct Search<F> {
    best: Scenario,
    attempts_left: usize,
    /// Seeds to try for each scenario.
    seeds: u64,
    fails: F,
}

impl<F: FnMut(&Scenario) -> bool> Search<F> {
    /// Takes the changed scenario if it is another one and fails. Returns whether it did.
    fn attempt(&mut self, change: impl FnOnce(&mut Scenario)) -> bool {
        let mut candidate = self.best.clone();
        change(&mut candidate);
        if candidate == self.best {
            return false;
        }
        for _ in 0..self.seeds.min(self.attempts_left as u64) {
            self.attempts_left -= 1;
            if (self.fails)(&candidate) {
                self.best = candidate;
                return true;
            }
            candidate.seed = candidate.seed.wrapping_add(1);
        }
        false
    }

    /// Removes elements of a list of `length` elements: halves of it first, then smaller parts,
    /// then single ones.
    fn remove(
        &mut self,
        length: impl Fn(&Scenario) -> usize,
        remove: impl Fn(&mut Scenario, usize),
    ) {
        let mut part = length(&self.best);
        while part > 0 {
            // From the end: what came last is the least likely cause of what came before.
            let mut end = length(&self.best);
            while end > 0 {
                let from = end.saturating_sub(part);
                self.attempt(|scenario| {
                    for index in (from..end).rev() {
                        remove(scenario, index);
                    }
                });
                end = from;
            }
            part /= 2;
        }
    }

    fn shorten(&mut self) {
        self.remove(
            |scenario| scenario.faults.len(),
            |scenario, index| {
                scenario.faults.remove(index);
            },
        );
        self.remove(|scenario| scenario.callers.len(), remove_caller);
        for caller in 0..self.best.callers.len() {
            self.remove(
                |scenario| scenario.callers[caller].requests.len(),
                |scenario, index| {
                    scenario.callers[caller].requests.remove(index);
                },
            );
        }
        self.remove(|scenario| scenario.agents.len(), remove_agent);
        self.remove(|scenario| scenario.services.len(), remove_service);
        while self.best.workers > 1 && self.attempt(remove_worker) {}
    }

    fn simplify(&mut self) {
        for change in WHOLE {
            self.attempt(change);
        }
        for index in 0..self.best.services.len() {
            for change in SERVICE {
                self.attempt(|scenario| change(&mut scenario.services[index]));
            }
        }
        for index in 0..self.best.agents.len() {
            for change in AGENT {
                self.attempt(|scenario| change(&mut scenario.agents[index]));
            }
        }
        for index in 0..self.best.faults.len() {
            for change in FAULT {
                while self.attempt(|scenario| change(&mut scenario.faults[index])) {}
            }
        }
        for caller in 0..self.best.callers.len() {
            for change in CALLER {
                while self.attempt(|scenario| change(&mut scenario.callers[caller])) {}
            }
            for index in 0..self.best.callers[caller].requests.len() {
                for change in REQUEST {
                    let change = |scenario: &mut Scenario| {
                        change(&mut scenario.callers[caller].requests[index]);
                    };
                    while self.attempt(change) {}
                }
            }
        }
    }
}

fn remove_caller(scenario: &mut Scenario, removed: usize) {
    scenario.callers.remove(removed);
    scenario.faults.retain_mut(|fault| match &mut fault.kind {
        FaultKind::CutCaller { caller, .. } => renumber(caller, removed),
        _ => true,
    });
}

/// Removes an agent and its faults. One agent stays.
fn remove_agent(scenario: &mut Scenario, removed: usize) {
    if scenario.agents.len() == 1 {
        return;
    }
    scenario.agents.remove(removed);
    scenario.faults.retain_mut(|fault| match &mut fault.kind {
        FaultKind::KillAgent { agent, .. }
        | FaultKind::FreezeAgent { agent, .. }
        | FaultKind::CopyAgent { agent, .. }
        | FaultKind::DrainAgent { agent, .. }
        | FaultKind::CutAgent { agent, .. }
        | FaultKind::CutBackend { agent, .. }
        | FaultKind::KillBackend { agent, .. }
        | FaultKind::RevokeAgent { agent, .. } => renumber(agent, removed),
        _ => true,
    });
}

/// Removes a service with its callers and faults. One service stays.
fn remove_service(scenario: &mut Scenario, removed: usize) {
    if scenario.services.len() == 1 {
        return;
    }
    scenario.services.remove(removed);
    for caller in (0..scenario.callers.len()).rev() {
        if !renumber(&mut scenario.callers[caller].service, removed) {
            remove_caller(scenario, caller);
        }
    }
    scenario.faults.retain_mut(|fault| match &mut fault.kind {
        FaultKind::DisableKey { service, .. } | FaultKind::ChangeRate { service, .. } => {
            renumber(service, removed)
        }
        _ => true,
    });
}

/// Removes the last worker and its faults.
fn remove_worker(scenario: &mut Scenario) {
    scenario.workers -= 1;
    let workers = scenario.workers;
    scenario.faults.retain(|fault| match fault.kind {
        FaultKind::FreezeWorker { worker, .. } | FaultKind::PanicWorker { worker } => {
            worker < workers
        }
        _ => true,
    });
}

/// Changes an index after the removal of an element. False if it was this element's.
fn renumber(index: &mut usize, removed: usize) -> bool {
    let is_kept = *index != removed;
    if *index > removed {
        *index -= 1;
    }
    is_kept
}

const WHOLE: [fn(&mut Scenario); 4] = [
    one_node,
    |scenario| scenario.delay = Duration::from_micros(20),
    |scenario| scenario.segment = 64 * 1024,
    |scenario| scenario.crosses_workers = false,
];

/// Leaves one node, without the faults of several.
fn one_node(scenario: &mut Scenario) {
    scenario.nodes = 1;
    let is_of_nodes = |kind: &FaultKind| {
        matches!(
            kind,
            FaultKind::CutNodes { .. } | FaultKind::LeaveNode { .. }
        )
    };
    scenario.faults.retain(|fault| !is_of_nodes(&fault.kind));
}

const SERVICE: [fn(&mut Service); 3] = [
    |service| service.burst = 1000,
    |service| service.affinity = Affinity::None,
    |service| service.retries = true,
];

const AGENT: [fn(&mut Agent); 3] = [
    |agent| agent.slots = 128,
    |agent| agent.is_standby = false,
    |agent| agent.has_http2_backends = false,
];

const FAULT: [fn(&mut Fault); 3] = [
    |fault| fault.at = rounded(fault.at),
    |fault| set_time(fault, rounded),
    |fault| set_time(fault, halved),
];

const CALLER: [fn(&mut Caller); 6] = [
    |caller| {
        // HTTP/1.1 has one request at a time.
        caller.is_http2 = false;
        caller.at_once = 1;
    },
    |caller| caller.at_once = caller.at_once.min(1),
    |caller| caller.pipelined = 1,
    |caller| caller.begins = Duration::ZERO,
    |caller| caller.begins = rounded(caller.begins),
    |caller| caller.pause = Duration::ZERO,
];

const REQUEST: [fn(&mut Request); 21] = [
    |request| request.conduct = Conduct::Patient,
    |request| set_method(request, Method::Get),
    |request| set_upload(request, |upload| upload.length = 0),
    |request| set_upload(request, |upload| upload.length = shorter(upload.length)),
    |request| {
        set_upload(request, |upload| {
            upload.is_chunked = false;
            upload.has_trailers = false;
        });
    },
    |request| set_upload(request, |upload| upload.pause = Duration::ZERO),
    |request| set_upload(request, |upload| upload.stall = Duration::ZERO),
    |request| set_upload(request, |upload| upload.has_trailers = false),
    |request| set_upload(request, |upload| upload.expects_continue = false),
    |request| request.response.fault = ResponseFault::None,
    |request| set_stall(&mut request.response, rounded),
    |request| set_stall(&mut request.response, halved),
    |request| request.response.framing = Framing::Length,
    |request| request.response.has_trailers = false,
    |request| request.response.interim = 0,
    |request| request.response.is_early = false,
    |request| request.response.status = 200,
    |request| request.response.delay = Duration::ZERO,
    |request| request.response.length = 0,
    |request| request.response.length = shorter(request.response.length),
    |request| set_pace(&mut request.conduct, halved),
];

/// Changes the method to one without an upload.
fn set_method(request: &mut Request, method: Method) {
    request.method = method;
    request.upload = None;
}

fn set_upload(request: &mut Request, change: fn(&mut Upload)) {
    if let Some(upload) = &mut request.upload {
        change(upload);
    }
}

fn set_stall(response: &mut Response, change: fn(Duration) -> Duration) {
    if let ResponseFault::Stalls(time) = &mut response.fault {
        *time = change(*time);
    }
}

fn set_pace(conduct: &mut Conduct, change: fn(Duration) -> Duration) {
    if let Conduct::SlowReader(pause) = conduct {
        *pause = change(*pause);
    }
}

fn set_time(fault: &mut Fault, change: fn(Duration) -> Duration) {
    match &mut fault.kind {
        FaultKind::KillAgent {
            back_after: time, ..
        }
        | FaultKind::DrainAgent {
            back_after: time, ..
        }
        | FaultKind::KillBackend {
            back_after: time, ..
        }
        | FaultKind::KillGateway { back_after: time }
        | FaultKind::FreezeAgent { lasts: time, .. }
        | FaultKind::CopyAgent { lasts: time, .. }
        | FaultKind::CutAgent { lasts: time, .. }
        | FaultKind::CutBackend { lasts: time, .. }
        | FaultKind::CutCaller { lasts: time, .. }
        | FaultKind::FreezeWorker { lasts: time, .. }
        | FaultKind::DisableKey { lasts: time, .. }
        | FaultKind::RevokeAgent { lasts: time, .. }
        | FaultKind::CutNodes { lasts: time, .. }
        | FaultKind::LeaveNode {
            back_after: time, ..
        }
        | FaultKind::JumpClock { by: time, .. } => *time = change(*time),
        FaultKind::ChangeRate { .. } | FaultKind::PanicWorker { .. } | FaultKind::TakeOver => {}
    }
}

/// Half of a time, as far as a second half is of any use.
fn halved(time: Duration) -> Duration {
    if time > Duration::from_millis(1) {
        time / 2
    } else {
        time
    }
}

/// A time with fewer digits.
fn rounded(time: Duration) -> Duration {
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let digits = millis.checked_ilog10().unwrap_or(0);
    let unit = 10_u64.pow(digits);
    Duration::from_millis(millis / unit * unit)
}

/// Half of a length.
fn shorter(length: usize) -> usize {
    if length > 16 { length / 2 } else { length }
}
