//! Callers that send one request after the other, on agents of which some are sick.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::*;

#[derive(Debug, Clone, Copy)]
enum BackendBehavior {
    Answers { millis: u64 },
    Fails { failure: TunnelFailure, millis: u64 },
}

use BackendBehavior::{Answers, Fails};

const REFUSES: BackendBehavior = Fails {
    failure: TunnelFailure::Unreachable,
    millis: 1,
};
const BREAKS: BackendBehavior = Fails {
    failure: TunnelFailure::Broken,
    millis: 2,
};
/// A connect that ends when the agent's limit of time is over.
const HANGS: BackendBehavior = Fails {
    failure: TunnelFailure::Unreachable,
    millis: 3000,
};

struct LoadRun {
    random: Random,
    start: Instant,
    now: Instant,
    backends: Vec<BackendBehavior>,
    agents: Vec<SimulatedAgent>,
    budget: AttemptBudget,
    /// Attempts by the time at which they end. The number makes the keys unique.
    running: BTreeMap<(Instant, u64), (usize, Request, BegunAttempt, Instant)>,
    number: u64,
    /// Callers that begin their next request at a time.
    pausing: BTreeMap<(Instant, u64), ()>,
    requests: usize,
    /// Times at which attempts began, for each agent.
    attempts: Vec<Vec<Duration>>,
    /// Sessions, of which each request has a random one, with their requests at each agent.
    sessions: Vec<Vec<usize>>,
    /// Agents that have lost their tunnels, as a set of bits.
    lost: u64,
    /// Times at which requests failed, and whether because all were full.
    failures: Vec<(Duration, bool)>,
}

impl LoadRun {
    fn new(seed: u64, callers: usize, backends: &[BackendBehavior], slots: &[usize]) -> Self {
        let now = Instant::now();
        let agents = slots
            .iter()
            .enumerate()
            .map(|(key, slots)| SimulatedAgent::new(*slots, key as u64, now))
            .collect();
        Self {
            random: Random::new(seed),
            start: now,
            now,
            backends: backends.to_vec(),
            agents,
            budget: AttemptBudget::new(now),
            running: BTreeMap::new(),
            number: callers as u64,
            pausing: (0..callers as u64)
                .map(|caller| ((now, caller), ()))
                .collect(),
            requests: 0,
            attempts: vec![Vec::new(); backends.len()],
            sessions: Vec::new(),
            lost: 0,
            failures: Vec::new(),
        }
    }

    fn forget_sessions(&mut self, count: usize) {
        self.sessions = vec![vec![0; self.agents.len()]; count];
    }

    /// The agent with the most requests of each session, `None` without requests, and the share of
    /// requests at other agents in percent.
    fn agents_of_sessions(&self) -> (Vec<Option<usize>>, f64) {
        let most = |requests: &Vec<usize>| (0..requests.len()).max_by_key(|agent| requests[*agent]);
        let own = self
            .sessions
            .iter()
            .map(|requests| most(requests).filter(|agent| requests[*agent] > 0))
            .collect();
        let all: usize = self.sessions.iter().flatten().sum();
        let at_own: usize = self
            .sessions
            .iter()
            .filter_map(|requests| requests.iter().max())
            .sum();
        (own, 100.0 * (all - at_own) as f64 / all as f64)
    }

    /// Runs until a time after the start.
    fn run_until(&mut self, end: Duration) {
        loop {
            let next_end = self.running.first_key_value().map(|(key, _)| Reverse(*key));
            let next_begin = self
                .pausing
                .first_key_value()
                .map(|(key, ())| Reverse(*key));
            let Some(Reverse((at, _))) = next_end.max(next_begin) else {
                panic!("no caller is left")
            };
            if at - self.start > end {
                return;
            }
            self.now = at;
            if next_begin >= next_end {
                self.pausing.pop_first();
                self.requests += 1;
                self.budget.request(self.now);
                self.begin();
            } else if let Some((_, (agent, request, attempt, began))) = self.running.pop_first() {
                self.end(agent, request, attempt, began);
            }
        }
    }

    fn begin(&mut self) {
        let count = self.sessions.len();
        let session = (count > 0).then(|| self.random.index(count));
        let mut request = Request::new(
            session.map(|session| ownership::fnv1a(&session.to_le_bytes())),
            true,
        );
        request.tried = self.lost;
        self.attempt(request, session);
    }

    fn attempt(&mut self, mut request: Request, session: Option<usize>) {
        let index = match request.choose(&self.agents, self.now, &mut self.random) {
            Choice::Tunnel(index) => index,
            none => return self.fail(none == Choice::Full),
        };
        self.attempts[index].push(self.now - self.start);
        if let Some(session) = session {
            self.sessions[session][index] += 1;
        }
        let agent = &mut self.agents[index];
        agent.in_flight += 1;
        request.tried |= 1 << agent.key;
        let attempt = agent.health.began(self.now);
        let (Answers { millis } | Fails { millis, .. }) = self.backends[index];
        let end = self.now + self.random.millis(millis, millis + millis / 4 + 1);
        self.number += 1;
        self.running
            .insert((end, self.number), (index, request, attempt, self.now));
    }

    fn end(&mut self, index: usize, mut request: Request, attempt: BegunAttempt, began: Instant) {
        let failure = match self.backends[index] {
            Answers { .. } => None,
            Fails { failure, .. } => Some(failure),
        };
        self.agents[index].end(
            attempt,
            failure,
            self.now - began,
            self.now,
            &mut self.random,
        );
        match failure {
            None => self.pause(Duration::ZERO),
            Some(failure) if request.goes_on(failure, &mut self.budget, self.now) => {
                self.attempt(request, None);
            }
            Some(_) => self.fail(false),
        }
    }

