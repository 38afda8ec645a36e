//! Captured messages: copied while they are relayed, and their stored form.

pub(crate) mod capture;
pub(crate) mod capturing;
