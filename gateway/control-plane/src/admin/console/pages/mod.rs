//! One file per page or group of pages, with their forms.

pub(crate) mod accounts;
pub(crate) mod agents;
pub(crate) mod audit;
pub(crate) mod caller_secrets;
pub(crate) mod enrollment;
pub(crate) mod overview;
pub(crate) mod region;
pub(crate) mod replay;
pub(crate) mod requests;
pub(crate) mod services;
pub(crate) mod sign_in;
pub(crate) mod traffic;
pub(crate) mod tunnels;
pub(crate) mod usage;
