//! The request log: search, and the page of one request.

use askama::Template;
use axum::extract::{Path, Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Redirect, Response};
use gw_shared::id::{AgentId, ClientId, KeyId, RequestId};
use gw_store::Records;
use gw_telemetry::request_log::{CapturedView, RequestPage, RequestView, SearchQuery, Side};
use serde::Deserialize;

use crate::admin::console::web::error_guide::{self, GuidePart};
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::format;
use crate::admin::console::web::forms::body;
use crate::admin::console::web::forms::body::ShownBody;
use crate::admin::console::web::forms::form::Form;
use crate::admin::console::web::page::{Chrome, Crumb, Section, Visit, crumb, render, render_form};
use crate::admin::console::web::waterfall::{self, Bar};
use crate::admin::nodes::Located;
use crate::admin::{Admin, NoResult};

const ROWS: usize = 50;
const MISSING_ARCHIVE: &str = "Requests of lost nodes are missing: the archive cannot be read.";

/// A request in a list.
pub(crate) struct RequestRow {
    pub(crate) id: String,
    pub(crate) time: String,
    pub(crate) label: String,
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) status: StatusCell,
    pub(crate) code: String,
    /// Number of failed attempts.
    pub(crate) attempts: usize,
    pub(crate) duration: String,
}

/// The status of a response, or `none`, with its style.
pub(crate) struct StatusCell {
    pub(crate) text: String,
    pub(crate) look: &'static str,
}

impl From<&RequestView> for StatusCell {
    fn from(request: &RequestView) -> Self {
        let look = match (request.status, request.ended.as_str()) {
            (Some(500..), _) | (_, "cut") => "bad",
            (Some(400..500), _) | (None, _) => "warn",
            (Some(300..400), _) => "neutral",
            (Some(_), _) => "good",
        };
        Self {
            text: request
                .status
                .map_or_else(|| "none".to_owned(), |status| status.to_string()),
            look,
        }
    }
}

impl From<&RequestView> for RequestRow {
    fn from(request: &RequestView) -> Self {
        Self {
            id: request.id.clone(),
            time: short_time(&request.time),
            label: label(request),
            method: request.method.clone(),
            path: request.path.clone(),
            status: StatusCell::from(request),
            code: request.code.clone().unwrap_or_default(),
            attempts: request.attempts.len(),
            duration: format::micros(request.durations_us.total),
        }
    }
}

fn label(request: &RequestView) -> String {
    if request.account.is_empty() {
        return "apex".to_owned();
    }
    format!("{}--{}", request.account, request.service)
}

/// The time without zone: `2026-11-21 04:15:32.123`.
fn short_time(time: &str) -> String {
    time.trim_end_matches('Z').replacen('T', " ", 1)
}

#[derive(Template)]
#[template(path = "requests.html")]
struct SearchPage {
    chrome: Chrome,
    form: Form,
    rows: Vec<RequestRow>,
    /// Address of the next page.
    next: Option<String>,
    is_filtered: bool,
    /// Which requests are missing.
    missing: Option<String>,
}

/// Fields of the search form, named as the parameters of the API.
const FILTERS: [&str; 11] = [
    "account",
    "service",
    "apex",
    "status",
    "code",
    "path_prefix",
    "caller_id",
    "retried",
    "since",
    "until",
    "min_ms",
];