    fn fail(&mut self, is_full: bool) {
        self.failures.push((self.now - self.start, is_full));
        self.pause(Duration::from_millis(1));
    }

    fn pause(&mut self, pause: Duration) {
        self.number += 1;
        self.pausing.insert((self.now + pause, self.number), ());
    }

    /// Attempts at one agent of all attempts after a time, in percent.
    fn percent_at(&self, agent: usize, after: Duration) -> f64 {
        let after = |times: &Vec<Duration>| times.iter().filter(|at| **at > after).count();
        let all: usize = self.attempts.iter().map(after).sum();
        assert!(all > 500, "{all}");
        100.0 * after(&self.attempts[agent]) as f64 / all as f64
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_sick_agent_costs_no_request_and_gets_one_in_a_hundred_at_most() {
    for sick in [REFUSES, BREAKS, HANGS] {
        for (callers, seconds) in [(1, 20), (8, 20), (32, 10), (256, 5)] {
            for seed in 1..=3 {
                let mut load =
                    LoadRun::new(seed, callers, &[Answers { millis: 20 }, sick], &[512, 512]);
                load.run_until(SECOND * seconds);
                let percent = load.percent_at(1, SECOND);
                assert!(
                    percent <= 1.0 && load.failures.is_empty(),
                    "{sick:?} {callers}: {percent} %"
                );
                assert!(!load.attempts[1].is_empty());
            }
        }
    }
}

#[test]
fn a_sick_agent_gets_requests_again_once_it_answers() {
    for seed in 1..=10 {
        let mut load = LoadRun::new(seed, 8, &[Answers { millis: 20 }, REFUSES], &[128, 128]);
        load.run_until(SECOND * 3);
        load.backends[1] = load.backends[0];
        // The third opening is for 6 s at most.
        load.run_until(SECOND * 15);
        let percent = load.percent_at(1, SECOND * 12);
        assert!(
            (30.0..70.0).contains(&percent) && load.failures.is_empty(),
            "{percent} %"
        );
    }
}

#[test]
fn an_agent_that_is_slower_a_hundred_times_gets_three_percent_at_most() {
    for (callers, seconds) in [(1, 30), (8, 20), (64, 10), (256, 5)] {
        for seed in 1..=3 {
            let mut load = LoadRun::new(
                seed,
                callers,
                &[Answers { millis: 10 }, Answers { millis: 1000 }],
                &[512, 512],
            );
            load.run_until(SECOND * seconds);
            let percent = load.percent_at(1, Duration::ZERO);
            assert!(percent <= 3.0, "{callers}: {percent} %");
            assert!(!load.attempts[1].is_empty());
        }
    }
}

#[test]
fn equal_agents_get_equal_shares() {
    for callers in [1, 8, 64] {
        let mut load = LoadRun::new(1, callers, &[Answers { millis: 10 }; 3], &[128; 3]);
        load.run_until(SECOND * 10);
        for agent in 0..3 {
            let percent = load.percent_at(agent, Duration::ZERO);
            assert!((20.0..47.0).contains(&percent), "{callers}: {percent} %");
        }
    }
}

#[test]
fn sessions_stay_at_their_agents_under_load_and_only_those_of_a_lost_one_move() {
    for (callers, strays) in [(1, 0.0), (16, 0.0), (64, 0.5), (256, 2.0)] {
        let mut load = LoadRun::new(1, callers, &[Answers { millis: 10 }; 4], &[128; 4]);
        load.forget_sessions(1000);
        load.run_until(SECOND * 10);
        let (before, percent) = load.agents_of_sessions();
        assert!(percent <= strays, "{callers}: {percent} %");
        load.lost = 1 << 2;
        load.forget_sessions(1000);
        load.run_until(SECOND * 20);
        let (after, percent) = load.agents_of_sessions();
        assert!(percent <= strays, "{callers}: {percent} %");
        let both = before
            .into_iter()
            .zip(after)
            .filter_map(|(before, after)| before.zip(after));
        let moved: Vec<usize> = both
            .filter(|(before, after)| before != after)
            .map(|(before, _)| before)
            .collect();
        assert!(
            moved.len() > 50 && moved.iter().all(|before| *before == 2),
            "{callers}: {}",
            moved.len()
        );
    }
}

#[test]
fn slots_of_other_agents_are_used_before_a_request_is_refused() {
    for callers in [1, 8, 64, 129] {
        let mut load = LoadRun::new(1, callers, &[Answers { millis: 100 }; 2], &[1, 128]);
        load.run_until(SECOND * 60);
        assert!(
            load.failures.is_empty() && !load.attempts[0].is_empty(),
            "{callers}"
        );
    }
    let mut load = LoadRun::new(1, 130, &[Answers { millis: 100 }; 2], &[1, 128]);
    load.run_until(SECOND);
    assert!(load.failures.iter().all(|(_, is_full)| *is_full) && !load.failures.is_empty());
}

#[test]
fn agents_that_all_refuse_get_few_further_attempts_and_the_first_one_to_recover_gets_everything() {
    for (agents, seed) in [(2, 1), (3, 2), (16, 3), (64, 4)] {
        let mut load = LoadRun::new(seed, 4, &vec![REFUSES; agents], &vec![128; agents]);
        load.run_until(SECOND * 5);
        let attempts: usize = load.attempts.iter().map(Vec::len).sum();
        assert!(load.requests > 5_000 && load.failures.len() + 4 >= load.requests);
        assert!(
            attempts <= load.requests + load.requests / 5 + 100,
            "{attempts} of {}",
            load.requests
        );
        load.backends[1] = Answers { millis: 5 };
        load.run_until(SECOND * 10);
        let last = load.failures.last().unwrap().0;
        assert!(last < SECOND * 6, "{agents}: {last:?}");
    }
}
