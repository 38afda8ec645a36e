//! Tunnels that are being opened: from the TLS connection of an agent to the registration of the
//! tunnel. Because an agent may be modified, their number and rate are limited, and a revocation
//! ends them like registered tunnels.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hash::Hash;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::limits;
use gw_base::clock::Timestamp;
use gw_base::error::{Error, Overload};
use gw_base::service::rate::Rate;
use gw_interface::rate_limit::Bucket;
use gw_shared::id::AgentId;
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_shared::net::Closer;
use gw_store::{Directory, Service};
use slab::Slab;

/// The tunnels of one worker that are not registered yet.
pub(crate) struct Openings {
    entries: RefCell<Slab<OpeningEntry>>,
    /// Number of openings so far, which numbers the entries.
    begun: Cell<u64>,
    rates: RefCell<Rates>,
}

struct OpeningEntry {
    agent: AgentId,
    /// The service that the agent is admitted to; `None` before.
    service: Option<Arc<Service>>,
    closer: Closer,
    number: u64,
    cut: Cell<bool>,
    /// The agent was allowed to have tunnels when it connected, or was admitted since. A connection
    /// of another agent is not ended here, so that it gets an error response.
    may_begin: bool,
}

/// Entry of one tunnel that is being opened; removed on drop.
pub(crate) struct TunnelOpening {
    openings: Rc<Openings>,
    key: usize,
}

impl Openings {
    pub(crate) fn new() -> Rc<Self> {
        Rc::new(Self {
            entries: RefCell::default(),
            begun: Cell::default(),
            rates: RefCell::new(Rates::new(Instant::now())),
        })
    }

    /// Adds a connection of `agent`. Ends its oldest one if it has too many.
    pub(crate) fn begin(
        self: &Rc<Self>,
        agent: AgentId,
        closer: Closer,
        directory: &Directory,
    ) -> TunnelOpening {
        let services = directory
            .agent(agent.as_str())
            .map_or(0, |agent| agent.services.len());
        let may_begin = may_begin(&agent, directory, Timestamp::now());
        let most = limits::OPENINGS_PER_AGENT + limits::OPENINGS_PER_TUNNEL * services;
        let mut entries = self.entries.borrow_mut();
        end_oldest(&entries, most, |entry| entry.agent == agent);
        self.begun.set(self.begun.get() + 1);
        let number = self.begun.get();
        let cut = Cell::new(false);
        let entry = OpeningEntry {
            agent,
            service: None,
            closer,
            number,
            cut,
            may_begin,
        };
        TunnelOpening {
            openings: Rc::clone(self),
            key: entries.insert(entry),
        }
    }

    /// Counts a requested tunnel against the rates of the agent and the service.
    pub(crate) fn admit(
        &self,
        agent: &AgentId,
        service: &Service,
        now: Instant,
    ) -> Result<(), Error> {
        self.rates.borrow_mut().take(agent, &service.label, now)
    }

    /// Whether a refusal may be logged as a warning. Limited by a rate, so that agents cannot fill
    /// the log.
    pub(crate) fn may_log_refusal(&self) -> bool {
        self.rates
            .borrow_mut()
            .warnings
            .take(Instant::now())
            .is_ok()
    }

    /// Ends openings of agents that may no longer have their tunnel.
    pub(crate) fn enforce(&self, directory: &Directory, now: Timestamp) {
        for (_, entry) in self.entries.borrow().iter() {
            if !entry.cut.get() && entry.may_begin && !entry.is_allowed(directory, now) {
                tracing::info!(agent = %entry.agent,
                    "opening of a tunnel ended: agent revoked or certificate expired");
                entry.end();
            }
        }
    }

    /// Number of tunnels that are being opened.
    #[cfg(feature = "support")]
    pub(crate) fn len(&self) -> usize {
        self.entries.borrow().len()
    }

    /// Ends all openings.
    pub(crate) fn cut(&self) {
        self.entries
            .borrow()
            .iter()
            .for_each(|(_, entry)| entry.end());
    }
}

/// Ends the oldest entry that `matches` if there are `most` of them.
fn end_oldest(entries: &Slab<OpeningEntry>, most: usize, matches: impl Fn(&OpeningEntry) -> bool) {
    let same = || {
        entries
            .iter()
            .map(|(_, entry)| entry)
            .filter(|entry| !entry.cut.get() && matches(entry))
    };
    if same().count() >= most
        && let Some(oldest) = same().min_by_key(|entry| entry.number)
    {
        oldest.end();
    }
}

/// Whether an agent may have a tunnel of any service.
fn may_begin(agent: &AgentId, directory: &Directory, now: Timestamp) -> bool {
    let agent = directory.agent(agent.as_str());
    agent.is_some_and(|agent| agent.status == EnrollmentStatus::Approved && !agent.is_expired(now))
}

impl OpeningEntry {
    fn is_allowed(&self, directory: &Directory, now: Timestamp) -> bool {
        let may_serve = |asked: &Arc<Service>| {
            let service = directory.service(&asked.label);
            let agent = directory.agent(self.agent.as_str());
            service
                .zip(agent)
                .is_some_and(|(service, agent)| agent.may_serve(service))
        };
        may_begin(&self.agent, directory, now) && self.service.as_ref().is_none_or(may_serve)
    }

    fn end(&self) {
        self.cut.set(true);
        self.closer.abort();
    }
}

impl TunnelOpening {
    /// Records that the agent is admitted to `service`. Ends its oldest opening for the service if
    /// it has too many.
    pub(crate) fn set_service(&self, service: &Arc<Service>) {
        let mut entries = self.openings.entries.borrow_mut();
        let Some(agent) = entries.get(self.key).map(|entry| entry.agent.clone()) else {
            return;
        };
        end_oldest(&entries, limits::OPENINGS_PER_TUNNEL, |entry| {
            entry.agent == agent
                && entry
                    .service
                    .as_ref()
                    .is_some_and(|other| other.label == service.label)
        });
        if let Some(entry) = entries.get_mut(self.key) {
            entry.service = Some(Arc::clone(service));
            entry.may_begin = true;
        }
    }
}

