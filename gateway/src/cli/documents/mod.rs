//! `gw-gateway apply`, `diff` and `export`: accounts, services, own domains, credentials, keys and
//! settings of agents as TOML documents.
//!
//! Documents are read and checked as a whole, then compared with what the gateway has. The plan
//! that results is pure data; it is printed, or made change by change through the API.

mod existing;
mod export;
mod make;
mod object;
mod parse;
mod plan;
mod read;
mod secrets;
mod show;

use std::collections::BTreeSet;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::PathBuf;

use clap::Args;
use gw_shared::command::Failure;
use gw_shared::id::ManagerName;
use serde_json::Map;

pub(crate) use self::export::ExportArguments;

use self::existing::GatewayObjects;
use self::make::Applying;
use self::object::ObjectId;
use self::parse::Mistake;
use self::plan::{Operation, Plan, Rules, plan};
use self::secrets::SecretsTo;
use self::show::{plan_json, write_plan};
use super::client::output::{CommandError, Output};
use super::ended;

/// Most mistakes that are listed.
const LISTED_MAX: usize = 100;
/// Longest text of `--revision`, in characters.
const REVISION_LENGTH_MAX: usize = 100;

/// Documents, and how they are compared with the gateway.
#[derive(Args)]
struct DocumentOptions {
    /// A document, a folder with documents (.toml), or - for standard input; repeat for each.
    #[arg(short, long = "file", value_name = "FILE|DIR", required = true)]
    files: Vec<PathBuf>,
    /// Label of the objects of documents without managed_by.
    #[arg(long, value_name = "NAME")]
    managed_by: Option<ManagerName>,
    /// Also delete objects that have the label of the documents and that no document declares.
    #[arg(long)]
    prune: bool,
    /// Also change objects that have another label: they get that of the documents.
    #[arg(long)]
    take_over: bool,
}

#[derive(Args)]
pub(crate) struct DiffArguments {
    #[command(flatten)]
    documents: DocumentOptions,
}

#[derive(Args)]
pub(crate) struct ApplyArguments {
    #[command(flatten)]
    documents: DocumentOptions,
    /// Print the changes and make none.
    #[arg(long)]
    dry_run: bool,
    /// Revision of the documents, such as a commit, for the audit log.
    #[arg(long, value_name = "REVISION", value_parser = revision)]
    revision: Option<String>,
    /// Write the secrets of new credentials and keys to this folder, each to a new file.
    #[arg(long, value_name = "DIR")]
    secrets_dir: Option<PathBuf>,
    /// Print the secrets of new credentials and keys. The default on a terminal without --json.
    #[arg(long, conflicts_with = "secrets_dir")]
    print_secrets: bool,
    /// Do not ask before objects are deleted.
    #[arg(long, requires = "prune")]
    yes: bool,
}

fn revision(text: &str) -> Result<String, String> {
    let is_printable = text.trim() == text && text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    if is_printable && (1..=REVISION_LENGTH_MAX).contains(&text.len()) {
        Ok(text.to_owned())
    } else {
        Err(format!(
            "a revision has 1 to {REVISION_LENGTH_MAX} characters of printable ASCII"
        ))
    }
}

/// The text with `%` and two digits for each byte of characters that are `replaced`.
fn percent_encoded(text: &str, replaced: impl Fn(char) -> bool) -> String {
    let mut encoded = String::with_capacity(text.len());
    for character in text.chars() {
        if replaced(character) {
            let mut bytes = [0; 4];
            let bytes = character.encode_utf8(&mut bytes).bytes();
            encoded.extend(bytes.map(|byte| format!("%{byte:02X}")));
        } else {
            encoded.push(character);
        }
    }
    encoded
}

impl DocumentOptions {
    /// Compares the documents with the gateway. The error lists every mistake.
    fn plan(&self, output: &Output) -> Result<Plan, CommandError> {
        let mut mistakes = Vec::new();
        let label = self.managed_by.as_ref().map(ManagerName::as_str);
        let documents = read::read(&self.files, label, &mut mistakes);
        if self.prune && documents.managers.is_empty() {
            mistakes.push(Mistake {
                place: None,
                message: "--prune deletes objects with the label of the documents, which have \
                          none; give them managed_by, or add --managed-by NAME"
                    .to_owned(),
            });
        }
        refuse(&mut mistakes)?;
        let objects = documents.objects.iter();
        let named: BTreeSet<&str> = objects.map(|it| it.id.account.as_str()).collect();
        let existing =
            GatewayObjects::read(&output.api, |account| self.prune || named.contains(account))?;
        let rules = Rules {
            prune: self.prune,
            take_over: self.take_over,
        };
        let plan = plan(&documents, &existing, rules, &mut mistakes);
        refuse(&mut mistakes)?;
        Ok(plan)
    }

