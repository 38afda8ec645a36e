//! Shared parts of the commands: requests to the API, and output for people or scripts.

use std::io::{self, IsTerminal, StdoutLock, Write};

use gw_shared::command;
use gw_shared::text::{escaped, escaped_json};
use http::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::api::{Api, ApiError, ApiReply};
use super::table;

/// Connects the API with standard output.
pub(crate) struct Output {
    pub(crate) api: Api,
    /// Print the API's JSON, one line, instead of tables.
    pub(crate) json: bool,
    out: StdoutLock<'static>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error("nothing to change; --help lists what can be changed")]
    NothingToChange,
    #[error(
        "--with-key: callers of this service cannot use a service key; add the mode service_key to \
         it"
    )]
    NoKeyMode,
    /// A command of several changes, not all of which are made.
    #[error("{error}; in place: {made}; not created: {missing}")]
    Partly {
        error: Box<CommandError>,
        made: String,
        missing: String,
    },
    #[error(
        "the audit log is not as the gateways have written it: {0} problems, listed above; compare \
         it with a backup, and find out which programs and people can write to the database"
    )]
    Tampered(u64),
    #[error(
        "the audit log could not be compared with the heads in the archive: {0}; the result above \
         is without them"
    )]
    NotCompared(String),
    #[error(
        "the next authority does not issue yet: nodes {0} do not say that they trust it; repeat \
         the command once they run, or after `gw-gateway region remove`"
    )]
    NodesLeft(String),
    #[error(
        "there is no next authority any more: another command has meanwhile ended it or the \
         earlier one; look at the result with `gw-gateway agent-ca status`"
    )]
    Overtaken,
    #[error("account {0} was not deleted: its id was not typed; repeat the command, or add --yes")]
    NotConfirmed(String),
    /// A file that an option names cannot be read.
    #[error("{0}")]
    File(String),
    /// Mistakes in documents, or in how they are applied.
    #[error("{0}")]
    Documents(String),
    #[error(
        "nothing was changed: the deletions were not confirmed; repeat the command, or add --yes"
    )]
    NotApplied,
    #[error("{0}")]
    Secret(String),
    /// Documents of which not all changes are made.
    #[error(
        "{at}{error}; the other changes are not made, and applying again goes on with \
         them:{changes}"
    )]
    Stopped {
        at: String,
        error: Box<CommandError>,
        changes: String,
    },
    #[error("{name}: {error}")]
    Input { name: String, error: io::Error },
    #[error("standard output: {0}")]
    Output(#[from] io::Error),
}

/// A view of the API that can be printed for people.
pub(crate) trait Shown: DeserializeOwned {
    /// Labels and values, the most important first.
    fn facts(&self) -> Vec<(&'static str, String)>;

    /// A remark printed after the facts.
    fn note(&self) -> Option<&'static str> {
        None
    }
}

/// A view that is also printed in lists.
pub(crate) trait Listed: Shown {
    const PLURAL: &'static str;
    /// Number of facts that are columns of the list.
    const COLUMNS: usize;
}

impl Output {
    pub(crate) fn new(api: Api, json: bool) -> Self {
        Self {
            api,
            json,
            out: io::stdout().lock(),
        }
    }

    pub(crate) fn create<T: Shown>(
        &mut self,
        path: &str,
        new: &impl Serialize,
    ) -> Result<(), CommandError> {
        let reply = self.api.request_with(Method::POST, path, &json!(new))?;
        let created = reply.created();
        self.tell(&reply, |view: T, out| {
            writeln!(
                out,
                "{}",
                if created {
                    "Created:"
                } else {
                    "Already exists, unchanged:"
                }
            )?;
            write_facts(&view, out)
        })
    }

    pub(crate) fn list<T: Listed>(
        &mut self,
        path: &str,
        filter: &[(&str, &str)],
        at_most: Option<usize>,
    ) -> Result<(), CommandError> {
        let page = self.api.list(path, filter, at_most)?;
        let missing = page.missing_nodes.clone();
        let missing_archive = page.missing_archive;
        if self.json {
            return self.print_json(&json!(page).to_string());
        }
        if page.items.is_empty() {
            self.check_filter(filter)?;
            self.print(&format!("No {}.", T::PLURAL))?;
        } else {
            let views: Vec<T> = page
                .items
                .into_iter()
                .map(serde_json::from_value)
                .collect::<Result<_, _>>()
                .map_err(ApiError::from)?;
            table::write(&mut self.out, &rows(&views))?;
            self.out.flush()?;
        }
        if !missing.is_empty() {
            let plural = T::PLURAL;
            self.print(&format!(
                "Missing: the {plural} of nodes that do not answer: {}.",
                joined(missing)
            ))?;
        }
        if missing_archive {
            self.print("Missing: the requests of lost nodes: the archive cannot be read.")?;
        }
        Ok(())
    }

    /// Fails if there is no account, or no service, of the name by which an empty list is filtered.
    fn check_filter(&self, filter: &[(&str, &str)]) -> Result<(), ApiError> {
        let value = |name: &str| filter.iter().find(|(known, _)| *known == name);
        let Some((_, account)) = value("account") else {
            return Ok(());
        };
        let path = match value("service") {
            Some((_, service)) => format!("/accounts/{account}/services/{service}"),
            None => format!("/accounts/{account}"),
        };
        match self.api.request(Method::GET, &path) {
            Err(error @ ApiError::Refused(_)) => Err(error),
            _ => Ok(()),
        }
    }

