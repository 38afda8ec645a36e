//! Text of a document to the objects that it declares. Every mistake is found, with its line.

use std::sync::Arc;

use gw_shared::config::did_you_mean;
use serde_json::{Map, Number, Value};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::object::{MANAGED_BY, ObjectId, ObjectKind};

/// A line of a document.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) file: Arc<str>,
    pub(super) line: usize,
}

/// A mistake, and its line if it has one.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mistake {
    pub(super) place: Option<Place>,
    pub(super) message: String,
}

impl std::fmt::Display for Mistake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.place {
            Some(Place { file, line }) => write!(f, "{file}:{line}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

/// An object as a document declares it.
#[derive(Debug)]
pub(super) struct Declared {
    pub(super) id: ObjectId,
    /// Settings that the document gives, without those that name the object.
    pub(super) settings: Map<String, Value>,
    /// Label of the object, from its table or else from its document.
    pub(super) managed_by: Option<String>,
    pub(super) place: Place,
}

/// The objects and the label of one document.
#[derive(Debug, Default)]
pub(super) struct Document {
    pub(super) objects: Vec<Declared>,
    /// Label of the objects that have none of their own.
    pub(super) managed_by: Option<String>,
}

/// Reads the text of the document `file`. `managed_by` is the label of documents that have none.
/// Adds to `mistakes`.
pub(super) fn parse(
    file: &Arc<str>,
    text: &str,
    managed_by: Option<&str>,
    mistakes: &mut Vec<Mistake>,
) -> Document {
    let mut reader = Reader {
        file,
        line_starts: text
            .match_indices('\n')
            .map(|(before, _)| before + 1)
            .collect(),
        managed_by: managed_by.map(str::to_owned),
        mistakes,
    };
    let (table, mut errors) = DeTable::parse_recoverable(text);
    let start = |error: &toml::de::Error| error.span().map_or(0, |span| span.start);
    errors.sort_by_key(start);
    for error in &errors {
        reader.report(start(error), error.message().to_owned());
    }
    if !errors.is_empty() {
        return Document::default();
    }
    reader.document(table.get_ref())
}

struct Reader<'a> {
    file: &'a Arc<str>,
    /// Where each line begins, without the first.
    line_starts: Vec<usize>,
    managed_by: Option<String>,
    mistakes: &'a mut Vec<Mistake>,
}

type Entry<'a, 'i> = (
    &'a Spanned<std::borrow::Cow<'i, str>>,
    &'a Spanned<DeValue<'i>>,
);

impl Reader<'_> {
    fn document(&mut self, table: &DeTable<'_>) -> Document {
        if let Some(label) = table.get(MANAGED_BY) {
            let label_of = |value| ObjectKind::Account.checked(MANAGED_BY, value);
            match json(label.get_ref()).and_then(label_of) {
                Ok(label) => self.managed_by = label.as_str().map(str::to_owned),
                Err(error) => self.report(label.span().start, format!("{MANAGED_BY}: {error}")),
            }
        }
        let mut objects = Vec::new();
        for (key, value) in table {
            let name = key.get_ref().as_ref();
            if name == MANAGED_BY {
                continue;
            }
            let kind = ObjectKind::ALL
                .into_iter()
                .find(|kind| kind.table() == name);
            let Some(kind) = kind else {
                let tables = ObjectKind::ALL.map(ObjectKind::table);
                let hint = did_you_mean(name, tables.into_iter().chain([MANAGED_BY]));
                let hint = or_all(hint, "the kinds are", tables);
                self.report(
                    key.span().start,
                    format!("{name}: no such key or kind of object{hint}"),
                );
                continue;
            };
            let Some(tables) = value.get_ref().as_array() else {
                self.report(
                    key.span().start,
                    format!("{name}: write each object as a table [[{name}]]"),
                );
                continue;
            };
            for table in tables {
                match table.get_ref().as_table() {
                    Some(members) => {
                        objects.extend(self.object(kind, table.span().start, members));
                    }
                    None => self.report(
                        table.span().start,
                        format!("{name}: write each object as a table [[{name}]]"),
                    ),
                }
            }
        }
        objects.sort_by(|one, other| one.place.cmp(&other.place));
        Document {
            objects,
            managed_by: self.managed_by.clone(),
        }
    }

