//! Identity of agents and nodes: the authority, its certificates, and the enrollment of agents.

pub mod authority;
pub mod certificate;
pub mod enrollment;
pub(crate) mod shared_files;
