//! Shared parts of the pages: guards, sessions, forms, formats, assets and the page frame.

pub(crate) mod address;
pub(crate) mod assets;
pub(crate) mod error_guide;
pub(crate) mod failure;
pub(crate) mod format;
pub(crate) mod forms;
pub(crate) mod guard;
pub(crate) mod own_name;
pub(crate) mod page;
pub(crate) mod session;
pub(crate) mod theme;
pub(crate) mod waterfall;
