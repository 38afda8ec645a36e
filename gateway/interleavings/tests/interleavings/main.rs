//! Interleavings of the threads that use a mailbox or a pipe, explored with loom.

#![allow(clippy::unwrap_used, reason = "tests stop at the first surprise")]

mod explore;
mod model;

/// Limits of the copies: as small as possible, so that few steps reach each of them.
mod limits {
    pub(crate) const MAILBOX_BATCH: usize = 1;
    pub(crate) const PIPE_FRAMES: usize = 1;
    pub(crate) const PIPE_BYTES: usize = 2;
    pub(crate) const PIPE_FRAMES_PER_TURN: usize = 1;
}

/// Copies of the product's files, and one of each mutant with the test that the exploration finds
/// it.
#[allow(
    dead_code,
    unreachable_pub,
    unused_variables,
    clippy::duplicate_mod,
    reason = "the copies have all of the product's functions, and the same scenarios; mutants \
              leave some unused"
)]
mod copies {
    include!(concat!(env!("OUT_DIR"), "/copies.rs"));
}

/// One test for each scenario.
macro_rules! explored {
    ($($module:ident: $($scenario:ident)+;)+) => {
        $(mod $module {
            $(#[test]
            fn $scenario() {
                crate::explore::explore(crate::copies::product::$module::scenarios::$scenario);
            })+
        })+
    };
}

explored! {
    pipe:
        frames_that_wait_for_credit_arrive_in_order
        frames_that_wait_for_room_arrive_in_order
        full_mailboxes_lose_no_wake
        frames_arrive_through_mailboxes
        a_dropped_sender_ends_the_wait
        a_dropped_receiver_ends_the_wait_for_credit
        a_dropped_receiver_ends_the_wait_for_room
        a_dropped_receiver_resolves_closed
        a_sender_that_waits_for_credit_and_for_the_end_is_woken_by_either
        a_cancelled_receive_loses_no_frame
        a_cancelled_send_leaves_no_frame_and_no_credit;
    mailbox:
        messages_of_two_threads_arrive_once
        a_thread_that_waits_for_room_gets_it
        a_full_mailbox_gives_the_message_back
        a_worker_that_starts_again_handles_the_messages_left
        a_mailbox_whose_worker_has_ended_gives_messages_back;
}
