//! What must hold in every simulation. Each function is one invariant, and gives what it found if
//! it does not hold.

mod errors;
mod limits;
mod memory;
mod placement;
mod rate;
mod records;
mod requests;
mod resources;

use std::collections::BTreeMap;
use std::rc::Rc;

use gw_telemetry::request_log::RequestRecord;

use crate::scenario::Request;
use crate::world::ledger::Entry;
use crate::world::{Recorded, Violation, World};

pub(crate) use self::resources::tasks_and_tunnels;

type Checked = Result<(), Violation>;

/// What holds at any time.
pub(crate) fn always(world: &World) -> Checked {
    resources::slots_bound_requests(world)?;
    limits::agents_keep_to_their_slots(world)?;
    memory::charges_stay_within_limits(world)
}

/// What holds some time after the last request.
pub(crate) fn quiet(world: &World) -> Checked {
    resources::nothing_is_held(world)?;
    limits::addresses_have_slots_of_tunnels_only(world)?;
    resources::only_tunnels_are_open(world)?;
    resources::tasks_end(world)?;
    memory::nothing_is_charged(world)
}

/// What holds at the end.
pub(crate) fn at_the_end(world: &World) -> Checked {
    resources::no_task_panicked()?;
    resources::polls_are_short(world)?;
    requests::every_request_ends(world)?;
    requests::upload_arrives_unchanged(world)?;
    requests::response_is_that_of_the_request(world)?;
    requests::disabled_keys_are_refused(world)?;
    requests::unsafe_requests_arrive_once(world)?;
    requests::complete_responses_are_whole(world)?;
    requests::interim_responses_and_trailers_pass(world)?;
    requests::benign_requests_succeed(world)?;
    requests::waiting_requests_are_opened(world)?;
    requests::a_cut_between_nodes_is_passed(world)?;
    records::each_request_is_recorded_once(world)?;
    records::ids_are_unique(world)?;
    records::ids_have_the_time_of_the_request(world)?;
    records::records_agree(world)?;
    records::counters_agree_with_records(world)?;
    errors::errors_are_of_the_table(world)?;
    errors::errors_have_causes(world)?;
    rate::bucket_is_exact(world)?;
    placement::backends_get_no_more_than_slots(world)?;
    placement::revoked_agents_get_nothing(world)?;
    placement::sessions_stay(world)?;
    placement::a_healthy_agent_suffices(world)
}

fn violated(invariant: &'static str, found: String) -> Checked {
    Err(Violation { invariant, found })
}

/// Holds if `check` finds nothing in any request.
fn each(
    world: &World,
    invariant: &'static str,
    check: impl Fn(&Request, &Entry) -> Option<String>,
) -> Checked {
    let found = world.ledger.find(|request, entry| {
        let found = check(request, entry)?;
        Some(format!(
            "request {}: {found}; {request:?} {entry:?}",
            request.id
        ))
    });
    found.map_or(Ok(()), |found| violated(invariant, found))
}

/// Records by the ids of their requests.
struct Records(BTreeMap<u32, Vec<Rc<Recorded>>>);

impl Records {
    fn of(world: &World) -> Self {
        let mut records: BTreeMap<u32, Vec<_>> = BTreeMap::new();
        for recorded in world.records.borrow().iter() {
            let id = recorded.record.target.strip_prefix("/r/");
            if let Some(id) = id.and_then(|id| id.parse().ok()) {
                records.entry(id).or_default().push(Rc::clone(recorded));
            }
        }
        Self(records)
    }

    fn count(&self, id: u32) -> usize {
        self.0.get(&id).map_or(0, Vec::len)
    }

    /// The record of request `id`, if it has one.
    fn sole(&self, id: u32) -> Option<&RequestRecord> {
        match self.0.get(&id).map(Vec::as_slice) {
            Some([recorded]) => Some(&recorded.record),
            _ => None,
        }
    }
}