    pub(crate) fn show<T: Shown>(&mut self, path: &str) -> Result<(), CommandError> {
        let reply = self.api.request(Method::GET, path)?;
        self.tell(&reply, |view: T, out| write_facts(&view, out))
    }

    /// Changes a record and prints the new state.
    pub(crate) fn change<T: Shown>(
        &mut self,
        path: &str,
        changes: &impl Serialize,
    ) -> Result<(), CommandError> {
        let changes = json!(changes);
        if changes.as_object().is_some_and(serde_json::Map::is_empty) {
            return Err(CommandError::NothingToChange);
        }
        let reply = self.api.request_with(Method::PATCH, path, &changes)?;
        self.tell(&reply, |view: T, out| write_facts(&view, out))
    }

    /// Performs an action on a record and prints the new state.
    pub(crate) fn act<T: Shown>(
        &mut self,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(), CommandError> {
        let reply = match body {
            Some(body) => self.api.request_with(Method::POST, path, body)?,
            None => self.api.request(Method::POST, path)?,
        };
        self.tell(&reply, |view: T, out| write_facts(&view, out))
    }

    /// Performs an action without a time limit and prints its result.
    pub(crate) fn wait_for<T: Shown>(
        &mut self,
        path: &str,
        body: &Value,
    ) -> Result<(), CommandError> {
        let reply = self.api.wait_for(Method::POST, path, Some(body))?;
        self.tell(&reply, |view: T, out| write_facts(&view, out))
    }

    pub(crate) fn delete(&mut self, path: &str) -> Result<(), CommandError> {
        self.api.request(Method::DELETE, path)?;
        if self.json {
            Ok(())
        } else {
            self.print("Deleted.")
        }
    }

    /// Writes the bytes at `path` to standard output, and notes about them to standard error. A
    /// terminal would obey hidden characters in them, so they are escaped there.
    pub(crate) fn download(&mut self, path: &str) -> Result<(), CommandError> {
        let download = self.api.download(path)?;
        if self.out.is_terminal() {
            for line in String::from_utf8_lossy(&download.bytes).split_inclusive('\n') {
                let end = if line.ends_with('\n') { "\n" } else { "" };
                write!(
                    self.out,
                    "{}{end}",
                    escaped(line.trim_end_matches(['\n', '\r']))
                )?;
            }
        } else {
            self.out.write_all(&download.bytes)?;
        }
        self.out.flush()?;
        if let Some(encoding) = download.encoding {
            command::note(
                "gw-gateway",
                format_args!("the body has the content coding {encoding}"),
            );
        }
        if download.truncated {
            let reason = download
                .truncated_by
                .map_or_else(String::new, |reason| format!(" ({reason})"));
            let note =
                format_args!("the body is incomplete; only the beginning was captured{reason}");
            command::note("gw-gateway", note);
        }
        Ok(())
    }

    /// Writes a reply: its JSON for a script, with `in_words` for a person.
    pub(crate) fn tell<T: DeserializeOwned>(
        &mut self,
        reply: &ApiReply,
        in_words: impl FnOnce(T, &mut StdoutLock<'static>) -> io::Result<()>,
    ) -> Result<(), CommandError> {
        if self.json {
            return self.print_json(&reply.text);
        }
        in_words(reply.parse()?, &mut self.out)?;
        Ok(self.out.flush()?)
    }

    /// Writes text for people.
    pub(crate) fn write(
        &mut self,
        write: impl FnOnce(&mut StdoutLock<'static>) -> io::Result<()>,
    ) -> Result<(), CommandError> {
        write(&mut self.out)?;
        Ok(self.out.flush()?)
    }

    /// Writes JSON for a script.
    pub(crate) fn print_json(&mut self, json: &str) -> Result<(), CommandError> {
        self.print(&escaped_json(json))
    }

    fn print(&mut self, line: &str) -> Result<(), CommandError> {
        writeln!(self.out, "{}", line.trim_end())?;
        Ok(self.out.flush()?)
    }
}

/// Writes each fact on its own line.
pub(crate) fn write_facts(view: &impl Shown, out: &mut impl Write) -> io::Result<()> {
    let lines: Vec<Vec<String>> = view
        .facts()
        .into_iter()
        .map(|(label, value)| vec![format!("  {label}"), value])
        .collect();
    table::write(out, &lines)?;
    view.note().map_or(Ok(()), |note| writeln!(out, "{note}"))
}

fn rows<T: Listed>(views: &[T]) -> Vec<Vec<String>> {
    let columns = |view: &T| view.facts().into_iter().take(T::COLUMNS);
    let header = views.first().map(|view| {
        columns(view)
            .map(|(label, _)| label.to_uppercase())
            .collect()
    });
    header
        .into_iter()
        .chain(
            views
                .iter()
                .map(|view| columns(view).map(|(_, value)| value).collect()),
        )
        .collect()
}

/// The word that the API uses for a value of an enumeration.
pub(crate) fn word(value: impl Serialize) -> String {
    json!(value).as_str().unwrap_or_default().to_owned()
}

pub(crate) fn yes_or_no(value: bool) -> String {
    (if value { "yes" } else { "no" }).to_owned()
}

pub(crate) fn or_dash<T: ToString>(value: Option<&T>) -> String {
    value.map_or_else(|| "-".to_owned(), T::to_string)
}

/// The values with commas between them; a dash if there are none.
pub(crate) fn joined(values: impl IntoIterator<Item = impl ToString>) -> String {
    let values: Vec<String> = values.into_iter().map(|value| value.to_string()).collect();
    if values.is_empty() {
        "-".to_owned()
    } else {
        values.join(", ")
    }
}