pub(crate) async fn search(
    State(admin): State<Admin>,
    visit: Visit,
    Query(query): Query<Vec<(String, String)>>,
) -> Result<Response, ErrorPage> {
    let mut form = query
        .into_iter()
        .fold(Form::default(), |form, (name, value)| {
            form.with(&name, value)
        });
    if let Some(id) = form.filled("id") {
        match id.parse::<RequestId>() {
            Ok(id) => return Ok(Redirect::to(&format!("/requests/{id}")).into_response()),
            Err(error) => form.refuse("id", error.to_string()),
        }
    }
    let min_ms = form.number("min_ms", 0..=u32::MAX);
    let wanted = SearchQuery {
        account: form.filled("account"),
        service: form.filled("service"),
        apex: form.is_ticked("apex").then_some(true),
        status: form.filled("status"),
        code: form.filled("code"),
        path_prefix: form.filled("path_prefix"),
        caller_id: form.filled("caller_id"),
        retried: form.is_ticked("retried").then_some(true),
        since: form.filled("since").map(as_rfc_3339),
        until: form.filled("until").map(as_rfc_3339),
        min_ms,
        limit: Some(ROWS),
        cursor: form.filled("cursor"),
        partial: Some(true),
    };
    for (field, mistake) in wanted.mistakes() {
        form.refuse(field, mistake);
    }
    let mut page = RequestPage::default();
    if !form.is_refused() {
        match admin.search(wanted).await {
            Ok(found) => page = found,
            Err(NoResult::Refused(error)) => form.refused_by(error)?,
            Err(NoResult::Panicked(panicked)) => return Err(panicked.into()),
        }
    }
    let page = SearchPage {
        chrome: visit.chrome(Section::Requests, "Requests"),
        next: page
            .next_cursor
            .as_ref()
            .map(|cursor| form.address("/requests", &FILTERS, cursor)),
        is_filtered: FILTERS.iter().any(|name| form.filled(name).is_some()),
        rows: page.items.iter().map(RequestRow::from).collect(),
        missing: format::missing("Requests", &page.missing_nodes)
            .or_else(|| page.missing_archive.then(|| MISSING_ARCHIVE.to_owned())),
        form,
    };
    render_form(page, |page| (&mut page.chrome, &page.form))
}

/// Completes a time to RFC 3339. Browsers omit seconds and zone; times of the console are UTC.
fn as_rfc_3339(time: String) -> String {
    match time.len() {
        // 2026-11-21
        10 => format!("{time}T00:00:00Z"),
        // 2026-11-21T04:15
        16 => format!("{}:00Z", time.replacen(' ', "T", 1)),
        19 | 23 if !time.ends_with('Z') => format!("{}Z", time.replacen(' ', "T", 1)),
        _ => time,
    }
}

#[derive(Template)]
#[template(path = "request.html")]
struct DetailPage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    request: RequestView,
    status: StatusCell,
    target: String,
    bars: Vec<Bar>,
    total: String,
    messages: Vec<ShownMessage>,
    /// What the error code means, and what to do.
    guide: Vec<GuidePart>,
    names: RequestNames,
}

/// Display names of what a request refers to by its id.
#[derive(Default)]
struct RequestNames {
    agent: Option<String>,
    caller: Option<String>,
}

impl RequestNames {
    fn of(records: &Records, request: &RequestView) -> Self {
        let agent = request.agent_id.as_deref();
        let agent = agent.and_then(|id| records.agents.get(&AgentId::new(id).ok()?));
        let caller = request.caller_id.as_deref();
        let credential = caller.and_then(|id| records.credentials.get(&ClientId::new(id).ok()?));
        let key = caller.and_then(|id| records.service_keys.get(&KeyId::new(id).ok()?));
        Self {
            agent: agent.map(|agent| agent.name.clone()),
            caller: credential
                .and_then(|credential| credential.access.name.clone())
                .or_else(|| key?.access.name.clone()),
        }
    }
}

/// The captured request or response.
struct ShownMessage {
    name: &'static str,
    side: &'static str,
    captured: CapturedView,
    body: Option<ShownBody>,
    size: String,
}