    /// The documents in entries of the audit log about deletions, which no document declares.
    fn names(&self) -> String {
        let names = self.files.iter().map(|path| path.to_string_lossy());
        names.collect::<Vec<_>>().join(", ")
    }
}

/// Fails if there are mistakes.
fn refuse(mistakes: &mut [Mistake]) -> Result<(), CommandError> {
    if mistakes.is_empty() {
        return Ok(());
    }
    mistakes.sort();
    let number = mistakes.len();
    let plural = if number == 1 { "mistake" } else { "mistakes" };
    let mut message = format!("{number} {plural} in the documents; nothing was changed:");
    for mistake in mistakes.iter().take(LISTED_MAX) {
        message += &format!("\n  {mistake}");
    }
    if number > LISTED_MAX {
        message += &format!("\n  and {} more", number - LISTED_MAX);
    }
    Err(CommandError::Documents(message))
}

impl DiffArguments {
    /// Exit code 0 if nothing differs, 1 if something does, 2 if that cannot be said.
    pub(crate) fn run(self, output: &mut Output) -> Result<(), Failure> {
        let usage = |failure: Failure| Failure::Usage(failure.message().to_owned());
        let plan = match self.documents.plan(output) {
            Ok(plan) => plan,
            Err(error) => return ended(Err(error)).map_err(usage),
        };
        ended(print(output, &plan)).map_err(usage)?;
        if plan.changes.is_empty() {
            return Ok(());
        }
        let [created, changed, deleted] = plan.counts();
        Err(Failure::Run(format!(
            "the gateway is not as the documents say: {created} objects to create, {changed} to \
             change, {deleted} to delete"
        )))
    }
}

fn print(output: &mut Output, plan: &Plan) -> Result<(), CommandError> {
    if output.json {
        let json = plan_json(plan, &mut |_| Map::new());
        return output.print_json(&json.to_string());
    }
    output.write(|out| write_plan(out, plan))
}

impl ApplyArguments {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        let plan = self.documents.plan(output)?;
        if self.dry_run || plan.changes.is_empty() {
            return print(output, &plan);
        }
        let secrets = self.secrets_to(output, &plan)?;
        if !output.json {
            print(output, &plan)?;
        }
        self.confirm(output, &plan)?;
        let applying = Applying {
            plan: &plan,
            documents: self.documents.names(),
            revision: self.revision,
            secrets,
        };
        applying.run(output)
    }

    /// Where secrets go. Fails if the plan makes some and no place is safe.
    fn secrets_to(&self, output: &Output, plan: &Plan) -> Result<SecretsTo, CommandError> {
        let creations = plan.changes.iter();
        let creations: Vec<&ObjectId> = creations
            .filter(|change| change.operation == Operation::Create && change.id.kind.has_secret())
            .map(|change| &change.id)
            .collect();
        if creations.is_empty() {
            return Ok(SecretsTo::Output);
        }
        if let Some(folder) = &self.secrets_dir {
            secrets::prepare(folder, &creations).map_err(|refused| {
                let list = refused.join("\n  ");
                CommandError::Documents(format!(
                    "secrets cannot be written; nothing was changed:\n  {list}"
                ))
            })?;
            return Ok(SecretsTo::Folder(folder.clone()));
        }
        if self.print_secrets || !output.json && io::stdout().is_terminal() {
            return Ok(SecretsTo::Output);
        }
        let number = creations.len();
        Err(CommandError::Documents(format!(
            "the secrets of new credentials and keys, {number} here, are shown only once: add \
             --secrets-dir DIR to write them to files, or --print-secrets; nothing was changed"
        )))
    }

    /// Asks before objects are deleted.
    fn confirm(&self, output: &Output, plan: &Plan) -> Result<(), CommandError> {
        let [_, _, deleted] = plan.counts();
        if deleted == 0 || self.yes {
            return Ok(());
        }
        // Not on standard output, which a program may read.
        let mut err = io::stderr().lock();
        if output.json {
            write_plan(&mut err, plan)?;
        }
        write!(
            err,
            "Type yes to make these changes and delete {deleted} objects: "
        )?;
        err.flush()?;
        let mut typed = String::new();
        io::stdin().lock().read_line(&mut typed)?;
        if typed.trim() == "yes" {
            Ok(())
        } else {
            Err(CommandError::NotApplied)
        }
    }
}
