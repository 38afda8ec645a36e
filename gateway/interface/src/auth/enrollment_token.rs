//! Enrollment tokens: `gw_et_{id}.{secret}`.

use gw_shared::id::EnrollmentTokenId;

/// Begin of every token.
pub const TOKEN_PREFIX: &str = "gw_et_";

/// Splits a token into id and secret.
pub fn parse_token(token: &str) -> Option<(EnrollmentTokenId, &str)> {
    let (id, secret) = token.strip_prefix(TOKEN_PREFIX)?.split_once('.')?;
    Some((EnrollmentTokenId::new(id).ok()?, secret))
}
