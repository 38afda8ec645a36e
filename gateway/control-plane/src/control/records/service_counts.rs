//! The number of services that each node of the region owns.
//!
//! All services are counted once when the members change: a million of them take most of a second,
//! so that the lock of the records, under which the count is asked for, is not held for it. After
//! that, each change of the records changes the numbers.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gw_base::process::background::Tasks;
use gw_base::service::hostname::Region;
use gw_region::owners::ownership::owner_node;
use gw_region::{NodeSlot, Placement};
use gw_store::{Directory, RecordId, RecordKind, Records, Step, StoredRecord};

use crate::control::Control;

/// Services between two looks whether the members have changed again.
const BATCH: usize = 10_000;

/// Cheap to clone; the clones share the numbers.
#[derive(Clone)]
pub(crate) struct ServiceCounts {
    counts: Arc<(Mutex<SlotCounts>, Condvar)>,
    tasks: Tasks,
}

#[derive(Default)]
struct SlotCounts {
    /// Members that own services.
    slots: Arc<[NodeSlot]>,
    /// Number of services of each member. Until all are counted, only those that came since, less
    /// those that went.
    services: Vec<isize>,
    /// Number of the count that is under way or done.
    count: u64,
    is_complete: bool,
}

impl Control {
    /// Counts by the members of this placement from now on.
    pub(crate) fn count_services_by(&self, placement: &Placement) {
        let slots: Arc<[NodeSlot]> = placement
            .members()
            .iter()
            .map(|member| member.slot)
            .collect();
        let state = self.state();
        if self.service_counts.lock().slots != slots {
            self.service_counts.begin(&state.directory, slots);
        }
    }

    /// The number of services of each node that owns some. `None` if they are still being counted
    /// after `within`.
    pub(crate) fn services_by_node(&self, within: Duration) -> Option<BTreeMap<NodeSlot, usize>> {
        self.service_counts.complete(within)
    }
}

impl ServiceCounts {
    /// Counts in `tasks`.
    pub(crate) fn new(tasks: Tasks) -> Self {
        let counts = Arc::default();
        Self { counts, tasks }
    }

    fn lock(&self) -> MutexGuard<'_, SlotCounts> {
        // Every change is of one number, or is followed by a new count.
        self.counts.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to count the services of `directory`.
    fn begin(&self, directory: &Directory, slots: Arc<[NodeSlot]>) {
        let counts = self.clone();
        let directory = directory.clone();
        let count = {
            let mut counts = self.lock();
            let services = vec![0; slots.len()];
            *counts = SlotCounts {
                slots,
                services,
                count: counts.count + 1,
                is_complete: false,
            };
            counts.count
        };
        let run = move || counts.count_all(&directory, count);
        self.tasks.spawn_blocking("the count of services", run);
    }

    /// Counts again, because all records were replaced.
    pub(crate) fn begin_again(&self, directory: &Directory) {
        let slots = Arc::clone(&self.lock().slots);
        self.begin(directory, slots);
    }

    /// Counts all services. Gives up when another count has begun, or the process stops.
    fn count_all(&self, directory: &Directory, count: u64) {
        let slots = Arc::clone(&self.lock().slots);
        let mut services = vec![0; slots.len()];
        for (number, service) in directory.services().enumerate() {
            if number % BATCH == 0 && (self.lock().count != count || self.is_stopping()) {
                return;
            }
            if let Some(owner) = owner(&service.hostname, &slots) {
                services[owner] += 1;
            }
        }
        let mut counts = self.lock();
        if counts.count == count {
            counts
                .services
                .iter_mut()
                .zip(services)
                .for_each(|(all, counted)| *all += counted);
            counts.is_complete = true;
            self.counts.1.notify_all();
        }
    }

    fn is_stopping(&self) -> bool {
        self.tasks.stopping().is_cancelled()
    }

    /// Notes the services that come and go with `steps`. `records` are those before them.
    pub(crate) fn note(&self, steps: &[Step], records: &Records, region: &Region) {
        let mut counts = self.lock();
        if counts.slots.is_empty() {
            return;
        }
        // One change may have several steps of one service.
        let mut exists = BTreeMap::new();
        for step in steps {
            let (key, comes) = match step {
                Step::Put(StoredRecord::Service(record)) => (record.id(), true),
                Step::Delete(RecordId::Service(path)) => (path.clone(), false),
                _ => continue,
            };
            let Some(hostname) = region.tenant_hostname(&key.0, &key.1) else {
                continue;
            };
            let existed = exists
                .get(&key)
                .copied()
                .unwrap_or_else(|| records.services.contains_key(&key));
            exists.insert(key, comes);
            if let Some(owner) = owner(&hostname, &counts.slots) {
                counts.services[owner] += isize::from(comes) - isize::from(existed);
            }
        }
    }

