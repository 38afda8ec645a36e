//! Scenarios as text: TOML with a line for each request, and durations as people write them.

use std::fmt::Write;
use std::time::Duration;

use serde::Deserialize;
use toml::{Table, Value};

use crate::scenario::Scenario;

/// Reason why a text is not a scenario.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The text is not TOML.
    #[error("the scenario is not TOML: {0}")]
    Syntax(toml::de::Error),
    /// A field is missing or has another type.
    #[error("the scenario does not have the fields of src/scenario.rs: {0}")]
    Field(toml::de::Error),
}

/// Units of durations, the largest first, with their nanoseconds.
const UNITS: [(&str, u128); 4] = [
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1000),
    ("ns", 1),
];

/// The text of a scenario, which [`parse`] reads.
pub fn to_text(scenario: &Scenario) -> Result<String, toml::ser::Error> {
    let table = Table::try_from(scenario)?;
    let mut text = String::new();
    for (name, value) in table {
        text += &format!("{name} = ");
        write_value(&mut text, &value, 0);
        text.push('\n');
    }
    Ok(text)
}

/// Reads what [`to_text`] has written.
pub fn parse(text: &str) -> Result<Scenario, FileError> {
    let table: Table = text.parse().map_err(FileError::Syntax)?;
    let table = with_durations(Value::Table(table));
    Scenario::deserialize(table).map_err(FileError::Field)
}

/// Writes lists of tables with a line for each table, and all else in one line.
fn write_value(text: &mut String, value: &Value, depth: usize) {
    match value {
        Value::Array(elements) if elements.iter().any(Value::is_table) => {
            text.push_str("[\n");
            for element in elements {
                text.push_str(&"    ".repeat(depth + 1));
                write_value(text, element, depth + 1);
                text.push_str(",\n");
            }
            text.push_str(&"    ".repeat(depth));
            text.push(']');
        }
        Value::Table(table) => match duration(table) {
            Some(duration) => *text += &format!("\"{}\"", in_units(duration)),
            None => write_table(text, table, depth),
        },
        // Writing to a string does not fail.
        other => drop(write!(text, "{other}")),
    }
}

fn write_table(text: &mut String, table: &Table, depth: usize) {
    let mut separator = "{ ";
    for (name, value) in table {
        *text += &format!("{separator}{name} = ");
        write_value(text, value, depth);
        separator = ", ";
    }
    text.push_str(" }");
}

/// The duration that serde has made a table of.
fn duration(table: &Table) -> Option<Duration> {
    let number = |name| table.get(name).and_then(Value::as_integer);
    let (seconds, nanos) = (number("secs")?, number("nanos")?);
    Some(Duration::new(
        seconds.try_into().ok()?,
        nanos.try_into().ok()?,
    ))
}

fn in_units(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    let fits = |(_, unit): &&(&str, u128)| nanos.is_multiple_of(*unit);
    let (name, unit) = UNITS.iter().find(fits).unwrap_or(&UNITS[3]);
    format!("{}{name}", nanos / unit)
}

fn from_units(text: &str) -> Option<Duration> {
    let digits = text.find(|char: char| !char.is_ascii_digit())?;
    let (number, name) = text.split_at(digits);
    let (_, unit) = UNITS.iter().find(|(unit, _)| *unit == name)?;
    let nanos = number.parse::<u128>().ok()?.checked_mul(*unit)?;
    u64::try_from(nanos).ok().map(Duration::from_nanos)
}

/// Makes tables, which serde reads, of the texts that are durations.
fn with_durations(value: Value) -> Value {
    match value {
        Value::String(text) => match from_units(&text).map(Value::try_from) {
            Some(Ok(table)) => table,
            _ => Value::String(text),
        },
        Value::Array(elements) => Value::Array(elements.into_iter().map(with_durations).collect()),
        Value::Table(table) => {
            let fields = table.into_iter();
            Value::Table(
                fields
                    .map(|(name, value)| (name, with_durations(value)))
                    .collect(),
            )
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scenario_survives_a_round_trip() {
        for seed in 0..200 {
            let scenario = Scenario::new(seed);
            let text = to_text(&scenario).unwrap();
            assert_eq!(parse(&text).unwrap(), scenario, "{text}");
        }
    }

    #[test]
    fn durations_are_exact() {
        for (text, nanos) in [("0s", 0), ("1500us", 1_500_000), ("7ns", 7)] {
            let duration = Duration::from_nanos(nanos);
            assert_eq!(in_units(duration), text);
            assert_eq!(from_units(text), Some(duration));
        }
        for text in ["", "s", "12", "1.5s", "1h", "-1s"] {
            assert_eq!(from_units(text), None, "{text}");
        }
    }

    #[test]
    fn a_missing_field_is_named() {
        let text = to_text(&Scenario::new(0)).unwrap();
        let text = text.replacen("\nworkers = ", "\nworker = ", 1);
        let error = parse(&text).unwrap_err().to_string();
        assert!(error.contains("missing field `workers`"), "{error}");
    }
}
