//! The changes of a plan, made one after another through the API.

use std::io::Write;

use gw_shared::command;
use gw_shared::text::escaped;
use http::Method;
use serde_json::{Map, Value, json};

use super::object::ObjectKind;
use super::percent_encoded;
use super::plan::{Operation, Plan, PlannedChange};
use super::secrets::{SecretFile, SecretsTo};
use super::show::plan_json;
use crate::cli::client::api::{ApiError, ApiReply};
use crate::cli::client::output::{CommandError, Output};

/// Most changes that are listed after a failure, of those that are made and of those that are not.
const LISTED_MAX: usize = 100;

/// A plan that is made.
pub(super) struct Applying<'a> {
    pub(super) plan: &'a Plan,
    /// Names of all documents.
    pub(super) documents: String,
    pub(super) revision: Option<String>,
    pub(super) secrets: SecretsTo,
}

/// Further members of a change that is made, for programs.
type Made = Map<String, Value>;

impl Applying<'_> {
    /// Makes the changes in order, stops at the first failure, and prints the changes that are
    /// made.
    pub(super) fn run(&self, output: &mut Output) -> Result<(), CommandError> {
        let mut made = Vec::new();
        let result = self.make_all(output, &mut made);
        let number = made.len();
        if output.json {
            let mut made = made.into_iter();
            let json = plan_json(self.plan, &mut |_| {
                made.next()
                    .unwrap_or_else(|| Made::from_iter([("made".to_owned(), false.into())]))
            });
            output.print_json(&json.to_string())?;
        }
        result.map_err(|error| self.stopped(number, error))?;
        if output.json {
            return Ok(());
        }
        let plural = if number == 1 { "change" } else { "changes" };
        output.write(|out| writeln!(out, "Made {number} {plural}."))
    }

    fn make_all(&self, output: &mut Output, made: &mut Vec<Made>) -> Result<(), CommandError> {
        for change in &self.plan.changes {
            let file = change.place.as_ref().map(|place| &*place.file);
            let file = file.unwrap_or(&self.documents);
            let file = percent_encoded(file, |character| {
                !matches!(character, ' '..='~') || character == '%'
            });
            output
                .api
                .name_document(file.trim(), self.revision.as_deref());
            if change.operation == Operation::Create && change.id.kind.has_secret() {
                self.create_with_secret(output, change, made)?;
            } else {
                send(output, change)?;
                made.push(is_made());
            }
        }
        Ok(())
    }

    fn create_with_secret(
        &self,
        output: &mut Output,
        change: &PlannedChange,
        made: &mut Vec<Made>,
    ) -> Result<(), CommandError> {
        let file = match &self.secrets {
            SecretsTo::Folder(folder) => {
                Some(SecretFile::create(folder, &change.id).map_err(CommandError::Secret)?)
            }
            SecretsTo::Output => None,
        };
        let reply = match send(output, change) {
            Ok(reply) => reply,
            Err(error) => {
                remove(file);
                return Err(error.into());
            }
        };
        let mut more = is_made();
        let kept = keep(change, &reply, file, &mut more);
        made.push(more);
        match kept? {
            Some(line) if !output.json => output.write(|out| writeln!(out, "{}", escaped(&line))),
            _ => Ok(()),
        }
    }

    /// The error of a plan of which only the first `number` changes are made.
    fn stopped(&self, number: usize, error: CommandError) -> CommandError {
        let (made, missing) = self.plan.changes.split_at(number);
        let list = |state: &str, changes: &[PlannedChange]| {
            let listed = changes.iter().take(LISTED_MAX);
            let mut lines: String = listed
                .map(|change| format!("\n  {state}: {} {}", change.operation.word(), change.id))
                .collect();
            if changes.len() > LISTED_MAX {
                lines += &format!("\n  {state}: {} more", changes.len() - LISTED_MAX);
            }
            lines
        };
        CommandError::Stopped {
            at: missing
                .first()
                .map_or_else(String::new, |change| format!("{}: ", change.id)),
            error: Box::new(error),
            changes: list("made", made) + &list("not made", missing),
        }
    }
}

/// Keeps the secret in `reply`: in the file, or else in `more` and the line that is returned.
fn keep(
    change: &PlannedChange,
    reply: &ApiReply,
    file: Option<SecretFile>,
    more: &mut Made,
) -> Result<Option<String>, CommandError> {
    let view: Map<String, Value> = reply.parse()?;
    let text = |member: &str| view.get(member).and_then(Value::as_str);
    let id = text(change.id.kind.id_member()).unwrap_or_default();
    more.insert("id".to_owned(), id.into());
    let name = &change.id;
    let kind = name.kind.table();
    let rotate = format!("`gw-gateway {kind} rotate-secret {} {id}`", name.account);
    let secret = match name.kind {
        ObjectKind::Key => text("service_key"),
        _ => text("client_secret"),
    };
    let Some(secret) = secret else {
        remove(file);
        command::note(
            "gw-gateway",
            format_args!(
                "another client has created {name} meanwhile and has its secret; {rotate} makes a \
                 new one"
            ),
        );
        return Ok(None);
    };
    let Some(file) = file else {
        more.insert("secret".to_owned(), secret.into());
        return Ok(Some(format!("{name}: id {id}, secret {secret}")));
    };
    let path = file.write(secret).map_err(|error| {
        CommandError::Secret(format!("{name}: {error}; {rotate} makes a new secret"))
    })?;
    let path = path.to_string_lossy();
    more.insert("secret_file".to_owned(), json!(path));
    Ok(Some(format!("{name}: id {id}, secret in {path}")))
}

fn is_made() -> Made {
    Made::from_iter([("made".to_owned(), true.into())])
}

fn send(output: &Output, change: &PlannedChange) -> Result<ApiReply, ApiError> {
    let method = change.method.clone();
    if method == Method::DELETE {
        return output.api.request(method, &change.path);
    }
    let body = Value::Object(change.body.clone());
    output.api.request_with(method, &change.path, &body)
}

/// Removes a file that has got no secret.
fn remove(file: Option<SecretFile>) {
    if let Some(Err(error)) = file.map(SecretFile::remove) {
        command::note("gw-gateway", format_args!("an empty file stays: {error}"));
    }
}
