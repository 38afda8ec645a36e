//! Frames that an agent sends on its tunnel (`docs/tunnel.md`), valid or not.

pub(crate) use gw_bed::tunnel::*;
