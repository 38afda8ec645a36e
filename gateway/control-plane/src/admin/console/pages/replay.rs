//! Replay of a captured request, unchanged or edited.

use std::collections::{BTreeMap, BTreeSet};

use askama::Template;
use axum::Extension;
use axum::extract::{Path, State};
use axum::http::{HeaderName, HeaderValue, Method};
use axum::response::{IntoResponse, Redirect, Response};
use gw_interface::replay::REPLAY_FRAMING;
use gw_shared::id::RequestId;
use gw_telemetry::request_log::{BodyView, RequestView, Side};

use super::requests::{locate, target};
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::format;
use crate::admin::console::web::forms::body;
use crate::admin::console::web::forms::body::BodyKind;
use crate::admin::console::web::forms::form::Form;
use crate::admin::console::web::page::{Chrome, Crumb, Section, Visit, crumb, render_form};
use crate::admin::{Admin, NoResult};
use crate::control::{ControlError, ReplayEdits, ReplayField, not_captured};

#[derive(Template)]
#[template(path = "replay.html")]
struct ReplayPage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    recorded: Recorded,
    form: Form,
    preview: Option<Preview>,
}

/// The request that the form would send.
struct Preview {
    method: String,
    target: String,
    headers: Vec<(String, String)>,
    /// Whether the body is edited or as recorded, and its size.
    body: String,
    /// The body if it is text.
    text: String,
}

/// A captured request. Edits contain only what the form changes; the rest is sent as recorded, byte
/// for byte.
#[derive(Default)]
struct Recorded {
    id: String,
    method: String,
    target: String,
    headers: Vec<(String, String)>,
    /// Captured bytes of the body.
    bytes: u64,
    /// Whether only the beginning of the body was captured.
    is_cut_off: bool,
    /// The body if it is complete text, which can be edited.
    text: Option<String>,
}

impl Recorded {
    fn new(request: RequestView, body: Option<BodyView>) -> Result<Self, ControlError> {
        let target = target(&request);
        let Some(captured) = request.captured_request else {
            return Err(not_captured(&request.id));
        };
        let body = body.filter(|body| !body.truncated);
        let body = body.filter(|body| {
            matches!(
                body::show(body).kind,
                BodyKind::Empty | BodyKind::Text | BodyKind::Json
            )
        });
        Ok(Self {
            id: request.id,
            method: request.method,
            target,
            headers: captured.headers,
            bytes: captured.bytes,
            is_cut_off: captured.truncated,
            text: body.and_then(|body| String::from_utf8(body.bytes).ok()),
        })
    }

    /// The request with the edits applied.
    fn preview(&self, edits: &ReplayEdits) -> Preview {
        let mut headers: Vec<(String, String)> = match &edits.headers {
            Some(all) => all
                .iter()
                .map(|field| (field.name.clone(), field.value.clone()))
                .collect(),
            None => {
                let is_set = |name: &str| {
                    edits
                        .set_headers
                        .keys()
                        .any(|set| set.eq_ignore_ascii_case(name))
                };
                let kept = self
                    .headers
                    .iter()
                    .filter(|(name, _)| !is_set(name))
                    .cloned();
                let set = edits
                    .set_headers
                    .iter()
                    .filter_map(|(name, value)| Some((name.clone(), value.clone()?)));
                kept.chain(set).collect()
            }
        };
        let (source, length, text) = match (&edits.body, &self.text) {
            (Some(edited), _) => ("edited", edited.len() as u64, edited.clone()),
            (None, text) => ("as recorded", self.bytes, text.clone().unwrap_or_default()),
        };
        // Framing fields follow from the body.
        let is_framing = |name: &str| {
            REPLAY_FRAMING
                .iter()
                .any(|framing| framing.as_str().eq_ignore_ascii_case(name))
        };
        headers.retain(|(name, _)| !is_framing(name));
        if length > 0 {
            headers.push(("content-length".to_owned(), length.to_string()));
        }
        let body = format!("{source}, {}", format::bytes(length));
        Preview {
            method: edits.method.clone().unwrap_or_else(|| self.method.clone()),
            target: edits.target.clone().unwrap_or_else(|| self.target.clone()),
            headers,
            body,
            text,
        }
    }

    fn form(&self) -> Form {
        let headers: Vec<String> = self
            .headers
            .iter()
            .map(|(name, value)| format!("{name}: {value}"))
            .collect();
        Form::default()
            .with("method", &self.method)
            .with("target", &self.target)
            .with("headers", headers.join("\n"))
            .with(
                "body_from",
                if self.is_cut_off || self.bytes == 0 {
                    "text"
                } else {
                    "recorded"
                },
            )
            .with("body", self.text.clone().unwrap_or_default())
    }
}

