//! Middleware of the console: response headers, origin checks, sessions.

use crate::limits;
use axum::RequestExt;
use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Redirect, Response};

use super::address;
use super::failure::ErrorPage;
use super::forms::form::Form;
use super::forms::kept::KeptForm;
use super::own_name::OwnName;
use super::session::{self, SESSION};
use crate::admin::console::pages::sign_in;
use crate::admin::serve::keep_place;
use crate::admin::{Admin, hosts};
use crate::http_server::limit_body;

/// Forbids inline scripts and styles, other origins, and framing.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' \
                      data:; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; \
                      base-uri 'none'";

/// Field for the form token of requests by scripts.
const FORM_TOKEN: HeaderName = HeaderName::from_static("x-gw-form-token");
/// Field in which htmx sends the address of the current page.
const CURRENT_URL: HeaderName = HeaderName::from_static("hx-current-url");

/// Adds the security headers of every response.
pub(crate) async fn hardened(request: Request, next: Next) -> Response {
    // A sign-in under the console's own name leads to the name of the session; browsers check
    // redirects of forms too.
    let policy = OwnName::of(request.headers()).and_then(|own| {
        let with_sessions = format!("form-action 'self' {}", own.sources());
        HeaderValue::try_from(POLICY.replace("form-action 'self'", &with_sessions)).ok()
    });
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_SECURITY_POLICY,
        policy.unwrap_or(HeaderValue::from_static(POLICY)),
    );
    for (name, value) in [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // Not `no-referrer`, which makes browsers send `Origin: null` with the console's own forms.
        (header::REFERRER_POLICY, "same-origin"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    response
}

/// Refuses unsafe requests from pages of other origins.
pub(crate) async fn own_origin(request: Request, next: Next) -> Response {
    let host = text(request.headers(), &header::HOST);
    if !request.method().is_safe() && !is_from_us(request.headers(), host) {
        return ErrorPage::forged().into_response();
    }
    next.run(request).await
}

/// Whether the browser declares the request as same-origin. True if it declares nothing, as old
/// browsers and other clients do; the form token decides then.
fn is_from_us(headers: &HeaderMap, host: &str) -> bool {
    match (
        text(headers, &HeaderName::from_static("sec-fetch-site")),
        text(headers, &header::ORIGIN),
    ) {
        // Preferred over Origin, because a proxy may have changed Host.
        ("same-origin" | "none", _) => true,
        ("", origin) => origin.is_empty() || hosts::is_same(origin, host),
        _ => false,
    }
}

/// Requires a session and, for unsafe methods, the form token. Parses the form once for all
/// handlers, so that no handler can omit the check.
pub(crate) async fn signed_in(
    State(admin): State<Admin>,
    mut request: Request,
    next: Next,
) -> Response {
    let id = SESSION.of(request.headers()).map(str::to_owned);
    let form_token = match id {
        Some(id) if admin.is_session_open(&id).await => session::form_token(&id),
        Some(_) | None => return sign_in_first(&admin, request).await,
    };
    if !request.method().is_safe() {
        let (parts, body) = request.with_limited_body().into_parts();
        // Bounded by the limit of the route.
        let Ok(body) = to_bytes(body, usize::MAX).await else {
            return ErrorPage::too_large().into_response();
        };
        let form = Form::parse(&body);
        let sent = match text(&parts.headers, &FORM_TOKEN) {
            "" => form.value(Form::TOKEN),
            sent => sent,
        };
        if !session::is_form_token(&form_token, sent) {
            return ErrorPage::forged().into_response();
        }
        request = Request::from_parts(parts, axum::body::Body::empty());
        request.extensions_mut().insert(form);
    }
    keep_place(request.extensions());
    request.extensions_mut().insert(SignedIn { form_token });
    next.run(request).await
}

/// Proof that a request belongs to a session. Only [`signed_in`] creates one.
#[derive(Clone)]
pub(crate) struct SignedIn {
    pub(crate) form_token: String,
}

/// Redirects to the sign-in page, which leads back to the current page. Shows it at once if the
/// request is a form, which it keeps.
async fn sign_in_first(admin: &Admin, request: Request) -> Response {
    let headers = request.headers();
    // A script would process the sign-in page as the response it expects.
    if headers.contains_key("hx-request") || request.uri().path() == "/traffic/series" {
        let address = address::of_sign_in(&page_of(text(headers, &CURRENT_URL)), true);
        return (StatusCode::UNAUTHORIZED, [("HX-Redirect", address)]).into_response();
    }
    if request.method().is_safe() {
        let asked = request
            .uri()
            .path_and_query()
            .map_or("/", PathAndQuery::as_str);
        return Redirect::to(&address::of_sign_in(asked, false)).into_response();
    }
    let next = page_of(text(headers, &header::REFERER));
    let request = limit_body::<{ limits::ADMIN_KEPT_FORM }>(request).await;
    let (parts, body) = request.into_parts();
    // One that is larger, or does not arrive in time, is not kept.
    let body = to_bytes(body, limits::ADMIN_KEPT_FORM).await;
    match KeptForm::sent_to(parts.uri.path(), &body.unwrap_or_default()) {
        Some(kept) => sign_in::keeping(admin, &parts.headers, &next, &kept).into_response(),
        None => Redirect::to(&address::of_sign_in(&next, true)).into_response(),
    }
}

/// Path and query of the page that the browser shows, without the note of the last change. Drops
/// the host, so that a redirect cannot leave the console.
fn page_of(url: &str) -> String {
    let Some(page) = url
        .parse::<Uri>()
        .ok()
        .and_then(|url| url.into_parts().path_and_query)
    else {
        return "/".to_owned();
    };
    let query = page
        .query()
        .unwrap_or_default()
        .split('&')
        .filter(|pair| !pair.is_empty() && !pair.starts_with("note="));
    let query: Vec<&str> = query.collect();
    let address = if query.is_empty() {
        page.path().to_owned()
    } else {
        format!("{}?{}", page.path(), query.join("&"))
    };
    address::checked(&address).to_owned()
}

pub(crate) fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> &'a str {
    headers
        .get(name)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_from_other_origins_are_detected() {
        let from = |site: &'static str, origin: &'static str| {
            let mut headers = HeaderMap::new();
            for (name, value) in [("sec-fetch-site", site), ("origin", origin)] {
                if !value.is_empty() {
                    headers.insert(name, HeaderValue::from_static(value));
                }
            }
            is_from_us(&headers, "127.0.0.1:9080")
        };
        let ours = "http://127.0.0.1:9080";
        assert!(
            from("same-origin", ours)
                && from("", ours)
                && from("", "")
                && from("same-origin", "https://proxy.example")
        );
        assert!(!from("cross-site", ours) && !from("same-site", ours) && !from("", "null"));
        assert!(!from("", "http://127.0.0.1:9081") && !from("", "https://evil.example"));
    }

    #[test]
    fn the_return_address_is_a_path_of_the_console() {
        for (url, page) in [
            (
                "http://127.0.0.1:9080/requests?status=5xx#top",
                "/requests?status=5xx",
            ),
            (
                "https://proxy.example/accounts/acme?note=saved",
                "/accounts/acme",
            ),
            (
                "https://proxy.example/requests?note=saved&id=1",
                "/requests?id=1",
            ),
            ("https://evil.example//evil.example/", "/"),
            ("//evil.example/", "/"),
            ("nonsense", "/"),
            ("", "/"),
        ] {
            assert_eq!(page_of(url), page, "{url}");
        }
    }
}
