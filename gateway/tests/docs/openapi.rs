//! An OpenAPI document in lines: one for each operation, parameter, response and member, with type,
//! bounds, and whether it is required. Descriptions are left out.

use serde_json::{Map, Value};

/// Keywords with bounds of a value, in the order in which a line has them.
const BOUNDS: [&str; 9] = [
    "format",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "default",
];

/// Keywords that say nothing about a value.
const WITHOUT_MEANING: [&str; 2] = ["description", "example"];

/// The lines of a document, in its order.
pub(crate) fn lines(document: &Value) -> String {
    let mut lines = Lines(Vec::new());
    lines.push(
        "",
        &["openapi", "servers", "security"].map(|it| &document[it]),
    );
    lines.push(
        "components.securitySchemes",
        &[&document["components"]["securitySchemes"]],
    );
    for (path, operations) in object(&document["paths"]) {
        for (method, operation) in object(operations) {
            lines.operation(&format!("{} {path}", method.to_uppercase()), operation);
        }
    }
    for (name, schema) in object(&document["components"]["schemas"]) {
        lines.schema(name, schema, "");
    }
    lines.0.join("\n") + "\n"
}

struct Lines(Vec<String>);

impl Lines {
    fn push(&mut self, name: &str, values: &[&Value]) {
        let values: Vec<String> = values.iter().map(ToString::to_string).collect();
        self.0.push(format!("{name}: {}", values.join(" ")));
    }

    fn operation(&mut self, name: &str, operation: &Value) {
        self.push(name, &[&operation["operationId"]]);
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            let word = |key: &str| parameter[key].as_str().unwrap_or_default();
            let name = format!("{name} {} {}", word("in"), word("name"));
            self.schema(
                &name,
                &parameter["schema"],
                required(&parameter["required"]),
            );
        }
        let body = &operation["requestBody"];
        self.content(&format!("{name} body"), body, required(&body["required"]));
        for (status, response) in object(&operation["responses"]) {
            let name = format!("{name} {status}");
            if response["content"].is_null() {
                self.0.push(name.clone());
            }
            self.content(&name, response, "");
            for (field, header) in object(&response["headers"]) {
                self.schema(&format!("{name} {field}"), &header["schema"], "");
            }
        }
    }

    fn content(&mut self, name: &str, of: &Value, required: &str) {
        for (kind, content) in object(&of["content"]) {
            let schema = &content["schema"];
            if kind == "application/problem+json" {
                // The same for every error.
                self.once("problem", schema);
                self.0.push(format!("{name} {kind}: problem"));
            } else {
                self.schema(&format!("{name} {kind}"), schema, required);
            }
        }
    }

    /// Adds the lines of a schema that many places repeat, unless they are there.
    fn once(&mut self, name: &str, schema: &Value) {
        let mut lines = Lines(Vec::new());
        lines.schema(name, schema, "");
        let first = self.0.iter().position(|line| *line == lines.0[0]);
        match first {
            Some(at) => assert_eq!(self.0[at..at + lines.0.len()], lines.0, "of {name}"),
            None => self.0.extend(lines.0),
        }
    }

    /// Adds the line of a value, and those of its members.
    fn schema(&mut self, name: &str, schema: &Value, required: &str) {
        self.0
            .push(format!("{name}: {}{required}", in_words(schema)));
        self.members(name, schema);
    }

    fn members(&mut self, name: &str, schema: &Value) {
        let needed = schema["required"].as_array();
        for (member, schema) in object(&schema["properties"]) {
            let is_needed = needed.is_some_and(|all| all.contains(&member.as_str().into()));
            let required = if is_needed { ", required" } else { "" };
            self.schema(&format!("{name}.{member}"), schema, required);
        }
        for (at, part) in alternatives(schema).iter().enumerate() {
            self.members(&format!("{name}|{at}"), part);
        }
        for (key, mark) in [("items", "[]"), ("additionalProperties", "{}")] {
            if schema[key].is_object() {
                self.members(&format!("{name}{mark}"), &schema[key]);
            }
        }
    }
}

fn object(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flat_map(Map::iter)
}

fn required(value: &Value) -> &'static str {
    match value.as_bool() {
        Some(true) => ", required",
        _ => "",
    }
}

fn alternatives(schema: &Value) -> &[Value] {
    let of = |key: &str| schema[key].as_array().map(Vec::as_slice);
    let found = ["oneOf", "anyOf", "allOf"].into_iter().find_map(of);
    found.unwrap_or_default()
}

/// Type and bounds of a value. Panics at a keyword that it does not know.
fn in_words(schema: &Value) -> String {
    let mut words = Vec::new();
    for (key, value) in object(schema) {
        match (key.as_str(), value) {
            ("$ref", Value::String(to)) => {
                words.push(to.rsplit('/').next().unwrap_or_default().to_owned());
            }
            ("type", Value::String(name)) => words.insert(0, name.clone()),
            ("type", Value::Array(names)) => words.insert(0, joined(names, "|")),
            ("enum", Value::Array(values)) => {
                words.push(format!("one of {}", joined(values, ", ")));
            }
            ("const", value) => words.push(format!("always {value}")),
            ("oneOf" | "anyOf" | "allOf", Value::Array(parts)) => {
                let parts: Vec<String> = parts.iter().map(in_words).collect();
                words.push(format!("{key} ({})", parts.join(") or (")));
            }
            ("prefixItems", Value::Array(parts)) => {
                let parts: Vec<String> = parts.iter().map(in_words).collect();
                words.push(format!("[{}]", parts.join(", ")));
            }
            ("items", Value::Bool(false)) => (),
            ("items", value) => words.push(format!("of {}", in_words(value))),
            ("additionalProperties", Value::Bool(false)) => words.push("no others".to_owned()),
            ("additionalProperties", value) => words.push(format!("each {}", in_words(value))),
            ("propertyNames", value) => words.push(format!("named {}", in_words(value))),
            ("properties" | "required", _) => (),
            (key, _) if WITHOUT_MEANING.contains(&key) => (),
            (key, _) if BOUNDS.contains(&key) => (),
            _ => panic!("{key}: add it to gateway/tests/docs/openapi.rs"),
        }
    }
    let bounds = BOUNDS.iter().filter(|bound| !schema[**bound].is_null());
    words.extend(bounds.map(|bound| format!("{bound} {}", schema[*bound])));
    words.join(" ")
}

fn joined(values: &[Value], between: &str) -> String {
    let words = values.iter().map(|value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    });
    words.collect::<Vec<_>>().join(between)
}
