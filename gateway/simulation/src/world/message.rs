//! How messages name the request that they belong to.

use std::io;

/// Field of trailers that names the request.
pub(crate) const TRAILER: &str = "x-sim-trailer";

/// Id of the request with this path.
pub(crate) fn id(path: &str) -> io::Result<u32> {
    let id = path.strip_prefix("/r/").and_then(|id| id.parse().ok());
    id.ok_or_else(|| io::Error::other("the path names no request"))
}

/// The request that a line of trailers names.
pub(crate) fn trailer(line: &str) -> Option<u32> {
    let (name, value) = line.split_once(':')?;
    let is_ours = name.eq_ignore_ascii_case(TRAILER);
    is_ours.then(|| value.trim().parse().ok())?
}
