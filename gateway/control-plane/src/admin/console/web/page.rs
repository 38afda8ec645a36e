//! The page frame: navigation, breadcrumbs, theme and notes.

use askama::Template;
use axum::extract::{FromRequestParts, Query};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{Html, IntoResponse, Response};

use super::assets;
use super::failure::ErrorPage;
use super::forms::form::Form;
use super::guard::SignedIn;
use super::session::THEME;
use super::theme::Theme;
use crate::admin::Admin;

/// Section of a page in the navigation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Section {
    Overview,
    Accounts,
    Tunnels,
    Requests,
    Traffic,
    Usage,
    AuditLog,
    Region,
}

impl Section {
    /// All sections in the order of the navigation, with names and addresses. The last is shown in
    /// regions of several nodes.
    const ALL: [(Self, &'static str, &'static str); 8] = [
        (Self::Overview, "Overview", "/"),
        (Self::Accounts, "Accounts", "/accounts"),
        (Self::Tunnels, "Live tunnels", "/tunnels"),
        (Self::Requests, "Requests", "/requests"),
        (Self::Traffic, "Traffic", "/traffic"),
        (Self::Usage, "Usage", "/usage"),
        (Self::AuditLog, "Audit log", "/audit-log"),
        (Self::Region, "Region", "/region"),
    ];
}

/// A request for a page in a session.
pub(crate) struct Visit {
    signed_in: SignedIn,
    theme: Theme,
    /// Path and query.
    address: String,
    note: Option<&'static str>,
    region: String,
    port: String,
    has_other_nodes: bool,
}

impl FromRequestParts<Admin> for Visit {
    type Rejection = ErrorPage;

    async fn from_request_parts(parts: &mut Parts, admin: &Admin) -> Result<Self, ErrorPage> {
        // The guard sets it on every request.
        let signed_in = parts
            .extensions
            .get::<SignedIn>()
            .cloned()
            .ok_or_else(ErrorPage::forged)?;
        let query =
            Query::<Vec<(String, String)>>::try_from_uri(&parts.uri).map(|Query(query)| query);
        let note = query
            .iter()
            .flatten()
            .find(|(name, _)| name == "note")
            .and_then(|(_, note)| in_words(note));
        Ok(Self {
            signed_in,
            theme: THEME.of(&parts.headers).map_or(Theme::System, Theme::from),
            address: parts
                .uri
                .path_and_query()
                .map_or_else(|| "/".to_owned(), ToString::to_string),
            note,
            region: admin.control.region().apex().to_owned(),
            port: match admin.console.port() {
                443 => String::new(),
                port => format!(":{port}"),
            },
            has_other_nodes: admin.region.is_some(),
        })
    }
}

/// The text of a `note` parameter, with which a form handler reports success after its redirect.
fn in_words(note: &str) -> Option<&'static str> {
    Some(match note {
        "created" => "Created.",
        "there" => "It already exists with these settings. Nothing was changed.",
        "saved" => "Saved. The workers apply it at once.",
        "deleted" => "Deleted.",
        "checked" => "Looked up in DNS.",
        "renewed" => "A new certificate is ordered. The one before stays in use until it is there.",
        "uploaded" => "Uploaded. New handshakes use it at once.",
        "approved" => "Approved. The agent gets its certificate at its next poll.",
        "revoked" => "Revoked. Its tunnels have ended, and its certificate is refused.",
        "replayed" => "Replayed. This is the new request.",
        _ => return None,
    })
}

/// The data of the page frame.
pub(crate) struct Chrome {
    pub(crate) title: String,
    pub(crate) section: Section,
    pub(crate) assets: &'static str,
    pub(crate) form_token: String,
    pub(crate) theme: Theme,
    pub(crate) address: String,
    pub(crate) note: Option<&'static str>,
    /// Errors of a form that the page shows at none of its fields.
    pub(crate) failures: Vec<String>,
    pub(crate) region: String,
    /// Port of addresses for callers, with a colon; empty for the default of https.
    pub(crate) port: String,
    has_other_nodes: bool,
}

impl Visit {
    pub(crate) fn chrome(self, section: Section, title: impl Into<String>) -> Chrome {
        let Self {
            signed_in: SignedIn { form_token },
            theme,
            address,
            note,
            region,
            port,
            has_other_nodes,
        } = self;
        let title = title.into();
        let assets = assets::version();
        Chrome {
            title,
            section,
            assets,
            form_token,
            theme,
            address,
            note,
            failures: Vec::new(),
            region,
            port,
            has_other_nodes,
        }
    }
}

impl Chrome {
    pub(crate) fn sections(&self) -> &'static [(Section, &'static str, &'static str)] {
        let shown = Section::ALL.len() - usize::from(!self.has_other_nodes);
        &Section::ALL[..shown]
    }

    pub(crate) fn themes(&self) -> [Theme; 3] {
        Theme::ALL
    }
}

pub(crate) fn render(page: &impl Template) -> Result<Response, ErrorPage> {
    Ok(Html(text(page)?).into_response())
}

fn text(page: &impl Template) -> Result<String, ErrorPage> {
    page.render().map_err(|error| {
        tracing::error!(%error, "cannot render a page of the console");
        ErrorPage::broken()
    })
}

/// Renders a page with a form. If the form has errors, the status is 422, and those that the page
/// shows at none of its fields are at its top.
pub(crate) fn render_form<P: Template>(
    mut page: P,
    parts: impl FnOnce(&mut P) -> (&mut Chrome, &Form),
) -> Result<Response, ErrorPage> {
    let shown = text(&page)?;
    let (chrome, form) = parts(&mut page);
    if !form.is_refused() {
        return Ok(Html(shown).into_response());
    }
    chrome.failures = form.errors_without_place(&shown);
    let page = match chrome.failures.is_empty() {
        true => shown,
        false => text(&page)?,
    };
    Ok((StatusCode::UNPROCESSABLE_ENTITY, Html(page)).into_response())
}

/// One step of the breadcrumbs.
pub(crate) struct Crumb {
    pub(crate) name: String,
    pub(crate) address: String,
}

pub(crate) fn crumb(name: impl Into<String>, address: impl Into<String>) -> Crumb {
    Crumb {
        name: name.into(),
        address: address.into(),
    }
}
