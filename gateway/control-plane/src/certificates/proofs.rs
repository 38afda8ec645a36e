//! Looks at DNS for own domains: soon after they were added, and from time to time as long as they
//! exist.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use gw_base::clock::Timestamp;
use gw_base::process::background::Tasks;
use gw_region::Owner;
use gw_shared::id::DomainName;
use gw_store::{DomainRecord, DomainState, Records};
use tokio::time::{Instant, sleep_until};

use super::places::Places;
use crate::control::Control;
use crate::control::records::domain::{self, look_every};
use crate::limits::DOMAIN_LOOKUPS;

/// Time between two looks at which domains are due.
const EVERY: Duration = Duration::from_secs(10);

/// Shortest time between two looks at which domains are due.
const LOOK_AFTER: Duration = Duration::from_secs(1);
/// Shortest time between two looks when the look at a domain has ended.
const LOOK_AFTER_END: Duration = Duration::from_millis(100);

/// Looks of this process.
struct Looks {
    control: Arc<Control>,
    tasks: Tasks,
    places: Places<()>,
    began: Timestamp,
    /// Time of the last look at each domain.
    last: HashMap<DomainName, Timestamp>,
    spread: RandomState,
}

/// Starts to look at DNS for the own domains whose services this node owns.
pub(super) fn look(control: &Arc<Control>, tasks: &Tasks) {
    let looks = Looks {
        control: Arc::clone(control),
        tasks: tasks.clone(),
        places: Places::new(DOMAIN_LOOKUPS),
        began: Timestamp::now(),
        last: HashMap::new(),
        spread: RandomState::new(),
    };
    tasks.spawn_until_stopped("proofs of own domains", looks.run());
}

impl Looks {
    async fn run(mut self) {
        let mut changed = self.control.domains_changed();
        loop {
            if self.control.has_store() {
                self.begin_due();
            }
            let looked = Instant::now();
            let mut next = looked + EVERY;
            while Instant::now() < next {
                tokio::select! {
                    _ = self.places.ended() => next = next.min(looked + LOOK_AFTER_END),
                    _ = changed.changed() => next = next.min(looked + LOOK_AFTER),
                    () = sleep_until(next) => {}
                }
            }
        }
    }

    /// Begins the looks that are due and have a place.
    fn begin_due(&mut self) {
        let now = Timestamp::now();
        let control = Arc::clone(&self.control);
        let due = control.look_at(|records| {
            self.last
                .retain(|name, _| records.domains.contains_key(name));
            let chosen = self.places.choose(self.due(records, now)).into_iter();
            let chosen = chosen.map(|(_, it)| (it.id.clone(), it.account.clone()));
            chosen.collect::<Vec<_>>()
        });
        for (name, account) in due {
            self.last.insert(name.clone(), now);
            let (control, tasks) = (Arc::clone(&self.control), self.tasks.clone());
            let domain = name.clone();
            self.places.begin(domain, account, async move {
                tasks
                    .blocking("a look at DNS", move || look_once(&control, &name))
                    .await;
            });
        }
    }

    /// The domains that are to be looked up, each with the time of the last look.
    fn due<'a>(&self, records: &'a Records, now: Timestamp) -> Vec<(Timestamp, &'a DomainRecord)> {
        let placement = self.control.local_node().placement();
        let is_here = |record: &&DomainRecord| {
            let hostname = self
                .control
                .region()
                .tenant_hostname(&record.account, &record.service);
            let owner = placement.as_ref().zip(hostname);
            owner.is_none_or(|(placement, hostname)| {
                matches!(placement.owner(&hostname), Owner::Here)
            })
        };
        let all = records.domains.values();
        let due = all.filter(|it| self.is_due(it, now) && !self.places.has(&it.id));
        let last = |it: &DomainRecord| self.last.get(&it.id).copied().unwrap_or(Timestamp(0));
        due.filter(is_here).map(|it| (last(it), it)).collect()
    }

    fn is_due(&self, record: &DomainRecord, now: Timestamp) -> bool {
        let every = look_every(record, now);
        let due = match self.last.get(&record.id) {
            Some(last) => last.after(every),
            // Not all domains at once after a start.
            None if record.state == DomainState::Active => {
                let part = self.spread.hash_one(&record.id) % every.as_secs().max(1);
                self.began.after(Duration::from_secs(part))
            }
            None => now,
        };
        due <= now
    }
}

fn look_once(control: &Control, name: &DomainName) {
    if let Err(error) = domain::look(control, name) {
        tracing::warn!(domain = %name, %error,
            "what DNS says of an own domain is not stored; it is looked up again");
    }
}
