//! HTTP/2 connections of callers: bodies that wait for the next hop, data that h2 has not sent, and
//! a meter of received frames.

pub(crate) mod frame_meter;
pub(crate) mod incoming;
pub(crate) mod unsent;
