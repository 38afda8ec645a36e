//! Looks at DNS for own domains: soon after they were added, and from time to time as long as they exist.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::iter;
use gw_base::clock::Timestamp;
use gw_base::process::background::Tasks;
use gw_region::Owner;
use gw_shared::id::DomainName;
use gw_store::{DomainRecord, DomainState, Records};
use tokio::time::sleep;

use crate::control::Control;
use crate::control::records::domain::{self, look_every};
use crate::limits::DOMAIN_LOOKUPS;

/// Time between two looks at which domains are due.
const EVERY: Duration = Duration::from_secs(10);

/// Looks of this process.
struct Looks {
    control: Arc<Control>,
    tasks: Tasks,
    began: Timestamp,
    /// Time of the last look at each domain.
    last: HashMap<DomainName, Timestamp>,
    spread: RandomState,
}

/// Starts to look at DNS for the own domains whose services this node owns.
pub(super) fn look(control: &Arc<Control>, tasks: &Tasks) {
    let mut looks = Looks {
        control: Arc::clone(control),
        tasks: tasks.clone(),
        began: Timestamp::now(),
        last: HashMap::new(),
        spread: RandomState::new(),
    };
    let mut changed = control.domains_changed();
    tasks.spawn_until_stopped("proofs of own domains", async move {
        loop {
            if looks.control.has_store() {
                looks.look().await;
            }
            tokio::select! {
                () = sleep(EVERY) => {}
                _ = changed.changed() => sleep(Duration::from_secs(1)).await,
            }
        }
    });
}

impl Looks {
    async fn look(&mut self) {
        let now = Timestamp::now();
        let control = Arc::clone(&self.control);
        let due = control.look_at(|records| {
            self.last
                .retain(|name, _| records.domains.contains_key(name));
            self.due(records, now)
        });
        for name in &due {
            self.last.insert(name.clone(), now);
        }
        let looks = due.into_iter().map(|name| {
            let control = Arc::clone(&self.control);
            self.tasks
                .blocking("a look at DNS", move || look_once(&control, &name))
        });
        iter(looks)
            .buffer_unordered(DOMAIN_LOOKUPS)
            .for_each(|_| std::future::ready(()))
            .await;
    }

    fn due(&self, records: &Records, now: Timestamp) -> Vec<DomainName> {
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
        let due = records.domains.values().filter(|it| self.is_due(it, now));
        due.filter(is_here).map(|it| it.id.clone()).collect()
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
        tracing::warn!(domain = %name, %error, "what DNS says of an own domain is not stored; it is looked up again");
    }
}
