//! Pages about each kind of record.

pub(crate) mod accounts;
pub(crate) mod agents;
pub(crate) mod caller_secrets;
pub(crate) mod domains;
pub(crate) mod enrollment;
pub(crate) mod services;
