//! Raw HTTP/2 frames (RFC 9113 §4.1, RFC 7541), for requests that no HTTP/2 library sends.

use super::caller::HOST;

pub(crate) use gw_bed::http2::*;

/// The header block of a GET request to the scene's service.
pub(crate) fn get(target: &str, key: Option<&str>) -> Vec<u8> {
    request("GET", HOST, target, key)
}

/// The header block of a GET request with its own path and `x-number` field. The decoder adds both
/// to its table (RFC 7541 §6.2.1), and does not add another field with `padding` bytes.
pub(crate) fn get_with_padding(number: u32, padding: usize) -> Vec<u8> {
    let mut block = get(&format!("/{number}"), None);
    let path = block.len() - format!("/{number}").len() - 2;
    block[path] |= WITH_INDEXING;
    block.extend(indexed("x-number", &number.to_string()));
    write_field(&mut block, "x-padding", "p".repeat(padding));
    block
}
