//! Replay of captured requests.

use std::collections::BTreeMap;

use crate::limits;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use gw_base::service::hostname::tenant_label;
use gw_interface::replay::Replay;
use gw_region::owners::ownership;
use gw_shared::http::{Fields, InvalidHead};
use gw_shared::id::RequestId;
use gw_shared::telemetry::mask;
use gw_telemetry::request_log::{CapturedRequest, MessageCapture, Truncation};
use http::Method;
use http::header::{HeaderName, HeaderValue};
use http::uri::PathAndQuery;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use utoipa::ToSchema;

use super::changes::audit;
use super::records::service;
use super::{Actor, Control, ControlError};

/// Changes of a replayed request. Omitted members keep the captured values.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplayEdits {
    /// Request method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Path and query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "/orders?limit=5")]
    pub target: Option<String>,
    /// All that are sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers: Option<Vec<ReplayField>>,
    /// Fields that are set, or with null taken out; the others stay. Credentials were not kept:
    /// give them here.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub set_headers: BTreeMap<String, Option<String>>,
    /// The body, if it is text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// The body in base64, if it is not text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body_base64: Option<String>,
}

/// A header field.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplayField {
    /// Name of the field.
    pub name: String,
    /// Value of the field.
    pub value: String,
}

/// Relays a captured request again, by the normal path: rate limits apply, and the request log
/// records it. The receiver gets the id of the new request when it has ended; dropping the receiver
/// cancels the request.
pub(crate) fn start(
    control: &Control,
    actor: &Actor,
    kept: CapturedRequest,
    edits: &ReplayEdits,
) -> Result<oneshot::Receiver<RequestId>, ControlError> {
    let CapturedRequest {
        view,
        method,
        target,
        request,
    } = kept;
    let service = service::show(control, &view.account, &view.service)?;
    let is_kept = |request: &MessageCapture| request.body.truncated_by != Some(Truncation::Disk);
    let Some(request) = request.filter(is_kept) else {
        return Err(not_captured(&view.id));
    };
    let new_body = edits.new_body()?;
    if request.body.truncated && new_body.is_none() {
        return Err(ControlError::Conflict(format!(
            "only the first {} bytes of the body of request {} were captured; give a body for the \
             replay",
            request.body.bytes.len(),
            view.id
        )));
    }
    if !service.request_logging {
        return Err(ControlError::Conflict(format!(
            "request_logging of service {} is off, so the log would not record the replay; turn it \
             on first",
            view.service
        )));
    }
    let method = edits.method(method)?;
    let (target, headers) = edits.head(&target, request.headers)?;
    let checked =
        limits::REQUEST_HEAD.check(target.as_str(), method.as_str().len(), headers.iter());
    checked.map_err(|invalid| {
        let field = match invalid {
            InvalidHead::TargetTooLong(_) => "target",
            _ => "headers",
        };
        ControlError::invalid(field, invalid.to_string())
    })?;
    audit::note_replay(control, actor, &view, edits)?;
    let (reply, ended) = oneshot::channel();
    let not_found = || ControlError::not_found("service", &view.service);
    let replay = Replay {
        original: view.id.parse().map_err(ControlError::bad_id("id"))?,
        label: tenant_label(&service.account, &service.id).ok_or_else(not_found)?,
        hostname: service.hostname.parse().map_err(|_| not_found())?,
        method,
        target,
        headers,
        body: new_body.unwrap_or(request.body.bytes),
        caller: view
            .caller_address
            .parse()
            .map_err(|_| ControlError::invalid("caller_address", "must be an IP address"))?,
        reply,
    };
    let owner = ownership::owner(&service.hostname, control.workers.count());
    let posted = control.workers.replay(owner, Box::new(replay));
    posted.map_err(|_| {
        ControlError::Conflict("the gateway is overloaded or stopping; try again".to_owned())
    })?;
    Ok(ended)
}

/// The error for a request whose log record has no captured message.
pub(crate) fn not_captured(id: &str) -> ControlError {
    let message = format!(
        "request {id} was not captured: capture_request_body was off, the request was not relayed, \
         or its account had used its share of the disk"
    );
    ControlError::Conflict(message)
}

impl ReplayEdits {
    /// The method of the replay of a request with the method `captured`.
    fn method(&self, captured: Method) -> Result<Method, ControlError> {
        let method = match &self.method {
            None => captured,
            Some(method) => method
                .parse()
                .map_err(|_| ControlError::invalid("method", "must be a method such as POST"))?,
        };
        if method == Method::CONNECT {
            return Err(ControlError::invalid(
                "method",
                "must not be CONNECT, which opens a tunnel",
            ));
        }
        Ok(method)
    }

    fn new_body(&self) -> Result<Option<Bytes>, ControlError> {
        match (&self.body, &self.body_base64) {
            (None, None) => Ok(None),
            (Some(text), None) => Ok(Some(Bytes::from(text.clone()))),
            (None, Some(encoded)) => {
                let decoded = STANDARD.decode(encoded);
                decoded.map(|body| Some(body.into())).map_err(|_| {
                    ControlError::invalid(
                        "body_base64",
                        "must be base64 with padding (RFC 4648 §4)",
                    )
                })
            }
            (Some(_), Some(_)) => Err(ControlError::invalid(
                "body_base64",
                "must not be given together with body",
            )),
        }
    }

