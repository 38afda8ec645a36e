//! Agents, real ones or those that a test controls.

pub(crate) mod in_process;
pub(crate) mod modified_agent;
pub(crate) mod scripted;
pub(crate) mod supervised_agent;
pub(crate) mod tunnel_frames;