pub(crate) async fn form(
    State(admin): State<Admin>,
    visit: Visit,
    Path(id): Path<String>,
) -> Result<Response, ErrorPage> {
    let recorded = recorded(&admin, &id, true).await?;
    let form = recorded.form();
    page(visit, recorded, form, None)
}

/// Reads a captured request. If the body is shown, the read is recorded in the audit log.
async fn recorded(admin: &Admin, id: &str, is_shown: bool) -> Result<Recorded, ErrorPage> {
    let located = locate(admin, id).await?;
    let body = if is_shown {
        admin.read_body(&located, Side::Request).await?
    } else {
        admin.recorded_body(&located, Side::Request).await?
    };
    admin.look(move |_| Recorded::new(located.view, body)).await
}

fn page(
    visit: Visit,
    recorded: Recorded,
    form: Form,
    preview: Option<Preview>,
) -> Result<Response, ErrorPage> {
    let chrome = visit.chrome(Section::Requests, "Replay");
    let crumbs = vec![
        crumb("Requests", "/requests"),
        crumb(recorded.id.as_str(), format!("/requests/{}", recorded.id)),
    ];
    let page = ReplayPage {
        chrome,
        crumbs,
        recorded,
        form,
        preview,
    };
    render_form(page, |page| (&mut page.chrome, &page.form))
}

pub(crate) async fn replay(
    State(admin): State<Admin>,
    visit: Visit,
    Path(id): Path<String>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    let is_preview = form.has("action", "preview");
    let recorded = recorded(&admin, &id, is_preview).await?;
    let id: RequestId = recorded.id.parse().map_err(|_| ErrorPage::broken())?;
    let edits = edits(&mut form, &recorded);
    if edits.body.is_some() {
        // Select the edited body when the form is shown again.
        form.set("body_from", "text");
    }
    if is_preview && !form.is_refused() {
        let preview = recorded.preview(&edits);
        return page(visit, recorded, form, Some(preview));
    }
    if !form.is_refused() {
        match admin.replay(id, edits).await {
            Ok(new) => {
                return Ok(
                    Redirect::to(&format!("/requests/{}?note=replayed", new.id)).into_response()
                );
            }
            Err(NoResult::Refused(error)) => form.refused_by(error)?,
            Err(NoResult::Panicked(panicked)) => return Err(panicked.into()),
        }
    }
    page(visit, recorded, form, None)
}

/// The differences between the form and the recorded request. Errors are added to the form.
fn edits(form: &mut Form, recorded: &Recorded) -> ReplayEdits {
    let method = changed(form.value("method"), &recorded.method);
    if method
        .as_ref()
        .is_some_and(|method| Method::from_bytes(method.as_bytes()).is_err())
    {
        form.refuse("method", "must be a method such as GET");
    }
    let target = changed(form.value("target"), &recorded.target);
    let is_target = |target: &String| {
        target == "*"
            || target.starts_with('/') && target.bytes().all(|byte| byte.is_ascii_graphic())
    };
    if !target.as_ref().is_none_or(is_target) {
        form.refuse(
            "target",
            "must be a path with an optional query, percent-encoded: /search?q=a%20b",
        );
    }
    let (headers, set_headers) = header_edits(form, &recorded.headers);
    let body = chosen_body(form, recorded);
    ReplayEdits {
        method,
        target,
        headers,
        set_headers,
        body,
        ..ReplayEdits::default()
    }
}

fn changed(typed: &str, recorded: &str) -> Option<String> {
    Some(typed.trim())
        .filter(|typed| *typed != recorded)
        .map(str::to_owned)
}

/// Edits of single fields by name, or the whole list of fields if a changed name occurs more than
/// once.
fn header_edits(
    form: &mut Form,
    recorded: &[(String, String)],
) -> (Option<Vec<ReplayField>>, BTreeMap<String, Option<String>>) {
    let lines = form.value("headers").to_owned();
    let mut typed = Vec::new();
    for line in lines.lines().filter(|line| !line.trim().is_empty()) {
        match line
            .split_once(':')
            .map(|(name, value)| (name.trim(), value.trim()))
        {
            Some((name, value)) if HeaderName::from_bytes(name.as_bytes()).is_ok() => {
                typed.push((name, value));
            }
            _ => {
                let line: String = line.chars().take(60).collect();
                form.refuse(
                    "headers",
                    format!("not a line such as \u{201c}accept: text/plain\u{201d}: {line}"),
                );
            }
        }
    }
    let recorded: Vec<_> = recorded
        .iter()
        .map(|(name, value)| (name.as_str(), value.trim()))
        .collect();
    let names: BTreeSet<String> = typed
        .iter()
        .chain(&recorded)
        .map(|(name, _)| name.to_ascii_lowercase())
        .collect();
    let changed: Vec<(String, Vec<&str>)> = names
        .into_iter()
        .map(|name| (values_of(&typed, &name), values_of(&recorded, &name), name))
        .filter(|(typed, recorded, _)| typed != recorded)
        .map(|(typed, _, name)| (name, typed))
        .collect();
    let mut all = None;
    let mut single = BTreeMap::new();
    if changed.iter().all(|(_, values)| values.len() <= 1) {
        let value = |values: &[&str]| values.first().map(|value| (*value).to_owned());
        single = changed
            .iter()
            .map(|(name, values)| (name.clone(), value(values)))
            .collect();
        typed.retain(|(name, _)| single.contains_key(&name.to_ascii_lowercase()));
    } else {
        let field = |(name, value): &(&str, &str)| ReplayField {
            name: (*name).to_owned(),
            value: (*value).to_owned(),
        };
        all = Some(typed.iter().map(field).collect());
    }
    // U+FFFD stands for bytes that are not text, so such a value is not the recorded one.
    let cannot_be_sent =
        |value: &str| value.contains('\u{fffd}') || HeaderValue::from_str(value).is_err();
    if let Some((name, _)) = typed.iter().find(|(_, value)| cannot_be_sent(value)) {
        form.refuse(
            "headers",
            format!(
                "the value of {name} has bytes that are not text; it can only be sent unchanged"
            ),
        );
    }
    (all, single)
}

