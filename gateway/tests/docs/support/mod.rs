//! Helpers of the tests: Markdown, shell commands, and running programs.

pub(super) mod markdown;
pub(super) mod served;
pub(super) mod session;
pub(super) mod words;