    /// Reads a table; `None` if it does not name an object.
    fn object(&mut self, kind: ObjectKind, at: usize, table: &DeTable<'_>) -> Option<Declared> {
        let label = kind.table();
        let account = match kind {
            ObjectKind::Account => String::new(),
            _ => {
                let given = self.text(kind, "account", at, table)?;
                self.checked(kind, "account", at, table, || {
                    ObjectKind::Account.checked_name("", "id", &given)
                })?
            }
        };
        let named_by = kind
            .name_keys()
            .iter()
            .find(|key| table.contains_key(**key));
        let Some(&named_by) = named_by else {
            let keys = kind.name_keys().join(" or ");
            self.report(at, format!("{label}: {keys} is missing"));
            return None;
        };
        let given = self.text(kind, named_by, at, table)?;
        let name = self.checked(kind, named_by, at, table, || {
            kind.checked_name(&account, named_by, &given)
        })?;
        let account = match kind {
            ObjectKind::Account => name.clone(),
            _ => account,
        };
        let id = ObjectId {
            kind,
            account,
            name,
        };
        let mut settings = Map::new();
        for entry in table {
            let key = entry.0.get_ref().as_ref();
            if key == "account" || key == named_by {
                continue;
            }
            if let Some(value) = self.setting(&id, entry) {
                settings.insert(key.to_owned(), value);
            }
        }
        let own = settings.remove(MANAGED_BY);
        let own = own.and_then(|label| label.as_str().map(str::to_owned));
        Some(Declared {
            managed_by: own
                .or_else(|| self.managed_by.clone())
                .filter(|_| kind.is_created()),
            place: self.place(at),
            id,
            settings,
        })
    }

    fn setting(&mut self, id: &ObjectId, (key, value): Entry<'_, '_>) -> Option<Value> {
        let name = key.get_ref().as_ref();
        if !id.kind.settings().contains(&name) {
            let hint = did_you_mean(name, id.kind.keys());
            let hint = or_all(hint, "its keys are", id.kind.keys());
            self.report(key.span().start, format!("{id}: no key {name}{hint}"));
            return None;
        }
        let checked = json(value.get_ref()).and_then(|value| id.kind.checked(name, value));
        checked
            .map_err(|error| self.report(key.span().start, format!("{id}: {name}: {error}")))
            .ok()
    }

    /// The text of a key that names an object.
    fn text(
        &mut self,
        kind: ObjectKind,
        key: &str,
        at: usize,
        table: &DeTable<'_>,
    ) -> Option<String> {
        let value = table.get(key);
        let text = value.and_then(|value| value.get_ref().as_str());
        if text.is_none() {
            let label = kind.table();
            match value {
                Some(value) => self.report(
                    value.span().start,
                    format!("{label}: {key}: must be a text in quotation marks"),
                ),
                None => self.report(at, format!("{label}: {key} is missing")),
            }
        }
        text.map(str::to_owned)
    }

    /// The result of a check of the key `key`.
    fn checked(
        &mut self,
        kind: ObjectKind,
        key: &str,
        at: usize,
        table: &DeTable<'_>,
        check: impl FnOnce() -> Result<String, String>,
    ) -> Option<String> {
        let at = table.get(key).map_or(at, |value| value.span().start);
        check()
            .map_err(|error| self.report(at, format!("{}: {key}: {error}", kind.table())))
            .ok()
    }

    fn report(&mut self, at: usize, message: String) {
        self.mistakes.push(Mistake {
            place: Some(self.place(at)),
            message,
        });
    }

    fn place(&self, at: usize) -> Place {
        Place {
            file: Arc::clone(self.file),
            line: 1 + self.line_starts.partition_point(|start| *start <= at),
        }
    }
}

/// The value as JSON, which the API takes.
fn json(value: &DeValue<'_>) -> Result<Value, String> {
    Ok(match value {
        DeValue::String(text) => text.as_ref().into(),
        DeValue::Boolean(is_on) => (*is_on).into(),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_err(|_| format!("{number} is too large"))?
            .into(),
        DeValue::Float(number) => {
            let parsed = number.as_str().parse().ok().and_then(Number::from_f64);
            parsed
                .ok_or_else(|| format!("{number} is not a number"))?
                .into()
        }
        DeValue::Datetime(_) => {
            return Err("no setting is a date; put a text in quotation marks".to_owned());
        }
        DeValue::Array(values) => values
            .iter()
            .map(|value| json(value.get_ref()))
            .collect::<Result<_, _>>()?,
        DeValue::Table(_) => return Err("no setting is a table".to_owned()),
    })
}

