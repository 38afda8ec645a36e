//! The PROXY protocol.

use crate::ingress::proxy_protocol::{self, Preface};
use crate::limits;

/// First bytes of a connection from a trusted proxy.
pub fn proxy_header(data: &[u8]) {
    check_proxy_header(data, proxy_protocol::parse);
    check_proxy_header(data, proxy_protocol::parse_optional);
    if !data.starts_with(ppp::v2::PROTOCOL_PREFIX) && !ppp::v2::PROTOCOL_PREFIX.starts_with(data) {
        assert_eq!(
            proxy_protocol::parse_optional(data),
            Ok(Some(Preface {
                source: None,
                length: 0
            }))
        );
    }
}

fn check_proxy_header(data: &[u8], parse: proxy_protocol::Parse) {
    match parse(data) {
        Ok(Some(Preface {
            source: None,
            length: 0,
        })) => {}
        Ok(Some(preface)) => {
            let length = preface.length;
            assert!(length <= 16 + limits::PROXY_HEADER && length <= data.len());
            for end in 0..length {
                assert_eq!(parse(&data[..end]), Ok(None), "{end} of {length} bytes");
            }
            assert_eq!(parse(&data[..length]), Ok(Some(preface)));
        }
        // An incomplete header is bounded, so that a connection does not wait for ever.
        Ok(None) => assert!(data.len() < 16 + limits::PROXY_HEADER),
        error => assert_eq!(parse(&[data, b"more"].concat()), error),
    }
}
