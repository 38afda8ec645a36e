//! What must hold in every simulation. Each function is one invariant, and gives what it found if it does not hold.

mod limits;
mod memory;
mod requests;
mod resources;

use crate::world::{Violation, World};

type Checked = Result<(), Violation>;

/// What holds at any time.
pub(crate) fn always(world: &World) -> Checked {
    resources::slots_bound_requests(world)?;
    limits::agents_keep_to_their_slots(world)?;
    memory::charges_stay_within_limits(world)?;
    requests::upload_arrives_unchanged(world)?;
    requests::response_is_that_of_the_request(world)?;
    requests::disabled_keys_are_refused(world)
}

/// What holds some time after the last request.
pub(crate) fn quiet(world: &World) -> Checked {
    resources::nothing_is_held(world)?;
    limits::addresses_have_slots_of_tunnels_only(world)?;
    memory::nothing_is_charged(world)
}

/// What holds at the end.
pub(crate) fn at_the_end(world: &World) -> Checked {
    always(world)?;
    requests::every_request_ends(world)?;
    requests::unsafe_requests_arrive_once(world)?;
    requests::complete_responses_are_whole(world)?;
    requests::each_request_is_recorded_once(world)?;
    requests::counters_agree_with_records(world)?;
    requests::benign_requests_succeed(world)?;
    resources::no_task_panicked()
}

fn violated(invariant: &'static str, found: String) -> Checked {
    Err(Violation { invariant, found })
}
