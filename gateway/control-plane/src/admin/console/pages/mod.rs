//! One file per page or group of pages, with their forms.

pub(crate) mod audit;
pub(crate) mod overview;
pub(crate) mod records;
pub(crate) mod region;
pub(crate) mod replay;
pub(crate) mod requests;
pub(crate) mod sign_in;
pub(crate) mod traffic;
pub(crate) mod tunnels;
pub(crate) mod usage;