    fn complete(&self, within: Duration) -> Option<BTreeMap<NodeSlot, usize>> {
        let (counts, _) = self
            .counts
            .1
            .wait_timeout_while(self.lock(), within, |counts| !counts.is_known())
            .unwrap_or_else(PoisonError::into_inner);
        let number = |services: &isize| usize::try_from(*services).unwrap_or(0);
        let of_nodes = || {
            counts
                .slots
                .iter()
                .copied()
                .zip(counts.services.iter().map(number))
                .collect()
        };
        counts.is_known().then(of_nodes)
    }
}

impl SlotCounts {
    fn is_known(&self) -> bool {
        self.is_complete || self.slots.is_empty()
    }
}

/// Index of the member that owns the service with this hostname.
fn owner(hostname: &str, slots: &[NodeSlot]) -> Option<usize> {
    owner_node(hostname, slots.iter().map(|slot| u64::from(slot.get())))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use gw_base::clock::Timestamp;
    use gw_base::process::background::Background;
    use gw_base::service::service_settings::ServiceSettings;
    use gw_shared::id::{AccountId, ServiceId};
    use gw_store::ServiceRecord;

    use super::*;

    const SOON: Duration = Duration::from_secs(60);

    fn region() -> Region {
        Region::new("eu1", "example.com")
    }

    fn service(number: usize) -> StoredRecord {
        StoredRecord::Service(ServiceRecord {
            account: AccountId::new("acme").unwrap(),
            id: ServiceId::new(&format!("api{number}")).unwrap(),
            settings: ServiceSettings::default(),
            created_at: Timestamp(1),
            created_ms: None,
            managed_by: None,
            later: Default::default(),
        })
    }

    fn slots(slots: &[u16]) -> Arc<[NodeSlot]> {
        slots
            .iter()
            .map(|slot| NodeSlot::new(*slot).unwrap())
            .collect()
    }

    /// Records and their directory, whose services are counted.
    struct World {
        records: Records,
        directory: Directory,
        counts: ServiceCounts,
        background: Background,
    }

    impl World {
        fn with_services(count: usize) -> Self {
            let records: Records = (0..count).map(service).collect();
            let directory = Directory::new(&records, &region(), 1);
            let background = Background::start().unwrap();
            Self {
                records,
                directory,
                counts: ServiceCounts::new(background.tasks()),
                background,
            }
        }

        fn change(&mut self, steps: &[Step]) {
            self.counts.note(steps, &self.records, &region());
            steps
                .iter()
                .for_each(|step| self.records.apply(step.clone()));
            self.directory.apply(steps, &self.records, &region(), 1);
        }

        /// Asserts that the numbers are those of a count of all services.
        fn check(&self, expected: usize) {
            let counted = self.counts.complete(SOON).unwrap();
            assert_eq!(counted.values().sum::<usize>(), expected);
            let other = ServiceCounts::new(self.background.tasks());
            other.begin(&self.directory, Arc::clone(&self.counts.lock().slots));
            assert_eq!(other.complete(SOON).unwrap(), counted);
        }
    }

    #[test]
    fn numbers_follow_changes_of_records_and_members() {
        let mut world = World::with_services(100);
        assert_eq!(
            world.counts.complete(Duration::ZERO),
            Some(BTreeMap::new()),
            "without members"
        );
        world.counts.begin(&world.directory, slots(&[0, 3, 7]));
        // Counted or not: changes come at any time.
        world.change(&[
            Step::Put(service(100)),
            Step::Put(service(5)),
            Step::Delete(service(6).id()),
        ]);
        world.check(100);
        world.change(&[
            Step::Delete(service(7).id()),
            Step::Delete(service(7).id()),
            Step::Put(service(7)),
        ]);
        world.change(&[
            Step::Put(service(200)),
            Step::Delete(service(200).id()),
            Step::Delete(service(300).id()),
        ]);
        world.check(100);
        world.counts.begin(&world.directory, slots(&[3]));
        world.check(100);
        let [world_of_two, world_of_one] = [World::with_services(2), World::with_services(1)];
        world.counts.begin_again(&world_of_two.directory);
        world.counts.begin_again(&world_of_one.directory);
        assert_eq!(
            world
                .counts
                .complete(SOON)
                .unwrap()
                .into_values()
                .collect::<Vec<_>>(),
            [1]
        );
    }

    #[test]
    #[ignore = "takes 20 seconds in a debug build"]
    fn a_million_services_are_counted_off_the_request() {
        let mut world = World::with_services(1_000_000);
        let began = Instant::now();
        world.counts.begin(&world.directory, slots(&[0, 1, 2]));
        world.counts.complete(SOON).unwrap();
        let all = began.elapsed();
        assert!(all > Duration::from_millis(10), "{all:?}");
        world.change(&[Step::Put(service(1_000_000))]);
        let began = Instant::now();
        world.counts.complete(SOON).unwrap();
        let request = began.elapsed();
        assert!(
            request < all / 100,
            "{request:?} for a request, {all:?} for a count"
        );
    }
}
