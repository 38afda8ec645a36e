//! Forms: their fields, bodies, and edits that outlive a session.

pub(crate) mod body;
pub(crate) mod form;
pub(crate) mod kept;
