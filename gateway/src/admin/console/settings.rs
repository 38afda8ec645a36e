//! How somebody likes the console: in a cookie.

use std::fmt;
use std::time::Duration;

use axum::Extension;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Redirect, Response};

use super::form::Form;
use super::session::THEME;

const KEPT: Duration = Duration::from_hours(365 * 24);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Theme {
    /// As the browser prefers.
    System,
    Light,
    Dark,
}

impl Theme {
    pub(super) const ALL: [Self; 3] = [Self::System, Self::Light, Self::Dark];
}

impl From<&str> for Theme {
    fn from(word: &str) -> Self {
        match word {
            "light" => Self::Light,
            "dark" => Self::Dark,
            _ => Self::System,
        }
    }
}

impl fmt::Display for Theme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::System => "system",
            Self::Light => "light",
            Self::Dark => "dark",
        })
    }
}

pub(super) async fn theme(headers: HeaderMap, Extension(form): Extension<Form>) -> Response {
    let cookie = THEME.set(&headers, &Theme::from(form.value("theme")).to_string(), KEPT);
    ([(header::SET_COOKIE, cookie)], Redirect::to(own_address(form.value("back")))).into_response()
}

/// An address to go to, if it is one of ours: a path, which no browser takes for a host.
pub(super) fn own_address(address: &str) -> &str {
    let is_path = address.starts_with('/') && !address.starts_with("//") && !address.starts_with("/\\");
    if is_path && address.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\') { address } else { "/" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_addresses_are_gone_to() {
        assert_eq!(own_address("/requests?status=5xx"), "/requests?status=5xx");
        for other in
            ["", "requests", "//evil.example", "/\\evil.example", "https://evil.example", "/a\r\nb", "/\t/evil"]
        {
            assert_eq!(own_address(other), "/", "{other:?}");
        }
    }
}
