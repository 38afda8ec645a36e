//! Configuration files: keys are checked one by one, and all mistakes are reported together.

mod declare;
mod suggestion;
mod variables;

use std::collections::BTreeSet;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;

pub use suggestion::{did_you_mean, suggestion};
pub use variables::{UnknownVariable, VARIABLES, unknown_in_environment, unknown_variables};

/// Every mistake in a configuration.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigErrors(pub Vec<String>);

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "configuration:")?;
        self.0.iter().try_for_each(|error| write!(f, "\n  {error}"))
    }
}

impl std::error::Error for ConfigErrors {}

/// Parses a configuration file. The error has the line's number and not its text, which may contain
/// a password.
pub fn parse_table(text: &str) -> Result<toml::Table, String> {
    text.parse::<toml::Table>().map_err(|error| {
        let before = error
            .span()
            .and_then(|span| text.get(..span.start))
            .unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        let message = error.message();
        let named = error.span().and_then(|span| text.get(span));
        match named {
            Some(name) if message == "duplicate key" => {
                let name = name.trim_matches(['[', ']']);
                let first = first_line_of(name, before);
                format!(
                    "line {line}: {name} is there twice, first in line {first}; a table or key is \
                     written once: put the keys of both together, or remove one"
                )
            }
            _ => explained(
                line,
                text.lines().nth(line - 1).unwrap_or_default(),
                message,
            ),
        }
    })
}

/// An error of syntax in a line, with the key of the line and the remedy of the most frequent
/// cause.
fn explained(line: usize, text: &str, message: &str) -> String {
    let is_of_key = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    let key = text
        .split_once('=')
        .map(|(key, _)| key.trim())
        .filter(|key| !key.is_empty() && key.bytes().all(is_of_key))
        .map(|key| format!(" ({key})"))
        .unwrap_or_default();
    let remedy = if text.contains(['\u{2018}', '\u{2019}', '\u{201c}', '\u{201d}']) {
        "; write \" in place of typographic quotes"
    } else if message.contains("expected `=`") {
        "; a line is KEY = VALUE"
    } else if message.contains("must be quoted") {
        "; write \"…\", or a number without a unit"
    } else {
        ""
    };
    format!("line {line}{key}: {message}{remedy}")
}

/// Number of the line of `text` that begins the table or key `name`.
fn first_line_of(name: &str, text: &str) -> usize {
    let begins = |line: &str| {
        let line = line.trim_start().trim_start_matches('[').trim_start();
        line.strip_prefix(name)
            .is_some_and(|rest| rest.trim_start().starts_with(['=', ']', '.']))
    };
    // A dotted table, such as [a.b], has the last part of its name there.
    let ends = |line: &str| {
        let line = line.trim_end().trim_end_matches(']');
        line.strip_suffix(name)
            .is_some_and(|rest| rest.ends_with('.'))
    };
    text.lines()
        .position(|line| begins(line) || ends(line))
        .unwrap_or_default()
        + 1
}

/// Keys of a TOML file, taken one by one.
///
/// A variable overrides the key of its name: `GW_` and the key in capitals, with `_` for the dot of
/// a key in a table.
pub struct Keys<'a> {
    table: toml::Table,
    /// Keys that were asked for.
    known: BTreeSet<String>,
    environment: &'a dyn Fn(&str) -> Option<String>,
    /// Mistakes found so far, each with the key or variable that it is about.
    pub errors: Vec<String>,
}

impl<'a> Keys<'a> {
    /// Parses the text of a configuration file.
    pub fn parse(
        text: &str,
        environment: &'a dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigErrors> {
        let table = parse_table(text).map_err(|error| ConfigErrors(vec![error]))?;
        Ok(Self::new(table, environment))
    }

    pub fn new(table: toml::Table, environment: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self {
            table,
            known: BTreeSet::new(),
            environment,
            errors: Vec::new(),
        }
    }

