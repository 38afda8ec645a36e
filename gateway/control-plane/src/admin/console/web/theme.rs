//! The colour theme of the console, stored in a cookie.

use std::fmt;
use std::time::Duration;

use axum::Extension;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Redirect, Response};

use super::address;
use super::forms::form::Form;
use super::session::THEME;

const KEPT: Duration = Duration::from_hours(365 * 24);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Theme {
    /// The preference of the browser.
    System,
    Light,
    Dark,
}

impl Theme {
    pub(crate) const ALL: [Self; 3] = [Self::System, Self::Light, Self::Dark];

    /// The `Set-Cookie` value that keeps it.
    pub(crate) fn cookie(self, headers: &HeaderMap) -> String {
        THEME.set(headers, &self.to_string(), KEPT)
    }
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

pub(crate) async fn set(headers: HeaderMap, Extension(form): Extension<Form>) -> Response {
    let cookie = Theme::from(form.value("theme")).cookie(&headers);
    (
        [(header::SET_COOKIE, cookie)],
        Redirect::to(address::checked(form.value("back"))),
    )
        .into_response()
}