/// The hint, or all `names` if no known name is similar.
fn or_all(hint: String, what: &str, names: impl IntoIterator<Item = &'static str>) -> String {
    if hint.is_empty() {
        let names: Vec<_> = names.into_iter().collect();
        format!("; {what} {}", names.join(", "))
    } else {
        hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> (Document, Vec<String>) {
        let mut mistakes = Vec::new();
        let document = parse(&"a.toml".into(), text, Some("option"), &mut mistakes);
        (document, mistakes.iter().map(Mistake::to_string).collect())
    }

    #[test]
    fn a_document_declares_objects_with_their_labels_and_lines() {
        let (document, mistakes) = parsed(
            "managed_by = \"git\"\n[[service]]\naccount = \"acme\"\nid = \"api\"\nburst = 5\n\n\
             [[account]]\nid = \"acme\"\nmanaged_by = \"other\"\n\n\
             [[agent]]\naccount = \"acme\"\nid = \"ag_0123456789abcdefghij\"\nname = \"edge\"\n",
        );
        assert_eq!(mistakes, [""; 0]);
        let found: Vec<String> = document
            .objects
            .iter()
            .map(|object| {
                format!(
                    "{} {} {:?} {}",
                    object.place.line,
                    object.id,
                    object.managed_by,
                    Value::Object(object.settings.clone())
                )
            })
            .collect();
        assert_eq!(
            found,
            [
                r#"2 service acme/api Some("git") {"burst":5}"#,
                r#"7 account acme Some("other") {}"#,
                r#"11 agent acme/ag_0123456789abcdefghij None {"name":"edge"}"#,
            ]
        );
        let (document, _) = parsed("[[account]]\nid = \"acme\"\n");
        assert_eq!(document.objects[0].managed_by.as_deref(), Some("option"));
    }

    #[test]
    fn every_mistake_is_reported_with_line_key_and_suggestion() {
        let (_, mistakes) = parsed(
            "managed_by = \"two words\"\n[[services]]\n[account]\nid = \"x\"\n[[service]]\n\
             account = \"acme\"\nid = \"api\"\nbrust = 5\nburst = 0\nretries = 1\n[[service]]\n\
             id = \"b\"\n[[key]]\naccount = \"ACME\"\nname = \"k\"\n[[credential]]\n\
             account = \"acme\"\n[[service]]\naccount = \"acme\"\nid = 7\n",
        );
        let mut sorted = mistakes.clone();
        sorted.sort_by_key(|mistake| mistake.split(':').nth(1).unwrap().parse::<u32>().unwrap());
        let expected = [
            "a.toml:1: managed_by: \"two words\" is not a name of a manager: 1 to 60 characters of \
             A-Z, a-z, 0-9 and `._/-`, the first a letter or digit",
            "a.toml:2: services: no such key or kind of object; did you mean `service`?",
            "a.toml:3: account: write each object as a table [[account]]",
            "a.toml:8: service acme/api: no key brust; did you mean `burst`?",
            "a.toml:9: service acme/api: burst: at least 1",
            "a.toml:10: service acme/api: retries: invalid type: integer `1`, expected a boolean",
            "a.toml:11: service: account is missing",
            "a.toml:14: key: account: \"ACME\" is not an account id: 3 to 15 characters of a-z and \
             0-9",
            "a.toml:16: credential: name is missing",
            "a.toml:20: service: id: must be a text in quotation marks",
        ];
        assert_eq!(sorted, expected);
    }

    #[test]
    fn errors_of_the_syntax_have_their_line() {
        let (document, mistakes) = parsed("[[account]]\nid = acme\n[[account]]\nid \"b\"\n");
        assert!(document.objects.is_empty());
        assert!(mistakes.len() >= 2, "{mistakes:?}");
        assert!(mistakes[0].starts_with("a.toml:2: "), "{mistakes:?}");
        let (_, mistakes) = parsed("[[account]]\nid = \"abc\"\nid = \"abd\"\n");
        assert_eq!(mistakes, ["a.toml:3: duplicate key"]);
    }
}
