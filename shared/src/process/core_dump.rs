//! Core dumps of this process. Its memory has keys and tokens, and a dump writes them to a file.

use std::io;

use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use crate::command;
use crate::config::Keys;

/// Allows or refuses core dumps of this process. Without them, no other process of the same user
/// can read its memory either, except as root (prctl(2), `PR_SET_DUMPABLE`). A program starts with
/// dumps allowed, whatever its parent had.
pub fn allow(is_allowed: bool) -> io::Result<()> {
    let behavior = if is_allowed {
        DumpableBehavior::Dumpable
    } else {
        DumpableBehavior::NotDumpable
    };
    Ok(set_dumpable_behavior(behavior)?)
}

/// Refuses core dumps from the start of a program, until its configuration is read.
pub fn refuse_at_start(program: &str) {
    if let Err(error) = allow(false) {
        command::note(
            program,
            format_args!("warning: core dumps cannot be refused: {error}"),
        );
    }
}

/// Takes `core_dumps`: whether core dumps are allowed.
pub fn take(keys: &mut Keys<'_>) -> bool {
    keys.boolean("core_dumps").unwrap_or(false)
}
