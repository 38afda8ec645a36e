//! Raw HTTP/2 frames (RFC 9113 §4.1, RFC 7541), for requests that no HTTP/2 library sends.

use super::caller::HOST;

/// Connection preface of a client (RFC 9113 §3.4), without its SETTINGS frame.
pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const PRIORITY: u8 = 2;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;
pub(crate) const UNKNOWN: u8 = 0xfa;
pub(crate) const END_STREAM: u8 = 1;
/// Flag of SETTINGS.
pub(crate) const ACK: u8 = 0x1;
pub(crate) const END_HEADERS: u8 = 4;

pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// Appends a field without indexing (RFC 7541 §6.2.2): a name from the static table, or a literal
/// name.
fn field(block: &mut Vec<u8>, name: Result<u8, &str>, value: &str) {
    let text = |block: &mut Vec<u8>, text: &str| {
        // An integer with a prefix of seven bits (RFC 7541 §5.1).
        if text.len() < 127 {
            block.push(text.len() as u8);
        } else {
            block.push(127);
            let mut rest = text.len() - 127;
            while rest >= 128 {
                block.push((rest % 128) as u8 | 128);
                rest /= 128;
            }
            block.push(rest as u8);
        }
        block.extend_from_slice(text.as_bytes());
    };
    match name {
        Ok(number) => block.push(number),
        Err(name) => {
            block.push(0);
            text(block, name);
        }
    }
    text(block, value);
}

/// The header block of a GET request to the demo's service.
pub(crate) fn get(target: &str, key: Option<&str>) -> Vec<u8> {
    const SCHEME_HTTPS: u8 = 0x87;
    let mut block = vec![SCHEME_HTTPS];
    field(&mut block, Ok(1), HOST);
    field(&mut block, Ok(2), "GET");
    field(&mut block, Ok(4), target);
    key.into_iter()
        .for_each(|key| field(&mut block, Err("x-gw-service-key"), key));
    block
}

/// The header block of a GET request with its own path and `x-number` field. The decoder adds both
/// to its table (RFC 7541 §6.2.1), and does not add another field with `padding` bytes.
pub(crate) fn get_with_padding(number: u32, padding: usize) -> Vec<u8> {
    let mut block = get(&format!("/{number}"), None);
    let path = block.len() - format!("/{number}").len() - 2;
    block[path] |= WITH_INDEXING;
    block.extend(indexed("x-number", &number.to_string()));
    field(&mut block, Err("x-padding"), &"p".repeat(padding));
    block
}

/// Bit of a literal field that the decoder adds to its table (RFC 7541 §6.2.1).
const WITH_INDEXING: u8 = 0x40;

/// A field that the decoder adds to its table.
pub(crate) fn indexed(name: &str, value: &str) -> Vec<u8> {
    let mut block = block(&[(name, value)]);
    block[0] |= WITH_INDEXING;
    block
}

/// A header block with these fields, pseudo-header fields included, in this order.
pub(crate) fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    fields
        .iter()
        .for_each(|(name, value)| field(&mut block, Err(name), value));
    block
}
