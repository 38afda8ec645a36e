//! Guards of HTTP/2 connections: meters of the frames that a peer sends and is sent.

pub(crate) mod frame_meter;
pub(crate) mod sent_frames;