impl Drop for TunnelOpening {
    fn drop(&mut self) {
        self.openings.entries.borrow_mut().try_remove(self.key);
    }
}

/// Limits on the rate of new tunnels: per agent and service, and per service.
struct Rates {
    agents: HashMap<(AgentId, Arc<str>), Bucket>,
    services: HashMap<Arc<str>, Bucket>,
    /// Rate of warnings about refused tunnels.
    warnings: Bucket,
}

impl Rates {
    fn new(now: Instant) -> Self {
        let warnings = Bucket::new(limits::TUNNEL_REFUSAL_LINES, now);
        Self {
            agents: HashMap::new(),
            services: HashMap::new(),
            warnings,
        }
    }

    fn take(&mut self, agent: &AgentId, label: &Arc<str>, now: Instant) -> Result<(), Error> {
        let limited = |limited, rate| {
            move |retry_after: Duration| Error::TunnelRateLimited {
                limited,
                rate,
                retry_after,
            }
        };
        let own = bucket(
            &mut self.agents,
            (agent.clone(), Arc::clone(label)),
            limits::TUNNELS_BY_AGENT,
            now,
        )?;
        let all = bucket(
            &mut self.services,
            Arc::clone(label),
            limits::TUNNELS_BY_SERVICE,
            now,
        )?;
        // If one bucket refuses, the other keeps its token.
        let mut own_taken = own.clone();
        let of_agent = limited("agent", limits::TUNNELS_BY_AGENT);
        own_taken.take(now).map_err(of_agent)?;
        let of_service = limited("service", limits::TUNNELS_BY_SERVICE);
        all.take(now).map_err(of_service)?;
        *own = own_taken;
        Ok(())
    }
}

/// The bucket of `key`. Removes full buckets if the table has no room.
fn bucket<K: Hash + Eq>(
    buckets: &mut HashMap<K, Bucket>,
    key: K,
    rate: Rate,
    now: Instant,
) -> Result<&mut Bucket, Error> {
    if buckets.len() >= limits::TUNNEL_BUCKETS && !buckets.contains_key(&key) {
        buckets.retain(|_, bucket| !bucket.is_full(now));
        if buckets.len() >= limits::TUNNEL_BUCKETS {
            return Err(Error::Overloaded(Overload::Openings));
        }
    }
    Ok(buckets.entry(key).or_insert_with(|| Bucket::new(rate, now)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_apply_per_agent_and_service_and_per_service() {
        let now = Instant::now();
        let mut rates = Rates::new(now);
        let agents: Vec<AgentId> = (0..100).map(|_| AgentId::random()).collect();
        let api: Arc<str> = "acme--api".into();
        let web: Arc<str> = "acme--web".into();
        let burst = limits::TUNNELS_BY_AGENT.burst() as usize;
        let mut taken = |agent: &AgentId, label| {
            (0..1000)
                .take_while(|_| rates.take(agent, label, now).is_ok())
                .count()
        };
        assert_eq!(taken(&agents[0], &api), burst);
        // Another service has its own bucket.
        assert_eq!(taken(&agents[0], &web), burst);
        let rest: usize = agents[1..].iter().map(|agent| taken(agent, &api)).sum();
        assert_eq!(rest + burst, limits::TUNNELS_BY_SERVICE.burst() as usize);
        let refused = rates
            .take(&agents[0], &api, now + Duration::from_millis(1))
            .unwrap_err();
        assert_eq!(
            (refused.outcome().0.as_u16(), refused.retry_after_seconds()),
            (429, Some(1))
        );
        assert_eq!(
            rates.take(&agents[0], &api, now + Duration::from_secs(1)),
            Ok(())
        );
    }

    #[test]
    fn a_refusal_by_the_rate_of_the_service_takes_no_token_of_the_agent() {
        let now = Instant::now();
        let label = Arc::from("acme--api");
        let mut rates = Rates::new(now);
        while rates.take(&AgentId::random(), &label, now).is_ok() {}
        let agent = AgentId::random();
        for _ in 0..limits::TUNNELS_BY_AGENT.burst() {
            assert!(rates.take(&agent, &label, now).is_err());
        }
        let own = &rates.agents[&(agent, label)];
        assert!(own.is_full(now));
    }

    #[test]
    fn all_agents_of_a_service_may_reconnect_at_once() {
        let now = Instant::now();
        let label = Arc::from("acme--api");
        let mut rates = Rates::new(now);
        for _ in 0..limits::TUNNELS_PER_SERVICE {
            assert_eq!(rates.take(&AgentId::random(), &label, now), Ok(()));
        }
    }

    #[test]
    fn tables_are_bounded_and_drop_full_buckets() {
        let now = Instant::now();
        let mut buckets = HashMap::new();
        for number in 0..limits::TUNNEL_BUCKETS {
            bucket(&mut buckets, number, limits::TUNNELS_BY_AGENT, now)
                .unwrap()
                .take(now)
                .unwrap();
        }
        let refused = bucket(&mut buckets, usize::MAX, limits::TUNNELS_BY_AGENT, now).unwrap_err();
        assert_eq!(refused.outcome().0.as_u16(), 503);
        bucket(
            &mut buckets,
            usize::MAX,
            limits::TUNNELS_BY_AGENT,
            now + Duration::from_secs(60),
        )
        .unwrap();
        assert_eq!(buckets.len(), 1);
    }
}
