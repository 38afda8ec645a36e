//! Making a request again, changed or not.

use askama::Template;
use axum::Extension;
use axum::extract::{Path, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Redirect, Response};
use gw_shared::id::RequestId;

use super::body::{self, Kind};
use super::data;
use super::failure::Failure;
use super::form::Form;
use super::page::{Chrome, Crumb, Section, Visit, crumb, render};
use super::requests::{not_kept, target};
use crate::admin::Admin;
use crate::control::{Control, ControlError, ReplayEdits, ReplayField};
use crate::request_log::{RequestLog, RequestView, Side};

#[derive(Template)]
#[template(path = "replay.html")]
struct ReplayPage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    request: RequestView,
    form: Form,
}

pub(super) async fn form(
    State(admin): State<Admin>,
    visit: Visit,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    let look = move |_: &Control, log: &RequestLog| {
        let Some(request) = data::request(log, &id)? else { return Ok(Err(id)) };
        let form = as_it_was(log, &request)?;
        Ok(Ok((request, form)))
    };
    let (request, form) = admin.look_with_log(look).await?.map_err(|id| not_kept(&id))?;
    page(visit, request, form)
}

fn page(visit: Visit, request: RequestView, form: Form) -> Result<Response, Failure> {
    let chrome = visit.chrome(Section::Requests, "Replay");
    let crumbs = vec![crumb("Requests", "/requests"), crumb(request.id.as_str(), format!("/requests/{}", request.id))];
    render(&ReplayPage { chrome, crumbs, request, form })
}

fn as_it_was(log: &RequestLog, request: &RequestView) -> Result<Form, ControlError> {
    let headers = request.captured_request.iter().flat_map(|captured| &captured.headers);
    let headers: Vec<String> = headers.map(|(name, value)| format!("{name}: {value}")).collect();
    let body = data::body(log, &request.id, Side::Request)?;
    let form = Form::default()
        .with("method", &request.method)
        .with("target", target(request))
        .with("headers", headers.join("\n"));
    // A text that is whole can be edited; any other body goes as it was, or another one instead.
    Ok(match body {
        Some(body) if !body.bytes.is_empty() => {
            let text = String::from_utf8(body.bytes.clone()).ok();
            let is_text = matches!(body::show(&body).kind, Kind::Text | Kind::Json);
            form.with("body_from", "recorded")
                .with("body", text.filter(|_| is_text && !body.truncated).unwrap_or_default())
        }
        _ => form.with("body_from", "text"),
    })
}

pub(super) async fn replay(
    State(admin): State<Admin>,
    visit: Visit,
    Path(id): Path<String>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, Failure> {
    let id: RequestId = id.parse().map_err(|_| not_kept(&id))?;
    let edits = edits(&mut form);
    if !form.is_refused() {
        match admin.replay(id, edits).await? {
            Ok(new) => return Ok(Redirect::to(&format!("/requests/{}?note=replayed", new.id)).into_response()),
            Err(error) => form.refused_by(error)?,
        }
    }
    let request = admin.look_with_log(move |_, log| data::request(log, &id.to_string())).await?;
    let page = page(visit, request.ok_or_else(|| not_kept(&id.to_string()))?, form)?;
    Ok((StatusCode::UNPROCESSABLE_ENTITY, page).into_response())
}

/// What the form asks for. What it says wrong is said in it.
fn edits(form: &mut Form) -> ReplayEdits {
    let method = form.value("method").trim().to_owned();
    if Method::from_bytes(method.as_bytes()).is_err() {
        form.refuse("method", "a method such as GET");
    }
    let target = form.value("target").trim().to_owned();
    if !target.starts_with('/') || target.bytes().any(|byte| !byte.is_ascii_graphic()) {
        form.refuse("target", "a path, and perhaps a query, with everything else percent-encoded: /search?q=a%20b");
    }
    let mut headers = Vec::new();
    let lines = form.value("headers").to_owned();
    for line in lines.lines().filter(|line| !line.trim().is_empty()) {
        let pair = line.split_once(':').map(|(name, value)| (name.trim(), value.trim()));
        match pair {
            Some((name, value))
                if HeaderName::from_bytes(name.as_bytes()).is_ok() && HeaderValue::from_str(value).is_ok() =>
            {
                headers.push(ReplayField { name: name.to_owned(), value: value.to_owned() });
            }
            _ => {
                let line: String = line.chars().take(60).collect();
                form.refuse("headers", format!("not a line such as \u{201c}accept: text/plain\u{201d}: {line}"));
            }
        }
    }
    let body = (!form.has("body_from", "recorded")).then(|| {
        // Browsers send every line break of a text area as two characters (HTML, "constructing the entry list").
        form.value("body").replace("\r\n", "\n")
    });
    let (method, target, headers) = (Some(method), Some(target), Some(headers));
    ReplayEdits { method, target, headers, body, ..ReplayEdits::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_typed_becomes_a_request_or_is_refused_by_field() {
        let mut form =
            Form::parse(b"method=PUT&target=%2Fa%3Fb&headers=A%3A+1%0D%0A%0D%0Ab%3A2&body_from=text&body=x%0D%0Ay");
        let made = edits(&mut form);
        assert!(!form.is_refused());
        assert_eq!((made.method.as_deref(), made.target.as_deref()), (Some("PUT"), Some("/a?b")));
        assert_eq!(made.body.as_deref(), Some("x\ny"));
        assert_eq!(
            made.headers.unwrap(),
            [("A", "1"), ("b", "2")]
                .map(|(name, value)| ReplayField { name: name.to_owned(), value: value.to_owned() })
        );
        let mut form = Form::parse(b"method=P+T&target=a&headers=no+colon&body_from=recorded");
        assert_eq!(edits(&mut form).body, None);
        assert!(["method", "target", "headers"].iter().all(|field| form.error(field).is_some()));
    }
}
