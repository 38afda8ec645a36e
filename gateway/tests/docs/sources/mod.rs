//! Helpers of the tests: Markdown, sessions of pages, and running programs.

pub(super) mod markdown;
pub(super) mod served;
pub(super) mod session;
