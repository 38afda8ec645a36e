//! Guards of HTTP/2 connections: meters of received and sent frames.

pub(crate) mod frame_meter;
pub(crate) mod sent_frames;