    /// The target and fields to send. A value that was masked in the log must be given in the
    /// edits, because the original is not stored.
    fn head(&self, target: &str, kept: Fields) -> Result<(PathAndQuery, Fields), ControlError> {
        let masked = |name: &str| {
            ControlError::Conflict(format!(
                "a secret in {name} was masked when the request was captured; give {name} for the \
                 replay"
            ))
        };
        if self.target.is_none() && mask::is_masked(target.as_bytes()) {
            return Err(masked("the target"));
        }
        if self.headers.is_none() {
            let is_edited = |name: &HeaderName| {
                self.set_headers
                    .keys()
                    .any(|set| name.as_str().eq_ignore_ascii_case(set))
            };
            let found = kept
                .iter()
                .find(|(name, value)| mask::is_masked(value.as_bytes()) && !is_edited(name));
            if let Some((name, _)) = found {
                return Err(masked(name.as_str()));
            }
        }
        Ok((
            checked_target(self.target.as_deref().unwrap_or(target))?,
            self.headers(kept)?,
        ))
    }

    fn headers(&self, kept: Fields) -> Result<Fields, ControlError> {
        let mut headers = kept;
        if let Some(all) = &self.headers {
            headers.clear();
            for ReplayField { name, value } in all {
                headers.append(
                    checked_name("headers", name)?,
                    checked_value("headers", name, value)?,
                );
            }
        }
        for (name, value) in &self.set_headers {
            let field = checked_name("set_headers", name)?;
            match value {
                Some(value) => headers.insert(field, checked_value("set_headers", name, value)?),
                None => drop(headers.remove(field)),
            }
        }
        Ok(headers)
    }
}

fn checked_target(target: &str) -> Result<PathAndQuery, ControlError> {
    // The parser of http::uri silently drops a fragment.
    let has_form = (target.starts_with('/') || target == "*") && !target.contains('#');
    let parsed = target.parse::<PathAndQuery>().ok().filter(|_| has_form);
    parsed.ok_or_else(|| {
        ControlError::invalid("target", "must be a path and query such as /orders?limit=5")
    })
}

fn checked_name(edit: &'static str, name: &str) -> Result<HeaderName, ControlError> {
    name.parse()
        .map_err(|_| ControlError::invalid(edit, format!("{name:?} is not a valid field name")))
}

fn checked_value(edit: &'static str, name: &str, value: &str) -> Result<HeaderValue, ControlError> {
    HeaderValue::from_str(value).map_err(|_| {
        ControlError::invalid(
            edit,
            format!("the value of {name} has characters that are not allowed in a field"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(&'static str, &'static str)]) -> Fields {
        let field = |(name, value): &(&'static str, &'static str)| {
            (
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            )
        };
        fields.iter().map(field).collect()
    }

    #[test]
    fn edits_replace_or_patch_headers() {
        let kept = headers(&[("accept", "*/*"), ("x-a", "1")]);
        let patch = ReplayEdits {
            set_headers: [
                ("X-A".to_owned(), None),
                ("Authorization".to_owned(), Some("Bearer x".to_owned())),
            ]
            .into(),
            ..ReplayEdits::default()
        };
        let patched = headers(&[("accept", "*/*"), ("authorization", "Bearer x")]);
        assert_eq!(patch.headers(kept.clone()).unwrap(), patched);
        let all = Some(vec![ReplayField {
            name: "X-B".to_owned(),
            value: "2".to_owned(),
        }]);
        let replaced = ReplayEdits {
            headers: all,
            ..ReplayEdits::default()
        };
        assert_eq!(replaced.headers(kept).unwrap(), headers(&[("x-b", "2")]));
    }

    #[test]
    fn invalid_edits_are_refused_by_field() {
        let refusal = |edits: ReplayEdits| edits.headers(Fields::new()).unwrap_err().to_string();
        let edits = ReplayEdits {
            headers: Some(vec![ReplayField {
                name: "a b".to_owned(),
                value: String::new(),
            }]),
            ..Default::default()
        };
        assert_eq!(refusal(edits), "headers: \"a b\" is not a valid field name");
        let edits = ReplayEdits {
            set_headers: [("a".to_owned(), Some("\n".to_owned()))].into(),
            ..Default::default()
        };
        assert_eq!(
            refusal(edits),
            "set_headers: the value of a has characters that are not allowed in a field"
        );
        for bad in ["", "orders", "http://example.com/", "/a b", "/a#b", "/?a#b"] {
            assert!(checked_target(bad).is_err(), "{bad}");
        }
        assert!(checked_target("/orders?limit=5").is_ok() && checked_target("*").is_ok());
    }

    #[test]
    fn a_body_is_given_as_text_or_base64() {
        let body = |body: Option<&str>, base64: Option<&str>| {
            let body = body.map(str::to_owned);
            let body_base64 = base64.map(str::to_owned);
            ReplayEdits {
                body,
                body_base64,
                ..ReplayEdits::default()
            }
            .new_body()
        };
        assert_eq!(body(None, None).unwrap(), None);
        assert_eq!(
            body(Some("a"), None).unwrap(),
            Some(Bytes::from_static(b"a"))
        );
        assert_eq!(
            body(None, Some("AP8=")).unwrap(),
            Some(Bytes::from_static(&[0, 255]))
        );
        assert!(body(None, Some("?")).is_err() && body(Some(""), Some("")).is_err());
    }
}