fn values_of<'a>(fields: &[(&str, &'a str)], name: &str) -> Vec<&'a str> {
    fields
        .iter()
        .filter(|(other, _)| other.eq_ignore_ascii_case(name))
        .map(|(_, value)| *value)
        .collect()
}

/// The text to send as the body, or `None` for the recorded body. An edited text is sent regardless
/// of the selection, because without scripts editing selects nothing.
fn chosen_body(form: &Form, recorded: &Recorded) -> Option<String> {
    if !form.is_sent("body") {
        return None;
    }
    let text = form.value("body");
    let is_recorded =
        form.value("body_from") == "recorded" && text.is_empty() && recorded.text.is_none();
    if is_recorded {
        None
    } else {
        body_edit(text, recorded.text.as_deref())
    }
}

/// The edited text of a body, or `None` if only line breaks differ. Browsers submit every line
/// break of a text area as CRLF (HTML, "constructing the entry list"), so line breaks are converted
/// to the kind in the recorded text.
fn body_edit(sent: &str, recorded: Option<&str>) -> Option<String> {
    let unified = |text: &str| text.replace("\r\n", "\n").replace('\r', "\n");
    let sent = unified(sent);
    if recorded.is_some_and(|recorded| unified(recorded) == sent) {
        return None;
    }
    let pairs = |text: &str| text.matches("\r\n").count();
    let only_pairs =
        |text: &&str| pairs(text) > 0 && text.matches(['\r', '\n']).count() == 2 * pairs(text);
    Some(if recorded.filter(only_pairs).is_some() {
        sent.replace('\n', "\r\n")
    } else {
        sent
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(text: &str) -> Recorded {
        let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        Recorded {
            method: "OPTIONS".to_owned(),
            target: "*".to_owned(),
            headers: vec![
                header("accept", "a"),
                header("accept", "b"),
                header("x-bytes", "\u{fffd}"),
                header("x", "1"),
            ],
            text: Some(text.to_owned()),
            ..Recorded::default()
        }
    }

    fn form(method: &str, target: &str, headers: &str, body: &str) -> Form {
        let form = Form::default()
            .with("method", method)
            .with("target", target)
            .with("headers", headers);
        form.with("body_from", "text").with("body", body)
    }

    #[test]
    fn changed_fields_become_edits_or_errors_of_the_field() {
        let fields = "accept: a\r\naccept: b\r\n\r\nX-Bytes: \u{fffd}\r\nX: 2\r\ny:3";
        let mut typed = form("PUT", " /a?b ", fields, "x\r\ny");
        let made = edits(&mut typed, &recorded(""));
        assert!(!typed.is_refused(), "{:?}", typed.error("headers"));
        assert_eq!(
            (made.method.as_deref(), made.target.as_deref()),
            (Some("PUT"), Some("/a?b"))
        );
        assert_eq!((made.body.as_deref(), made.headers), (Some("x\ny"), None));
        let single =
            [("x", "2"), ("y", "3")].map(|(name, value)| (name.to_owned(), Some(value.to_owned())));
        assert_eq!(made.set_headers, single.into());

        // Several fields of one name can only be sent with the whole list.
        let mut typed = form("PUT", "*", "Accept: a\naccept: c\nx: 1", "");
        let made = edits(&mut typed, &recorded(""));
        let all = [("Accept", "a"), ("accept", "c"), ("x", "1")];
        let all = all.map(|(name, value)| ReplayField {
            name: name.to_owned(),
            value: value.to_owned(),
        });
        assert_eq!(
            (made.headers.as_deref(), made.set_headers.len()),
            (Some(all.as_slice()), 0)
        );
        let made = edits(&mut form("PUT", "*", "x: 1", ""), &recorded(""));
        let gone = ["accept", "x-bytes"].map(|name| (name.to_owned(), None));
        assert_eq!((made.headers, made.set_headers), (None, gone.into()));

        let mut typed = form("P T", "a", "no colon", "");
        edits(&mut typed, &recorded(""));
        assert!(
            ["method", "target", "headers"]
                .iter()
                .all(|field| typed.error(field).is_some())
        );
        let mut typed = form("PUT", "/ü", "x-bytes: \u{fffd}!", "");
        edits(&mut typed, &recorded(""));
        assert!(
            ["target", "headers"]
                .iter()
                .all(|field| typed.error(field).is_some())
        );
    }

    #[test]
    fn an_unchanged_form_makes_no_edits() {
        for text in ["", "a", "a\r\nb", "a\nb\r\n\r"] {
            let recorded = recorded(text);
            let body = text.replace("\r\n", "\n").replace('\r', "\n");
            let mut typed = form("OPTIONS", "*", recorded.form().value("headers"), &body);
            let made = edits(&mut typed, &recorded);
            assert!(!typed.is_refused());
            assert_eq!(
                (made.method, made.target, made.headers, made.body),
                (None, None, None, None),
                "{text:?}"
            );
            assert!(made.set_headers.is_empty());
        }
    }

    #[test]
    fn an_edited_text_is_sent_regardless_of_the_selection() {
        let body = |recorded: &Recorded, from: &str, text: Option<&str>| {
            let typed = Form::default().with("body_from", from);
            let mut typed = match text {
                Some(text) => typed.with("body", text),
                None => typed,
            };
            edits(&mut typed, recorded).body
        };
        let text = recorded("a\r\nb");
        for from in ["recorded", "text"] {
            assert_eq!(
                body(&text, from, Some("a\r\nc")).as_deref(),
                Some("a\r\nc"),
                "{from}"
            );
            assert_eq!(body(&text, from, Some("")).as_deref(), Some(""), "{from}");
            assert_eq!(body(&text, from, Some("a\nb")), None, "{from}");
            assert_eq!(body(&text, from, None), None, "{from}");
        }
        let binary = Recorded {
            text: None,
            bytes: 9,
            ..recorded("")
        };
        assert_eq!(body(&binary, "recorded", Some("")), None);
        assert_eq!(body(&binary, "recorded", Some("x")).as_deref(), Some("x"));
        assert_eq!(body(&binary, "text", Some("")).as_deref(), Some(""));
    }

    #[test]
    fn the_preview_matches_the_request_that_is_sent() {
        let recorded = Recorded {
            bytes: 3,
            ..recorded("abc")
        };
        let mut typed = form(
            "PUT",
            "*",
            "accept: a\naccept: b\nx-bytes: \u{fffd}\ny: 2",
            "abc",
        );
        let preview = recorded.preview(&edits(&mut typed, &recorded));
        assert_eq!(
            (preview.method.as_str(), preview.target.as_str()),
            ("PUT", "*")
        );
        let fields: Vec<_> = preview
            .headers
            .iter()
            .map(|(name, value)| format!("{name}: {value}"))
            .collect();
        assert_eq!(
            fields,
            [
                "accept: a",
                "accept: b",
                "x-bytes: \u{fffd}",
                "y: 2",
                "content-length: 3"
            ]
        );
        assert_eq!(
            (preview.body.as_str(), preview.text.as_str()),
            ("as recorded, 3 B", "abc")
        );
        let mut typed = form(
            "OPTIONS",
            "/x",
            "accept: c\naccept: d\nContent-Length: 9",
            "abcd",
        )
        .with("body_from", "recorded");
        let preview = recorded.preview(&edits(&mut typed, &recorded));
        assert_eq!(
            (
                preview.headers.len(),
                preview.body.as_str(),
                preview.text.as_str()
            ),
            (3, "edited, 4 B", "abcd")
        );
        assert_eq!(
            preview.headers[2],
            ("content-length".to_owned(), "4".to_owned())
        );
    }

    #[test]
    fn line_breaks_are_converted_to_the_recorded_kind() {
        for (recorded, sent, made) in [
            (Some("a\r\nb"), "a\r\nc\r\n", "a\r\nc\r\n"),
            (Some("a\nb"), "a\r\nc", "a\nc"),
            (Some("a\r\nb\n"), "a\r\nc", "a\nc"),
            (Some("a"), "a\r\nc", "a\nc"),
            (None, "a\r\nc", "a\nc"),
        ] {
            assert_eq!(
                body_edit(sent, recorded).as_deref(),
                Some(made),
                "{recorded:?}"
            );
        }
    }
}