pub(crate) async fn show(
    State(admin): State<Admin>,
    visit: Visit,
    Path(id): Path<String>,
) -> Result<Response, ErrorPage> {
    let located = locate(&admin, id.trim()).await?;
    let mut messages = Vec::new();
    for (name, side, captured) in [
        ("Request", Side::Request, &located.view.captured_request),
        (
            "Backend response",
            Side::Response,
            &located.view.captured_response,
        ),
    ] {
        let Some(captured) = captured.clone() else {
            continue;
        };
        let body = match admin.read_body(&located, side).await? {
            Some(body) => Some(admin.look(move |_| Ok(body::show(&body))).await?),
            None => None,
        };
        messages.push(ShownMessage {
            name,
            side: side.as_str(),
            size: format::bytes(captured.bytes),
            captured,
            body,
        });
    }
    let request = located.view;
    let asked = request.clone();
    let names = admin
        .look(move |control| Ok(control.look_at(|records| RequestNames::of(records, &asked))))
        .await?;
    let guide = request.code.as_deref().and_then(error_guide::about);
    render(&DetailPage {
        chrome: visit.chrome(Section::Requests, format!("Request {}", request.id)),
        crumbs: vec![crumb("Requests", "/requests")],
        status: StatusCell::from(&request),
        target: target(&request),
        bars: waterfall::bars(&request.durations_us),
        total: format::micros(request.durations_us.total),
        messages,
        guide: guide.unwrap_or_default(),
        names,
        request,
    })
}

/// Finds a request at any node. A malformed id is treated as an unknown request.
pub(crate) async fn locate(admin: &Admin, id: &str) -> Result<Located, ErrorPage> {
    let Ok(parsed) = id.parse() else {
        return Err(not_kept(id));
    };
    admin.locate(parsed).await?.ok_or_else(|| not_kept(id))
}

/// Path and query.
pub(crate) fn target(request: &RequestView) -> String {
    let query = request
        .query
        .as_ref()
        .map_or_else(String::new, |query| format!("?{query}"));
    format!("{}{query}", request.path)
}

fn not_kept(id: &str) -> ErrorPage {
    let id: String = id.chars().take(80).collect();
    ErrorPage::not_found(format!(
        "Request {id} is not in the log. The log keeps requests for seven days, for services with \
         request logging."
    ))
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SideWord {
    Request,
    Response,
}

/// A captured body as a file download; browsers must not render it.
pub(crate) async fn body(
    State(admin): State<Admin>,
    Path((id, side)): Path<(String, SideWord)>,
) -> Result<Response, ErrorPage> {
    let side = match side {
        SideWord::Request => Side::Request,
        SideWord::Response => Side::Response,
    };
    let located = locate(&admin, &id).await?;
    let id = &located.view.id;
    let not_captured = || {
        ErrorPage::not_found(format!(
            "This body of request {id} was not captured: capture was off, or there was no body."
        ))
    };
    let body = admin
        .read_body(&located, side)
        .await?
        .ok_or_else(not_captured)?;
    let disposition = format!("attachment; filename=\"{id}-{}.bin\"", side.as_str());
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_DISPOSITION, disposition),
    ];
    Ok((headers, body.bytes).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_times_become_rfc_3339() {
        for (typed, expected) in [
            ("2026-11-21", "2026-11-21T00:00:00Z"),
            ("2026-11-21T04:15", "2026-11-21T04:15:00Z"),
            ("2026-11-21 04:15:32", "2026-11-21T04:15:32Z"),
            ("2026-11-21 04:15:32.123", "2026-11-21T04:15:32.123Z"),
            ("2026-11-21T04:15:32Z", "2026-11-21T04:15:32Z"),
            ("2026-11-21T04:15:32+02:00", "2026-11-21T04:15:32+02:00"),
        ] {
            assert_eq!(as_rfc_3339(typed.to_owned()), expected);
        }
        assert_eq!(
            short_time("2026-11-21T04:15:32.123Z"),
            "2026-11-21 04:15:32.123"
        );
    }

    #[test]
    fn the_next_page_keeps_the_search_filters() {
        let form = Form::default()
            .with("status", "5xx")
            .with("path_prefix", "/a b&c")
            .with("cursor", "old")
            .with("x", "y");
        assert_eq!(
            form.address("/requests", &FILTERS, "c=1"),
            "/requests?status=5xx&path_prefix=%2Fa+b%26c&cursor=c%3D1"
        );
    }
}
