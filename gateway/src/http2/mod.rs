//! HTTP/2 connections of callers: bodies that wait for the next hop, and meters of received and sent frames.

pub(crate) mod frame_meter;
pub(crate) mod incoming;
pub(crate) mod sent_frames;
