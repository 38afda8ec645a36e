//! Fields of a request that name the document that it applies. The entry of the change in the audit
//! log has them.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use utoipa::IntoParams;

use crate::admin::problem::Problem;
use crate::control::{Actor, AppliedDocument, ControlError};

const FILE: &str = "X-Gw-Applied-File";
const FILE_LENGTH_MAX: usize = 200;
const REVISION: &str = "X-Gw-Applied-Revision";
const REVISION_LENGTH_MAX: usize = 100;

/// The fields, for the description of requests.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "describes, is never made")]
pub(crate) struct AppliedDocumentFields {
    /// Path of the document that the request applies.
    #[param(
        rename = "X-Gw-Applied-File",
        min_length = 1,
        max_length = 200,
        pattern = "^[!-~]([ -~]*[!-~])?$"
    )]
    file: Option<String>,
    /// Revision of that document, such as a commit.
    #[param(
        rename = "X-Gw-Applied-Revision",
        min_length = 1,
        max_length = 100,
        pattern = "^[!-~]([ -~]*[!-~])?$"
    )]
    revision: Option<String>,
}

/// The holder of the admin token, as the originator of a change.
pub(crate) struct By(pub(crate) Actor);

impl<S: Sync> FromRequestParts<S> for By {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let file = field(parts, FILE, FILE_LENGTH_MAX)?;
        let revision = field(parts, REVISION, REVISION_LENGTH_MAX)?;
        Ok(Self(match (file, revision) {
            (None, None) => Actor::Admin,
            (file, revision) => Actor::Document(AppliedDocument { file, revision }),
        }))
    }
}

/// The text of a field: printable ASCII. HTTP takes spaces off its ends.
fn field(
    parts: &Parts,
    name: &'static str,
    length_max: usize,
) -> Result<Option<String>, ControlError> {
    let Some(value) = parts.headers.get(name) else {
        return Ok(None);
    };
    match value.to_str() {
        Ok(text) if (1..=length_max).contains(&text.len()) && !text.contains('\t') => {
            Ok(Some(text.to_owned()))
        }
        _ => Err(ControlError::invalid(
            name,
            format!("must have 1 to {length_max} characters of printable ASCII"),
        )),
    }
}