    /// Looks variables up.
    pub fn environment(&self) -> &'a dyn Fn(&str) -> Option<String> {
        self.environment
    }

    /// As [`Self::text`]; reports a missing key.
    pub fn required<T>(
        &mut self,
        key: &str,
        expected: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let had_errors = self.errors.len();
        let value = self.text(key, expected, parse);
        if value.is_none() && self.errors.len() == had_errors {
            self.errors
                .push(format!("{key}: missing; it must be {expected}"));
        }
        value
    }

    /// A string that `parse` accepts. `expected` describes it in the error.
    pub fn text<T>(
        &mut self,
        key: &str,
        expected: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        self.value(key, expected, |value| parse(value.as_str()?))
    }

    /// A string that may contain a password: errors do not show it. Also returns its source, the
    /// key or the variable.
    pub fn unshown(&mut self, key: &str, expected: &str) -> Option<(String, String)> {
        match self.take(key)? {
            (name, toml::Value::String(text)) => Some((name, text)),
            (name, _) => {
                self.errors
                    .push(format!("{name}: must be a string, {expected}"));
                None
            }
        }
    }

    /// A path.
    pub fn path(&mut self, key: &str, expected: &str) -> Option<PathBuf> {
        self.text(key, expected, |text| Some(PathBuf::from(text)))
    }

    pub fn boolean(&mut self, key: &str) -> Option<bool> {
        self.value(key, "true or false", |value| {
            value.as_bool().or_else(|| value.as_str()?.parse().ok())
        })
    }

    pub fn integer<T: TryFrom<i64> + PartialOrd + fmt::Display>(
        &mut self,
        key: &str,
        range: RangeInclusive<T>,
    ) -> Option<T> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        self.value(key, &expected, |value| {
            let number = value
                .as_integer()
                .or_else(|| value.as_str()?.parse().ok())?;
            T::try_from(number)
                .ok()
                .filter(|number| range.contains(number))
        })
    }

    /// A number or its text.
    pub fn number<T>(
        &mut self,
        key: &str,
        expected: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        self.value(key, expected, |value| {
            parse(
                &value
                    .as_str()
                    .map_or_else(|| value.to_string(), str::to_owned),
            )
        })
    }

    /// Turns the keys of the table `name` into keys `name.key`.
    pub fn open_table(&mut self, name: &str) {
        match self.in_file(name) {
            Some(toml::Value::Table(entries)) => {
                self.table.extend(
                    entries
                        .into_iter()
                        .map(|(key, value)| (format!("{name}.{key}"), value)),
                );
            }
            Some(value) => self.errors.push(format!("{name}: {value} is not a table")),
            None => {}
        }
    }

    /// An array of strings; in a variable, one string with commas. Reports every wrong element.
    pub fn list<T>(
        &mut self,
        key: &str,
        expected: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<Vec<T>> {
        let (name, elements) = self.elements(key)?;
        let mut parsed = Vec::with_capacity(elements.len());
        for element in elements {
            match element.as_str().and_then(&parse) {
                Some(element) => parsed.push(element),
                None => self
                    .errors
                    .push(format!("{name}: {element} is not {expected}")),
            }
        }
        Some(parsed)
    }

    /// An array; in a variable, strings with commas between them. Also returns its source, the key
    /// or the variable.
    pub fn elements(&mut self, key: &str) -> Option<(String, Vec<toml::Value>)> {
        let (name, value) = self.take(key)?;
        let elements = match value {
            toml::Value::Array(elements) => elements,
            toml::Value::String(text) => text
                .split(',')
                .map(str::trim)
                .filter(|text| !text.is_empty())
                .map(toml::Value::from)
                .collect(),
            other => vec![other],
        };
        Some((name, elements))
    }

    fn value<T>(
        &mut self,
        key: &str,
        expected: &str,
        parse: impl Fn(&toml::Value) -> Option<T>,
    ) -> Option<T> {
        let (name, value) = self.take(key)?;
        let parsed = parse(&value);
        if parsed.is_none() {
            self.errors
                .push(format!("{name}: {value} is not {expected}"));
        }
        parsed
    }

    /// Removes a key that no variable overrides and returns its value.
    pub fn in_file(&mut self, key: &str) -> Option<toml::Value> {
        self.known.insert(key.to_owned());
        self.table.remove(key)
    }

    /// Value in force and its source: the key or the variable.
    fn take(&mut self, key: &str) -> Option<(String, toml::Value)> {
        let in_file = self.in_file(key);
        let variable = format!("GW_{}", key.to_ascii_uppercase().replace('.', "_"));
        match (self.environment)(&variable) {
            Some(text) => Some((variable, toml::Value::String(text))),
            None => in_file.map(|value| (key.to_owned(), value)),
        }
    }

    /// Reports every key that was not taken, with the key that was probably meant.
    pub fn refuse_unknown(&mut self) {
        for (key, value) in &self.table {
            // A table that is none: its keys are those of the first level.
            let misplaced = value
                .as_table()
                .into_iter()
                .flat_map(|table| table.keys())
                .find(|inner| self.known.contains(*inner));
            let known = self.known.iter().map(String::as_str);
            // A line at the end of a file belongs to the last table.
            let remedy = match (key.rsplit_once('.'), misplaced) {
                (Some((table, key)), _) if self.known.contains(key) => {
                    format!("; `{key}` is no key of the table: move it above the line [{table}]")
                }
                (_, Some(inner)) => {
                    format!("; `{inner}` is in no table: move it above the first line with []")
                }
                _ => match suggestion(key, known) {
                    Some(known) => format!("; did you mean `{known}`?"),
                    None => "; docs/configuration.md lists the keys".to_owned(),
                },
            };
            self.errors.push(format!("{key}: no such key{remedy}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(text: &str) -> Option<u16> {
        text.parse().ok()
    }

    #[test]
    fn a_key_below_the_header_of_a_table_is_explained() {
        let mut keys = Keys::parse("[log]\nlevel = \"x\"\nport = \"1\"\n", &|_| None).unwrap();
        keys.open_table("log");
        let _ = (
            keys.text("port", "a port", port),
            keys.text("log.level", "a level", |text| Some(text.to_owned())),
        );
        keys.refuse_unknown();
        assert_eq!(
            keys.errors,
            ["log.port: no such key; `port` is no key of the table: move it above the line [log]"]
        );
        let mut keys = Keys::parse("[server]\nport = \"1\"\n", &|_| None).unwrap();
        let _ = keys.text("port", "a port", port);
        keys.refuse_unknown();
        assert_eq!(
            keys.errors,
            ["server: no such key; `port` is in no table: move it above the first line with []"]
        );
    }

    #[test]
    fn errors_of_syntax_have_a_line_and_not_its_text() {
        let error = parse_table("a = 1\nproxy = 'http://u:hunter2@h\nb = 2").unwrap_err();
        assert!(
            error.starts_with("line 2 (proxy): ") && !error.contains("hunter2"),
            "{error}"
        );
        for (text, expected) in [
            ("region: eu1", "expected `=`; a line is KEY = VALUE"),
            ("a = 1\nregion = \u{2018}eu1\u{2019}", "line 2 (region): "),
            (
                "region = \u{201c}eu1\u{201d}",
                "in place of typographic quotes",
            ),
            ("drain = 30s", "or a number without a unit"),
        ] {
            let error = parse_table(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_variable_overrides_its_key_and_every_mistake_names_its_source() {
        let environment = |name: &str| match name {
            "GW_PORT" => Some("7".to_owned()),
            "GW_T_PORT" => Some("x".to_owned()),
            _ => None,
        };
        let text = "port = '1'\nlits = 1\nlist = ['1', 'x']\ncount = 4\nshare = 1\nother = 2\n[t]\n\
                    port = '1'\n";
        let mut keys = Keys::parse(text, &environment).unwrap();
        keys.open_table("t");
        keys.open_table("no_table");
        keys.open_table("count");
        assert_eq!(keys.text("port", "a port", port), Some(7));
        assert_eq!(keys.text("t.port", "a port", port), None);
        assert_eq!(keys.list("list", "a port", port), Some(vec![1]));
        assert_eq!(keys.number("share", "a port", port), Some(1));
        assert_eq!(keys.required("missing", "a port", port), None);
        keys.refuse_unknown();
        assert_eq!(
            ConfigErrors(keys.errors).to_string(),
            "configuration:\n  count: 4 is not a table\n  GW_T_PORT: \"x\" is not a port\n  list: \
             \"x\" is not a port\n  missing: missing; it must be a port\n  lits: no such key; did \
             you mean `list`?\n  other: no such key; docs/configuration.md lists the keys"
        );
    }
}
