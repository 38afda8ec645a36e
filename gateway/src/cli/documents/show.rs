//! A plan as text for people and as JSON for programs, and values as TOML.

use std::fmt::Write as _;
use std::io::{self, Write};

use gw_shared::text::{escaped, escaped_json, is_hidden};
use serde_json::{Map, Value, json};

use super::plan::{Operation, Plan, PlannedChange};

/// Longest line of a list; longer ones have a line for each value.
const LINE_MAX: usize = 100;

pub(super) fn write_plan(out: &mut impl Write, plan: &Plan) -> io::Result<()> {
    for change in &plan.changes {
        write_change(out, change)?;
    }
    for (id, place, hint) in &plan.absent {
        let line = format!(
            "{id} ({}:{}) has not enrolled: apply again when it has{hint}",
            place.file, place.line
        );
        writeln!(out, "! {}", escaped(&line))?;
    }
    let [created, changed, deleted] = plan.counts();
    let unchanged = plan.unchanged;
    if plan.changes.is_empty() {
        return writeln!(out, "No difference in {unchanged} objects.");
    }
    writeln!(
        out,
        "{created} to create, {changed} to change, {deleted} to delete, {unchanged} unchanged."
    )
}

fn write_change(out: &mut impl Write, change: &PlannedChange) -> io::Result<()> {
    let sign = match change.operation {
        Operation::Create => '+',
        Operation::Change => '~',
        Operation::Delete => '-',
    };
    let place = change.place.as_ref();
    let place = place.map(|place| format!(" ({}:{})", place.file, place.line));
    let line = format!("{}{}", change.id, place.unwrap_or_default());
    writeln!(out, "{sign} {}", escaped(&line))?;
    for field in &change.fields {
        let text =
            |value: &Option<Value>| value.as_ref().map_or_else(|| "none".to_owned(), toml_value);
        let new = text(&field.new);
        let line = match change.operation {
            Operation::Change => format!("{}: {} → {new}", field.name, text(&field.old)),
            _ => format!("{}: {new}", field.name),
        };
        writeln!(out, "    {}", escaped(&line))?;
    }
    Ok(())
}

/// The plan for programs. `more` has further members of each change, by its number.
pub(super) fn plan_json(plan: &Plan, more: &mut dyn FnMut(usize) -> Map<String, Value>) -> Value {
    let changes = plan.changes.iter().enumerate();
    let changes: Vec<Value> = changes
        .map(|(number, change)| {
            let mut shown = change_json(change);
            shown.extend(more(number));
            Value::Object(shown)
        })
        .collect();
    let absent = plan.absent.iter();
    let absent: Vec<Value> = absent
        .map(|(id, place, _)| {
            json!({
                "account": id.account,
                "name": id.name,
                "file": &*place.file,
                "line": place.line,
            })
        })
        .collect();
    json!({ "changes": changes, "unchanged": plan.unchanged, "agents_not_enrolled": absent })
}

fn change_json(change: &PlannedChange) -> Map<String, Value> {
    let fields = change.fields.iter();
    let fields: Map<String, Value> = fields
        .map(|field| {
            let values = json!({ "old": field.old, "new": field.new });
            (field.name.to_owned(), values)
        })
        .collect();
    let mut shown = Map::new();
    shown.insert("change".into(), change.operation.word().into());
    shown.insert("kind".into(), change.id.kind.table().into());
    shown.insert("account".into(), change.id.account.as_str().into());
    shown.insert("name".into(), change.id.name.as_str().into());
    shown.insert("fields".into(), fields.into());
    if let Some(place) = &change.place {
        shown.insert("file".into(), (*place.file).into());
        shown.insert("line".into(), place.line.into());
    }
    shown
}

/// A value of a setting in TOML, on one line.
pub(super) fn toml_value(value: &Value) -> String {
    match value {
        Value::String(text) => toml_text(text),
        Value::Array(values) => {
            let values: Vec<String> = values.iter().map(toml_value).collect();
            format!("[{}]", values.join(", "))
        }
        value => escaped_json(&value.to_string()).into_owned(),
    }
}

/// A key with its value as lines of a TOML document.
pub(super) fn toml_lines(key: &str, value: &Value) -> String {
    let line = format!("{key} = {}\n", toml_value(value));
    match value {
        Value::Array(values) if line.len() > LINE_MAX => {
            let mut lines = format!("{key} = [\n");
            for value in values {
                // Writing to a string does not fail.
                let _ = writeln!(lines, "  {},", toml_value(value));
            }
            lines + "]\n"
        }
        _ => line,
    }
}

/// A basic string of TOML. Hidden characters are escaped.
fn toml_text(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            hidden if is_hidden(hidden) => {
                let _ = write!(quoted, "\\U{:08X}", u32::from(hidden));
            }
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_mean_the_same_in_toml() {
        let services: Vec<String> = (0..60).map(|number| format!("service-{number}")).collect();
        for value in [
            json!(true),
            json!(5),
            json!(["a", "b"]),
            json!([]),
            json!(services),
            json!("it's \"mine\" \\ \u{1b}\n\u{7f}\u{202e}\u{e0067}é\u{200d}"),
        ] {
            let text = toml_lines("key", &value);
            assert!(!text.replace('\n', "").contains(is_hidden), "{text:?}");
            let table: toml::Table = text.parse().unwrap();
            assert_eq!(serde_json::to_value(&table["key"]).unwrap(), value);
        }
        assert!(toml_lines("key", &json!(services)).contains("\n  \"service-7\",\n"));
    }
}
