//! `gw-kernel-notes PROBE`: measures the claim of the page of the same name on this machine.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a probe reports to its terminal and stops on any failure"
)]

mod delayed_acknowledgements;
mod echo;
mod hand_over;
mod huge_pages;
mod load;
mod measure;
mod raw_ring;
mod readiness;
mod ring_flags;
mod wakes;

use std::process::ExitCode;

use gw_shared::process::allocator::Allocator;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["ring-flags"] => ring_flags::probe(),
        ["readiness-or-completion"] => readiness::probe(),
        ["cross-core-wakes"] => wakes::probe(),
        ["hand-over"] => hand_over::probe(),
        ["huge-pages"] => huge_pages::probe(),
        ["delayed-acknowledgements"] => delayed_acknowledgements::probe(),
        // Child processes of the probes.
        [readiness::IDLE, style] => readiness::report_idle_memory(style),
        [hand_over::CALLER, port, connections] => hand_over::call(port, connections),
        _ => {
            eprintln!(
                "usage: gw-kernel-notes ring-flags | readiness-or-completion | cross-core-wakes | \
                 hand-over | huge-pages | delayed-acknowledgements"
            );
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
