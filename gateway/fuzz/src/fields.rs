//! The rules for fields that an intermediary forwards.

use gw_shared::http::{Fields, fields};
use http::header::{self, HeaderName, HeaderValue};

/// Fields of a head and of a trailer section that are forwarded. Input: one `name: value` per line.
pub fn header_rules(data: &[u8]) {
    let mut headers = Fields::new();
    for line in data.split(|byte| *byte == b'\n').take(60) {
        let colon = line
            .iter()
            .position(|byte| *byte == b':')
            .unwrap_or(line.len());
        let name = HeaderName::from_bytes(&line[..colon]);
        let value = line.get(colon + 1..).unwrap_or_default();
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(value.trim_ascii())) {
            headers.append(name, value);
        }
    }
    let named = |name: &HeaderName| {
        let values = headers
            .get_all(header::CONNECTION)
            .filter_map(|value| value.to_str().ok());
        let mut names = values.flat_map(|value| value.split(','));
        names.any(|it| it.trim().eq_ignore_ascii_case(name.as_str()))
    };
    let kept = fields::end_to_end(headers.clone(), fields::is_own);
    for (name, value) in kept.iter() {
        assert!(!fields::is_own(name));
        match name.as_str() {
            "te" => assert_eq!(value, "trailers"),
            "connection" | "transfer-encoding" | "upgrade" | "keep-alive" | "proxy-connection" => {
                panic!("{name}")
            }
            "content_length" | "transfer_encoding" | "http2-settings" => panic!("{name}"),
            "host" | "content-length" => {}
            _ => assert!(!named(name), "{name} is a hop-by-hop field"),
        }
    }
    // The forwarded fields keep their order.
    let mut all = headers.iter();
    for field in kept.iter().filter(|(name, _)| **name != header::TE) {
        assert!(all.any(|it| it == field), "{field:?} is out of order");
    }
    assert_eq!(
        fields::end_to_end(kept.clone(), fields::is_own),
        kept,
        "the rules are idempotent"
    );
    assert!(
        !fields::end_to_end_response(headers.clone()).contains(header::TE),
        "TE in a response"
    );
    for (name, _) in fields::end_to_end_trailers(headers.clone()) {
        assert!(!fields::is_own(&name));
        let framing = [
            header::CONTENT_LENGTH,
            header::TRANSFER_ENCODING,
            header::HOST,
            header::TE,
            header::TRAILER,
        ];
        assert!(!framing.contains(&name), "{name} in trailers");
    }
}
