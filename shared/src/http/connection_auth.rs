//! Schemes that authenticate a connection in place of a request: NTLM, and Negotiate (RFC 4559 §6).
//! Once a server has accepted their credentials, it takes all requests of the connection for those
//! of one user.

use http::header::{self, HeaderValue};

use super::Fields;

/// Whether the fields of a request have credentials of such a scheme.
pub fn authenticates_connection(request: &Fields) -> bool {
    let is_such = |value: &HeaderValue| token_of(value.as_bytes()).is_some();
    request.get_all(header::AUTHORIZATION).any(is_such)
}

/// Whether the fields of a response have a token of such a scheme: the server binds an identity to
/// the connection, or has begun to. A challenge without a token is an offer, which binds nothing.
pub fn binds_connection(response: &Fields) -> bool {
    let has_token = |challenge| token_of(challenge).is_some_and(|token| !token.is_empty());
    response
        .get_all(header::WWW_AUTHENTICATE)
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .any(has_token)
}

/// What follows the name of such a scheme; `None` if it is another scheme.
fn token_of(value: &[u8]) -> Option<&[u8]> {
    let value = value.trim_ascii();
    [&b"NTLM"[..], b"Negotiate"].into_iter().find_map(|scheme| {
        let (name, rest) = value.split_at_checked(scheme.len())?;
        let is_whole = rest.first().is_none_or(u8::is_ascii_whitespace);
        (name.eq_ignore_ascii_case(scheme) && is_whole).then(|| rest.trim_ascii_start())
    })
}

#[cfg(test)]
mod tests {
    use http::header::HeaderName;

    use super::*;

    fn field(name: &HeaderName, values: &[&'static str]) -> Fields {
        let value = |value: &&'static str| (name.clone(), HeaderValue::from_static(value));
        values.iter().map(value).collect()
    }

    #[test]
    fn credentials_of_ntlm_and_negotiate_authenticate_a_connection() {
        for (values, expected) in [
            (&["NTLM TlRMTVNTUAAB"][..], true),
            (&["negotiate YII="], true),
            (&["Negotiate"], true),
            (&["Basic YTpi", "nTlM\tTlRM"], true),
            (&["Basic YTpi"], false),
            (&["NTLMv2 x", "NegotiateX y", "Bearer NTLM", ""], false),
            (&[], false),
        ] {
            let request = field(&header::AUTHORIZATION, values);
            assert_eq!(authenticates_connection(&request), expected, "{values:?}");
        }
    }

    #[test]
    fn only_challenges_with_a_token_bind_a_connection() {
        for (values, expected) in [
            (&["NTLM TlRMTVNTUAAC"][..], true),
            (&["Negotiate", "NTLM TlRM"], true),
            (&["Basic realm=\"a\", negotiate YII="], true),
            (&["Negotiate", "NTLM "], false),
            (&["Negotiate, NTLM,Basic realm=\"NTLM x\""], false),
            (&[], false),
        ] {
            let response = field(&header::WWW_AUTHENTICATE, values);
            assert_eq!(binds_connection(&response), expected, "{values:?}");
        }
    }
}
